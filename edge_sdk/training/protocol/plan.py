"""The plan: what a device needs to know of a recipe. It is data, never code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from edge_sdk.checks import check_fields, need
from edge_sdk.nets import build
from edge_sdk.nets.memory_format import ChosenFormat, MemoryFormat, chosen_format, set_format
from edge_sdk.nets.precision import Precision
from edge_sdk.nets.supernet import Supernet
from edge_sdk.records import inline, read_record, table_of
from edge_sdk.training.protocol.client_part import ClientPart
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.update_codec import UpdateCoding
from profiles.checks import (
    flag,
    is_number,
    is_whole,
    whole,
)

# the keys of a plan's JSON, in the order in which they are written
_KEYS: Final = (
    *("backbone", "input_shape", "classes", "mean", "std", "depth", "learning_rate", "batch"),
    *("part", "epochs", "iterations", "norm", "momentum", "weight_decay", "codec", "update"),
    *("send_labels", "seed", "memory_format", "precision"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one client's training in one round.

    Attributes:
        backbone, input_shape, classes, mean, std: what `edge_sdk.nets.build` takes.
        depth: stages on the client; all stages for a client that trains the whole network.
        training: the numbers of training; in JSON they are keys of the plan itself.
        part: the method's half of the client.
        update: how the client codes what it has learnt.
        send_labels: whether labels travel with the features.
    """

    backbone: str
    input_shape: tuple[int, ...]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    depth: int
    training: Training = field(metadata=inline())
    part: ClientPart = field(default_factory=ClientPart)
    update: UpdateCoding = field(default_factory=UpdateCoding)
    send_labels: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, depth=whole(1), classes=whole(1), seed=whole(0), send_labels=flag)
        need(all(map(is_whole, self.input_shape)), "input_shape", "sizes", self.input_shape)
        for name in ("mean", "std"):
            value = getattr(self, name)
            need(all(map(is_number, value)), name, "numbers", value)
        need(
            self.part.inversion is None or len(self.input_shape) == 3,
            "input_shape",
            "images, of three axes, for a guard against inversion",
            self.input_shape,
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON has it."""
        table = table_of(self)
        return {key: table[key] for key in _KEYS if key in table}

    @classmethod
    def from_dict(cls, data: object) -> Plan:
        """Read a plan.

        Raises: ConfigurationError naming what is missing, unknown or wrong.
        """
        if isinstance(data, Mapping):  # their defaults would train something else
            missing = [key for key in ("part", "update") if key not in data]
            need(not missing, "plan", f"also {', '.join(missing)}", sorted(data))
        return read_record(cls, data, "plan", unknown="update this device")


def network_of(plan: Plan) -> Supernet:
    """The plan's network with the weights of its seed, to copy parts of.

    Weights are contiguous where the plan leaves the memory format open. Each process builds the
    network once: that takes longer than a client's round.
    """
    norm = plan.training.norm
    more: dict[str, Any] = {} if norm is None else {"norm": norm}
    if plan.part.bottleneck is not None:
        more["bottleneck"] = (plan.depth, plan.part.bottleneck)
    return _network(
        plan.backbone,
        plan.seed,
        tuple(more.items()),
        plan.training.memory_format,
        plan.training.precision,
        input_shape=plan.input_shape,
        classes=plan.classes,
        mean=plan.mean,
        std=plan.std,
    )


def without_last_layer(weights: Mapping[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """The weights without those of the network's last layer."""
    mark = network_of(plan).segment(0, None).classifier_prefix
    return {name: tensor for name, tensor in weights.items() if not name.startswith(mark)}


@lru_cache(maxsize=8)
def _network(
    backbone: str,
    seed: int,
    more: tuple[tuple[str, Any], ...],
    memory_format: MemoryFormat,
    precision: Precision,
    **shape: Any,
) -> Supernet:
    net = build(backbone, seed=seed, **shape, **dict(more))
    net.precision = precision
    if memory_format == "channels_last":
        set_format(net, memory_format)
    return net


def with_format(plan: Plan, device: torch.device) -> Plan:
    """The plan with a memory format: where it leaves that open, the one that is faster here.

    Args:
        device: where its part of the network trains.
    """
    numbers = plan.training
    if numbers.memory_format != "auto":
        return plan
    # All that the measured network and its batch depend on, and nothing else: plans that differ in
    # a method's or an optimiser's numbers share one measurement, and no chance parts them.
    measured = replace(
        plan,
        training=Training(1.0, numbers.batch, norm=numbers.norm, precision=numbers.precision),
        part=ClientPart(whole=plan.part.whole, bottleneck=plan.part.bottleneck),
        update=UpdateCoding(),
        send_labels=True,
    )
    chosen = _format_here(measured, device.type)
    return replace(plan, training=replace(numbers, memory_format=chosen))


@lru_cache(maxsize=8)
def _format_here(plan: Plan, device: str) -> ChosenFormat:
    net = network_of(plan)
    part = net.segment(0, None) if plan.part.whole else net.prefix(plan.depth)
    return chosen_format("auto", part, plan.input_shape, plan.training.batch, device)
