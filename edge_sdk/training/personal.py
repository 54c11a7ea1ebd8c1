"""What a device keeps to itself between rounds and runs: its personal weights, on disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import load, save

from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.errors import ConfigurationError
from edge_sdk.training.messages import Weights

FOLDER: Final = "training"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def save_personal(state: Path, training: str, weights: Weights) -> None:
    """Keep them in the state folder, whole or not at all.

    Raises: StorageError; ConfigurationError for a training whose name is no file name.
    """
    path = _path(state, training)
    make_folder(path.parent, mode=0o700)
    raw = save({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()})
    write_atomic(path, raw, mode=0o600)


def load_personal(state: Path, training: str) -> Weights:
    """What the last run kept; empty where there is nothing yet.

    Raises: ConfigurationError naming the file, if it is damaged.
    """
    path = _path(state, training)
    try:
        weights: Weights = load(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, SafetensorError) as err:
        text = f"{path}: cannot be read ({err}); remove it to begin anew"
        raise ConfigurationError(text) from err
    return weights


def _path(state: Path, training: str) -> Path:
    # the name comes from the trainer, and a file name shall not leave its folder
    if not _NAME.fullmatch(training):
        raise ConfigurationError(
            f"training: expected a name of letters, digits, '.', '_' and '-', got {training!r:.100}"
        )
    return state / FOLDER / f"{training}.safetensors"
