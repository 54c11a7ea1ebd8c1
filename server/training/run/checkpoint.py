"""Checkpoints: after each round one file with everything that the next round depends on.

A checkpoint is a safetensors file: the global weights, the method's memory, what was seen of
clients and the weights they keep to themselves; and as JSON in its metadata the recipe, the
clients' depths and the rounds so far. It is written whole or not at all, and the one before it
stays. Nothing is pickled. Random draws are keyed by seed, round and client, so there is no
generator to save; and momentum begins anew with each round.

    FOLDER/checkpoints/round-000012.safetensors
    FOLDER/checkpoints/round-000013.safetensors
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from edge_sdk.cli.times import plural
from edge_sdk.durable import make_folder, sync_folder, write_atomic
from edge_sdk.errors import ConfigurationError, FrameError, StorageError
from edge_sdk.nets.memory_format import ChosenFormat
from edge_sdk.training.protocol.messages import Weights
from server.training.recipe.recipe import Recipe
from server.training.run.run import Row, Run

logger = logging.getLogger(__name__)

KEPT: Final = 2
FORMAT: Final = 3
# places of files, which may have moved, and what only tests
_MAY_CHANGE: Final = {
    *("train.rounds", "train.backbone_folder", "train.start", "data.folder", "method_folder"),
    *("evaluate.every", "evaluate.rho", "evaluate.local", "evaluate.powers"),
    *("export.codec", "export.bottleneck"),
}
_NAME: Final = re.compile(r"round-(\d{6,})\.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A run after a round.

    Attributes:
        recipe: from `Recipe.to_dict`.
        rows: the report's rounds so far, the last one's number is `round`.
        depths: by client; they stay the same for the whole run.
        loop: the round loop's `state_dict`, without its tensors.
        tensors: by `net/NAME`, `memory/NAME`, `seen/NAME`, `client/CLIENT/NAME` and, of the round
            loop, `engine/NAME`. Those of 0.1.0 also have `momentum/STAGE/PLACE`, which no round
            begins with any more.
        memory_format: of the server's network, and of clients that are simulated.
    """

    round: int
    recipe: Mapping[str, Any]
    rows: list[Row]
    depths: Mapping[str, int]
    loop: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    memory_format: ChosenFormat

    def restore(self, run: Run) -> None:
        """Restore a run that was built from the same recipe.

        Raises: FrameError where the tensors do not fit it.
        """
        run.state.hold_auxiliaries(run.plans.values())
        weights = self._part("net/")
        lacking = sorted(run.state.read().keys() - weights.keys())
        if lacking:
            raise FrameError(
                f"checkpoint: expected {lacking[0]}, which {run.recipe.method} trains now; another"
                " release began this run: finish it with that one, or start another run"
            )
        run.state.write(weights)
        run.state.memory = {k: t.to(run.device) for k, t in self._part("memory/").items()}
        run.state.seen = self._part("seen/")
        personal: dict[str, Weights] = {}
        for key, tensor in self._part("client/").items():
            name, _, weight = key.partition("/")
            personal.setdefault(name, {})[weight] = tensor.to(run.device)
        for name, weights in personal.items():
            run.set_personal(name, weights)
        kept = {k: t.to(run.device) for k, t in self._part("engine/").items()}
        run.loop.load_state_dict(self.loop, kept)

    def _part(self, start: str) -> dict[str, Tensor]:
        found = {k.removeprefix(start): t for k, t in self.tensors.items() if k.startswith(start)}
        return dict(sorted(found.items()))


def find_checkpoint(
    folder: Path, *, resume: bool, force: bool, otherwise: str
) -> Checkpoint | None:
    """The checkpoint that a run in `folder` continues from; None for a run that starts.

    Args:
        force: replace a finished run.
        otherwise: what to do instead of resuming, for the message.
    Raises: ConfigurationError where a new run would overwrite an unfinished one, or a finished one
        without `force`; StorageError if there are checkpoints and all are damaged.
    """
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None or resume:
        return checkpoint
    rounds = checkpoint.recipe["train"]["rounds"]
    if checkpoint.round < rounds:
        raise ConfigurationError(
            f"{folder}: holds a run that stopped after round {checkpoint.round} of {rounds}; add"
            f" --resume to continue, or {otherwise}"
        )
    if not force:
        raise ConfigurationError(
            f"{folder}: holds a finished run of {plural(checkpoint.round, 'round')}; {otherwise},"
            " add --resume to go on with more rounds, or --force to replace it"
        )
    return None


def continue_run(folder: Path, run: Run, checkpoint: Checkpoint | None) -> list[Row]:
    """Restore a run from its checkpoint; without one, discard those of a finished run.

    Returns: the rows of the rounds so far.
    Raises: ConfigurationError where the recipe has changed; FrameError where the tensors do not
        fit it.
    """
    if checkpoint is None:
        discard(folder)
        return []
    check_same_recipe(checkpoint, run.recipe)
    checkpoint.restore(run)
    prune(folder)  # a kill may have come between writing one and removing another
    return checkpoint.rows


