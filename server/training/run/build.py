"""Parts of every run, built from its recipe: data, network, plans and the server's state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from edge_sdk.errors import ConfigurationError
from edge_sdk.installation import names_function
from edge_sdk.nets import build
from edge_sdk.nets.memory_format import ChosenFormat, chosen_format, set_format
from edge_sdk.nets.own.network import check_training
from edge_sdk.nets.precision import has_bf16
from edge_sdk.nets.supernet import Supernet
from edge_sdk.training.client.auxiliary import auxiliary_of
from edge_sdk.training.data.load import Dataset, described, labelled_dataset, open_data
from edge_sdk.training.protocol.plan import Plan
from profiles.allocation import fit_to_cut, supersfl_depth
from server.training.core.server_state import ServerState
from server.training.methods.method import Method
from server.training.recipe.privacy import check_network
from server.training.recipe.recipe import Recipe
from server.training.run.first_weights import load_first_weights

logger = logging.getLogger(__name__)


def load_data(recipe: Recipe, say: Callable[[str], None] = lambda _: None) -> Dataset:
    """The recipe's data set in its three parts, cut to the recipe's `train_max` and `test_max`.

    The held-out part is cut in proportion.

    Args:
        say: receives one line about what was read.
    Raises: ConfigurationError for a malignant class that the data set does not have.
    """
    data = recipe.data
    samples = open_data(data.word, folder=data.folder)
    dataset = labelled_dataset(samples, held_out=data.held_out)
    if data.malignant and max(data.malignant) >= dataset.classes:
        raise ConfigurationError(
            f"data: malignant: expected classes from 0 to {dataset.classes - 1},"
            f" got {max(data.malignant)}"
        )
    dataset = dataset.limited(data.train_max, data.test_max)
    say(described(samples, dataset.sizes))
    return dataset


def build_network(recipe: Recipe, dataset: Dataset) -> Supernet:
    """The recipe's network for these data, with the weights of its seed.

    Raises: ConfigurationError if the method narrows a cut and the recipe does not say which, and
        for a network of the user's own that cannot be cut or trained, naming the layer.
    """
    norm = recipe.train.training.norm
    more: dict[str, Any] = {} if norm is None else {"norm": norm}
    channels, depth = recipe.built_method.client.bottleneck, recipe.train.depth
    if channels is not None:
        if depth is None:
            raise ConfigurationError(
                "train: depth: expected the depth at which all clients are cut, since"
                f" {recipe.method} has a bottleneck there"
            )
        more["bottleneck"] = (depth, channels)
    net = build(
        recipe.train.backbone,
        classes=dataset.classes,
        input_shape=dataset.x_train.shape[1:],
        mean=dataset.mean,
        std=dataset.std,
        seed=recipe.seed,
        **more,
    )
    net.precision = recipe.train.training.precision
    if names_function(net.name):
        check_training(net)
    distil = recipe.built_method.client.distil
    if distil is not None:
        auxiliary_of(net, net.cuts[0], distil.head, recipe.seed)  # refuses features without maps
    return net


def lay_out(
    net: Supernet, recipe: Recipe, device: str = "cpu", before: ChosenFormat | None = None
) -> ChosenFormat:
    """Lay out the weights of a new network in the recipe's memory format.

    Args:
        net: on the CPU.
        device: its type, where the network will train.
        before: the format of this run's earlier rounds, which a resumed run keeps.
    Returns: the format; for `auto` the one that is faster here.
    """
    numbers = recipe.train.training
    chosen = before or chosen_format(
        numbers.memory_format, net.segment(0, None), net.input_shape, numbers.batch, device
    )
    set_format(net, chosen)
    if numbers.precision == "bf16" and not has_bf16(device):
        logger.warning(
            "precision bf16: expected a processor with instructions for bf16, got one without;"
            " training takes longer than with fp32, the recipe's default"
        )
    return chosen


def plan_of(recipe: Recipe, method: Method, dataset: Dataset, depth: int) -> Plan:
    """The plan of a client of that depth."""
    train = recipe.train
    return Plan(
        backbone=train.backbone,
        input_shape=tuple(dataset.x_train.shape[1:]),
        classes=dataset.classes,
        mean=dataset.mean,
        std=dataset.std,
        depth=depth,
        training=train.training,
        part=method.client,
        update=train.update,
        send_labels=method.labels == "sent",
        seed=recipe.seed,
    )


def server_state(recipe: Recipe, method: Method, net: Supernet) -> ServerState:
    """The state of the server's half of the recipe, with `net` as the global network.

    Raises: ConfigurationError where the method's noise does not cover this network, and for a
        `start` that is no file of its weights.
    """
    check_network(method, net)
    train = recipe.train
    first = {} if train.start is None else load_first_weights(net, train.start)
    rate = train.server_learning_rate or train.training.learning_rate
    return ServerState(
        net,
        replace(train.training, learning_rate=rate),
        method.trunk,
        clip=train.server_clip,
        decay=train.decay,
        first=first,
    )


def check_depth(net: Supernet, depth: int) -> None:
    """Check that a recipe's depth is one of the network's cuts.

    Raises: ConfigurationError.
    """
    if depth not in net.cuts:
        cuts = ", ".join(map(str, net.cuts))
        raise ConfigurationError(
            f"train: depth: expected one of {net.name}'s cuts, {cuts}; got {depth}"
        )


def supersfl_depths(
    net: Supernet, memory_gb: Sequence[float], latency_ms: Sequence[float]
) -> list[int]:
    """Depths by SuperSFL's Eq. 1, taken down to cuts of the network.

    Args:
        memory_gb, latency_ms: of each client; Eq. 1 compares a latency with the least and the most.
    """
    low, high = min(latency_ms, default=0.0), max(latency_ms, default=0.0)
    return [
        fit_to_cut(supersfl_depth(memory, latency, low, high, net.L), net.cuts)
        for memory, latency in zip(memory_gb, latency_ms, strict=True)
    ]
