"""The learnt head on disk, with the samples that it was learnt from: STATE/learning/head.npz.

The file belongs to one exit head of one bundle. With another bundle, learning starts anew, and the
file is replaced once something is learnt. It holds features of the device's inputs, so only the
agent's user may read it.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from edge_sdk.damage import DAMAGED, reason_of
from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.learning.head import Head
from edge_sdk.learning.personalise import Personalisation, Sample

logger = logging.getLogger(__name__)

FILE: Final = Path("learning", "head.npz")
FORMAT: Final = 1
_KINDS: Final = ("learnt", "held_out")


def identity_of(bundle: str, base: Head) -> str:
    """A name for the exit head of a bundle: the bundle's, and a hash of the head's own weights."""
    digest = hashlib.sha256(base.weight.tobytes())
    digest.update(base.bias.tobytes())
    return f"{FORMAT} {bundle} {digest.hexdigest()}"


def save_head(state: Path, identity: str, own: Personalisation) -> None:
    """Keep the head and its samples.

    Raises: StorageError.
    """
    arrays: dict[str, Any] = {
        "identity": np.array(identity),
        "weight": own.head.weight,
        "bias": own.head.bias,
    }
    for kind in _KINDS:
        samples: Iterable[Sample] = tuple(getattr(own, kind))
        arrays[f"{kind}_features"] = _rows([each.features for each in samples], own.base.features)
        arrays[f"{kind}_targets"] = _rows([each.target for each in samples], len(own.base.bias))
    raw = io.BytesIO()
    np.savez(raw, **arrays)
    path = state / FILE
    make_folder(path.parent, mode=0o700)
    write_atomic(path, raw.getvalue(), mode=0o600)


def load_head(state: Path, identity: str, own: Personalisation) -> bool:
    """Give `own` the head and samples that were kept, if they are of the same exit head.

    Returns: whether there were some. A file that cannot be read counts as none, and is logged.
    """
    path = state / FILE
    try:
        with np.load(path, allow_pickle=False) as file:
            if str(file["identity"]) != identity:
                return False
            head = Head(_array(file, "weight"), _array(file, "bias"))
            samples = {
                kind: [
                    Sample(features, target)
                    for features, target in zip(
                        _array(file, f"{kind}_features"),
                        _array(file, f"{kind}_targets"),
                        strict=True,
                    )
                ]
                for kind in _KINDS
            }
    except FileNotFoundError:
        return False
    except DAMAGED as err:
        logger.warning("%s: cannot be read (%s); learning starts anew", path, reason_of(err))
        return False
    shapes = {head.weight.shape == own.base.weight.shape, head.bias.shape == own.base.bias.shape}
    for each in (sample for kind in _KINDS for sample in samples[kind]):
        shapes.add(each.features.shape == (own.base.features,))
        shapes.add(each.target.shape == own.base.bias.shape)
    if shapes != {True} or not head.finite:
        logger.warning("%s: expected weights of this exit head; learning starts anew", path)
        return False
    own.learnt.extend(samples["learnt"])
    own.held_out.extend(samples["held_out"])
    own.take(head)
    return True


def _rows(rows: list[Any], width: int) -> Any:
    return np.stack(rows) if rows else np.zeros((0, width), np.float32)


def _array(file: Any, name: str) -> Any:
    """A float32 array of finite numbers."""
    array = file[name]
    if array.dtype != np.float32 or not np.isfinite(array).all():
        raise ValueError(f"{name} is not of finite float32 numbers")
    return array