def save_checkpoint(folder: Path, run: Run, rows: list[Row]) -> Path:
    """Write the run as it is after its last row, and remove all but the newest two.

    Raises: StorageError; the checkpoint before stays.
    """
    tensors = {f"net/{name}": tensor for name, tensor in run.state.read().items()}
    tensors |= {f"memory/{name}": tensor for name, tensor in run.state.memory.items()}
    tensors |= {f"seen/{name}": tensor for name, tensor in run.state.seen.items()}
    for name, personal in run.personal().items():
        tensors |= {f"client/{name}/{key}": tensor for key, tensor in personal.items()}
    loop, kept = run.loop.state_dict()
    tensors |= {f"engine/{name}": tensor for name, tensor in kept.items()}
    metadata = {
        "format": FORMAT,
        "recipe": run.recipe.to_dict(),
        "depths": {name: plan.depth for name, plan in run.plans.items()},
        "engine": loop,
        "memory_format": run.memory_format,
        "rows": rows,
    }
    raw = save(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        metadata={"run": orjson.dumps(metadata).decode()},
    )
    make_folder(_folder(folder))
    path = _folder(folder) / f"round-{rows[-1]['round']:06}.safetensors"
    write_atomic(path, raw)
    prune(folder)
    return path


def prune(folder: Path) -> None:
    """Remove all checkpoints but the newest two."""
    for old in _found(folder)[KEPT:]:
        old.unlink()


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that can be read; None where there is none.

    Raises: StorageError if there are checkpoints and all are damaged.
    """
    found = _found(folder)
    for path in found:
        try:
            return read_checkpoint(path)
        except FrameError as err:
            logger.warning("%s; going back to the one before", err)
    if found:
        raise StorageError(
            f"{_folder(folder)}: expected a checkpoint that can be read, found {len(found)} that"
            " cannot; remove the folder to start again"
        )
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises: FrameError naming the file and what is wrong with it.
    """
    try:
        raw = path.read_bytes()
        header = orjson.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        metadata = orjson.loads(header["__metadata__"]["run"])
        if metadata["format"] != FORMAT:
            raise FrameError(f"{path}: expected format {FORMAT}, got {metadata['format']}")
        rows = metadata["rows"]
        return Checkpoint(
            rows[-1]["round"],
            metadata["recipe"],
            rows,
            metadata["depths"],
            metadata["engine"],
            load(raw),
            _format_of(metadata),
        )
    except (OSError, SafetensorError, ValueError, KeyError, IndexError, TypeError) as err:
        raise FrameError(f"{path}: no checkpoint ({type(err).__name__}: {err})") from err


def _format_of(metadata: Mapping[str, Any]) -> ChosenFormat:
    """The memory format of a checkpoint; runs of earlier releases knew one."""
    return "channels_last" if metadata.get("memory_format") == "channels_last" else "contiguous"


def discard(folder: Path) -> None:
    """Remove the checkpoints, the newest first, so that a kill leaves older ones only."""
    for path in _found(folder):
        path.unlink()
    if _folder(folder).is_dir():
        sync_folder(_folder(folder))


def check_same_recipe(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Check that a run continues by the recipe it began with; only the rounds may differ.

    Raises: ConfigurationError naming what differs.
    """
    key = differing_key(checkpoint, recipe)
    if key is not None:
        then, now = _comparable(checkpoint.recipe), _comparable(recipe.to_dict())
        raise ConfigurationError(
            f"--resume: {key}: expected {then.get(key)!r} as this run began, got {now.get(key)!r};"
            " give the same recipe and seed, or start another run"
        )


def differing_key(checkpoint: Checkpoint, recipe: Recipe) -> str | None:
    """The first key, by dotted name, whose value a run cannot change; None for the same recipe."""
    then, now = _comparable(checkpoint.recipe), _comparable(recipe.to_dict())
    return min((key for key in then | now if then.get(key) != now.get(key)), default=None)


def _comparable(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe by dotted name, as in JSON, without what may change."""
    flat: dict[str, Any] = {}
    for key, value in orjson.loads(orjson.dumps(dict(recipe))).items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": entry for inner, entry in value.items()}
        else:
            flat[key] = value
    flat.setdefault("data.held_out", 0.0)  # runs of the first version held nothing out
    if "data.name" in flat:
        flat["data.name"] = flat["data.name"].partition("=")[0]  # the rest is a folder
    return {k: v for k, v in flat.items() if k not in _MAY_CHANGE}


def _folder(folder: Path) -> Path:
    return folder / "checkpoints"


def _found(folder: Path) -> list[Path]:
    """Checkpoint files, the newest first."""
    entries = _folder(folder).iterdir() if _folder(folder).is_dir() else []
    numbered = [(int(m[1]), path) for path in entries if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, reverse=True)]
