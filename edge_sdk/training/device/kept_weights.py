"""Files that a device keeps between rounds and over a restart.

STATE/training/NAME.safetensors   its personal weights
STATE/training/NAME.update        an update that it has not handed in
"""

from __future__ import annotations

import logging
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save

from edge_sdk.bundles.personal_weights import FOLDER, NAME, run_of
from edge_sdk.durable import make_folder, storage_error, sync_folder, write_atomic
from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.training.protocol.messages import Update, Weights, from_bytes, to_bytes

logger = logging.getLogger(__name__)


def save_personal(state: Path, training: str, weights: Weights, run: str = "") -> None:
    """Save personal weights in the state folder, whole or not at all.

    Args:
        run: id of the training's run; weights of another run of that name are replaced.
    Raises: StorageError; ConfigurationError for a training with a name that is no file name.
    """
    path = _path(state, training, "safetensors")
    make_folder(path.parent, mode=0o700)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    write_atomic(path, save(tensors, metadata={"run": run}), mode=0o600)


def load_personal(state: Path, training: str, run: str | None = None) -> Weights:
    """Load the personal weights that were saved; empty where there are none yet.

    Args:
        run: takes weights of that run only; None takes those of any.
    Raises: ConfigurationError naming the file, if it is damaged.
    """
    path = _path(state, training, "safetensors")
    try:
        raw = path.read_bytes()
        weights: Weights = load(raw)
    except FileNotFoundError:
        return {}
    except (OSError, SafetensorError) as err:
        text = f"{path}: cannot be read ({err}); remove the file to start again"
        raise ConfigurationError(text) from err
    return weights if run in {None, run_of(raw)} else {}


def save_update(state: Path, training: str, run: str, update: Update) -> None:
    """Save an update until it is handed in, in place of the one before.

    Raises: as `save_personal`.
    """
    path = _path(state, training, "update")
    make_folder(path.parent, mode=0o700)
    write_atomic(path, run.encode() + b"\n" + to_bytes(update), mode=0o600)


def load_update(state: Path, training: str, run: str) -> Update | None:
    """Load the update that is not handed in yet; None where there is none of this run.

    An update that cannot be read is lost, and training goes on.
    """
    path = _path(state, training, "update")
    try:
        saved_run, _, raw = path.read_bytes().partition(b"\n")
        update = from_bytes(raw) if saved_run == run.encode() else None
    except FileNotFoundError:
        return None
    except (OSError, FrameError) as err:
        logger.warning("%s: cannot be read, its update is lost: %s", path, err)
        return None
    return update if isinstance(update, Update) else None


def drop_update(state: Path, training: str) -> None:
    """Remove the saved update: it is handed in, or training is over.

    Raises: StorageError.
    """
    path = _path(state, training, "update")
    try:
        path.unlink(missing_ok=True)
        if path.parent.is_dir():
            sync_folder(path.parent)
    except OSError as err:
        raise storage_error(path, 0, err) from err


def _path(state: Path, training: str, ending: str) -> Path:
    # the name comes from the trainer, and must not lead out of the folder
    if not NAME.fullmatch(training):
        raise ConfigurationError(
            f"training: expected a name of letters, digits, '.', '_' and '-', got {training!r:.100}"
        )
    return state / FOLDER / f"{training}.{ending}"
