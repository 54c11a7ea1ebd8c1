"""The networks of a run: its weights file as modules, by the record next to it.

Names in the file, each a part's `state_dict`:

    stages.…, head.…, normalise.…    the network; exits.D.… of trained exit heads only
    server.stages.…, server.head.…   the server's own stages, where it has some (HARMONY)
    auxiliary.D.…                    an auxiliary model that answers on the device (BESplit)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from edge_sdk.durable import write_atomic
from edge_sdk.nets import Supernet, build, use_network
from edge_sdk.training.client.auxiliary import Auxiliary, auxiliary_of
from exporters.composition import Composition
from exporters.errors import ExportError
from exporters.run.record import WEIGHTS, NetworkRecord, RunRecord, read_run

SERVER: Final = "server."
AUXILIARY: Final = "auxiliary."


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A finished run, ready to be scored and exported; its modules are in eval mode.

    Attributes:
        auxiliaries: by depth.
    """

    record: RunRecord
    halves: Composition
    auxiliaries: Mapping[int, Auxiliary] = field(default_factory=dict)

    def exit(self, depth: int) -> nn.Module:
        """The model that answers on a device of that depth: raw inputs (B, ...) to logits."""
        if self.record.auxiliary is not None:
            return self.auxiliaries[depth]
        net = self.halves.device
        return nn.Sequential(net.prefix(depth), net.exit_head(depth))


def write_weights(folder: Path, trained: TrainedRun) -> None:
    """Write the weights of a run into its folder.

    Raises: StorageError.
    """
    record, halves = trained.record, trained.halves
    heads = record.exits if record.auxiliary is None else ()
    left_out = tuple(f"exits.{depth}." for depth in halves.device.cuts if depth not in heads)
    tensors = {
        name: tensor
        for name, tensor in halves.device.state_dict().items()
        if not name.startswith(left_out)
    }
    if record.own_server:
        tensors |= {
            f"{SERVER}{name}": tensor
            for name, tensor in halves.server.state_dict().items()
            if name.startswith(("stages.", "head."))
        }
    for depth, model in trained.auxiliaries.items():
        tensors |= {f"{AUXILIARY}{depth}.{name}": t for name, t in model.state_dict().items()}
    # copies, because two names of one tensor cannot be saved
    plain = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    origin = {"gate": record.gate, "run": record.run}  # for `splitedge export --weights`
    write_atomic(folder / WEIGHTS, save(plain, origin))


def load_run(folder: Path) -> TrainedRun:
    """Read the run in `folder`.

    Raises: ExportError naming the file, and what it should hold.
    """
    record = read_run(folder)
    path = folder / WEIGHTS
    try:
        tensors = load(path.read_bytes())
    except OSError as err:
        raise ExportError(f"{path}: cannot be read ({err.strerror or err})") from err
    except SafetensorError as err:
        raise ExportError(f"{path}: expected a safetensors file ({err})") from err
    device = build_network(record.network)
    plain = {n: t for n, t in tensors.items() if not n.startswith((SERVER, AUXILIARY))}
    _load(device, device.state_dict() | plain, path)
    server = device
    if record.own_server:
        server = build_network(record.network)
        _load(server, server.state_dict() | _part(tensors, SERVER), path)
    auxiliaries = {}
    if record.auxiliary is not None:
        for depth in record.exits:
            seed = record.network.seed
            auxiliaries[depth] = auxiliary_of(device, depth, record.auxiliary, seed).eval()
            _load(auxiliaries[depth], _part(tensors, f"{AUXILIARY}{depth}."), path)
    return TrainedRun(record, Composition(device.eval(), server.eval()), auxiliaries)


def build_network(record: NetworkRecord) -> Supernet:
    """The network of a record, with the weights of its seed.

    A user's own function is imported from the current folder or from the record's.

    Raises: ConfigurationError for a backbone that is not known here.
    """
    place = record.backbone_folder
    use_network(record.backbone, (Path.cwd(), *(() if place is None else (place,))))
    more: dict[str, Any] = {"norm": record.norm, "bottleneck": record.bottleneck}
    return build(
        record.backbone,
        classes=record.classes,
        input_shape=record.input_shape,
        mean=record.mean,
        std=record.std,
        seed=record.seed,
        **{name: value for name, value in more.items() if value is not None},
    )


def _part(tensors: Mapping[str, Tensor], start: str) -> dict[str, Tensor]:
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}


def _load(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Set all of a module's weights.

    Raises: ExportError if they are another network's, or not finite.
    """
    try:
        module.load_state_dict(dict(tensors))
    except RuntimeError as err:
        first = str(err).strip().splitlines()[-1].strip()
        raise ExportError(
            f"{path}: does not fit the network of its record ({first:.200}); keep the files of one"
            " run together"
        ) from err
    bad = next((name for name, t in tensors.items() if not torch.isfinite(t).all()), None)
    if bad is not None:
        raise ExportError(
            f"{path}: {bad} is not finite: the training diverged; train again with a smaller"
            " learning_rate"
        )
