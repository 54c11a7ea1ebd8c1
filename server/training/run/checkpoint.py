"""A run on disk: after each round one file with all that the next one depends on.

A checkpoint is a safetensors file: the global weights, the server's momentum, the method's memory,
what was seen of clients and what they keep to themselves, and as JSON in its metadata the recipe,
the clients' depths and the rounds so far.
It is written whole or not at all, and the one before stays beside it. Nothing is pickled. What is
drawn at random is keyed by seed, round and client, so there is no generator to save.

    folder/checkpoints/round-000012.safetensors
    folder/checkpoints/round-000013.safetensors
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

from edge_sdk.durable import make_folder, sync_folder, write_atomic
from edge_sdk.errors import ConfigurationError, FrameError, StorageError
from server.training.simulation.build import World

logger = logging.getLogger(__name__)

Row = dict[str, Any]

KEPT: Final = 2
FORMAT: Final = 3
_NAME: Final = re.compile(r"round-(\d{6,})\.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A run after a round.

    Attributes:
        recipe: as `Recipe.to_dict` has it.
        rows: the report's rounds so far, the last one's number is `round`.
        depths: by client; they stay as they were when it began to train.
        loop: what was under way.
        tensors: by `net/NAME`, `momentum/STAGE/PLACE`, `memory/NAME`, `seen/NAME`,
            `client/CLIENT/NAME` and `engine/...`, what is under way.
    """

    round: int
    recipe: Mapping[str, Any]
    rows: list[Row]
    depths: Mapping[str, int]
    loop: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def restore(self, world: World) -> None:
        """Put everything back into a world built from the same recipe.

        Raises: FrameError where the tensors do not fit it.
        """
        world.state.write(self._part("net/"))
        momentum = {}
        for key, tensor in self._part("momentum/").items():
            stage, _, place = key.partition("/")
            momentum[int(stage), int(place)] = tensor
        world.state.set_momentum(momentum)
        world.state.memory = {k: t.to(world.device) for k, t in self._part("memory/").items()}
        world.state.seen = self._part("seen/")
        for key, tensor in self._part("client/").items():
            name, _, weight = key.partition("/")
            if name not in world.clients:
                raise FrameError(f"checkpoint: client {name}: the recipe has no such client")
            world.clients[name].personal[weight] = tensor.to(world.device)
        begun = {k: t.to(world.device) for k, t in self._part("engine/").items()}
        world.loop.load_state_dict(self.loop, begun)

    def _part(self, start: str) -> dict[str, Tensor]:
        found = {k.removeprefix(start): t for k, t in self.tensors.items() if k.startswith(start)}
        return dict(sorted(found.items()))


def save_checkpoint(folder: Path, world: World, rows: list[Row]) -> Path:
    """Write the run as it is after its last row, and remove all but the newest two.

    Raises: StorageError; the checkpoint before stays.
    """
    tensors = {f"net/{name}": tensor for name, tensor in world.state.read().items()}
    for (stage, place), tensor in world.state.momentum().items():
        tensors[f"momentum/{stage}/{place}"] = tensor
    tensors |= {f"memory/{name}": tensor for name, tensor in world.state.memory.items()}
    tensors |= {f"seen/{name}": tensor for name, tensor in world.state.seen.items()}
    for client in world.clients.values():
        tensors |= {f"client/{client.name}/{key}": t for key, t in client.personal.items()}
    loop, begun = world.loop.state_dict()
    tensors |= {f"engine/{name}": tensor for name, tensor in begun.items()}
    said = {
        "format": FORMAT,
        "recipe": world.recipe.to_dict(),
        "depths": {name: plan.depth for name, plan in world.plans.items()},
        "engine": loop,
        "rows": rows,
    }
    raw = save(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        metadata={"run": orjson.dumps(said).decode()},
    )
    place_of = _folder(folder)
    make_folder(place_of)
    path = place_of / f"round-{rows[-1]['round']:06}.safetensors"
    write_atomic(path, raw)
    prune(folder)
    return path


def prune(folder: Path) -> None:
    """Remove all but the newest two."""
    for old in _found(folder)[KEPT:]:
        old.unlink()


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is sound; None where there has been none.

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
            " cannot; remove the folder to begin anew"
        )
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read one.

    Raises: FrameError naming the file and what is wrong with it.
    """
    try:
        raw = path.read_bytes()
        header = orjson.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        said = orjson.loads(header["__metadata__"]["run"])
        if said["format"] != FORMAT:
            raise FrameError(f"{path}: expected format {FORMAT}, got {said['format']}")
        rows = said["rows"]
        return Checkpoint(
            rows[-1]["round"],
            said["recipe"],
            rows,
            said["depths"],
            said["engine"],
            load(raw),
        )
    except (OSError, SafetensorError, ValueError, KeyError, IndexError, TypeError) as err:
        raise FrameError(f"{path}: no checkpoint ({type(err).__name__}: {err})") from err


def discard(folder: Path) -> None:
    """Remove the checkpoints, the newest first: what is left is never newer than what has gone."""
    for path in _found(folder):
        path.unlink()
    if _folder(folder).is_dir():
        sync_folder(_folder(folder))


def check_same_recipe(checkpoint: Checkpoint, world: World) -> None:
    """See that a run goes on as it began; only more rounds may be asked for.

    Raises: ConfigurationError naming what differs.
    """
    then, now = _comparable(checkpoint.recipe), _comparable(world.recipe.to_dict())
    differing = sorted(key for key in then | now if then.get(key) != now.get(key))
    if differing:
        key = differing[0]
        raise ConfigurationError(
            f"--resume: {key}: expected {then.get(key)!r} as this run began, got {now.get(key)!r};"
            " give the same recipe and seed, or another --out"
        )


def _comparable(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """By dotted name and as JSON has it, without what may change: rounds, and where the data is."""
    flat: dict[str, Any] = {}
    for key, value in orjson.loads(orjson.dumps(dict(recipe))).items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": entry for inner, entry in value.items()}
        else:
            flat[key] = value
    return {k: v for k, v in flat.items() if k not in {"train.rounds", "data.folder"}}


def _folder(folder: Path) -> Path:
    return folder / "checkpoints"


def _found(folder: Path) -> list[Path]:
    """The newest first."""
    entries = _folder(folder).iterdir() if _folder(folder).is_dir() else []
    numbered = [(int(m[1]), path) for path in entries if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, reverse=True)]
