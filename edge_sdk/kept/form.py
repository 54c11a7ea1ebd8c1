"""Form of a folder of kept inputs: the model's input and classes, and what its files are."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from edge_sdk.errors import ConfigurationError
from edge_sdk.manifest import BundleManifest, TensorSpec

Array = NDArray[Any]

FORMAT: Final = 1
FORM: Final = "kept.json"


@dataclass(frozen=True, slots=True)
class KeptForm:
    """Input and classes of the model whose inputs a folder keeps.

    Attributes:
        ending: of the files, `png` or `npy`.
        folders: of the classes, in the order of their labels.
    """

    dtype: str
    shape: tuple[int, ...]
    class_names: tuple[str, ...]
    ending: str
    folders: tuple[str, ...]
    format: int = FORMAT

    @classmethod
    def of(cls, manifest: BundleManifest, x: Array) -> KeptForm:
        """The form for a model, whose first kept input is `x`."""
        spec, names = manifest.input, manifest.class_names
        ending = "png" if _as_picture(x, spec, first=True) is not None else "npy"
        return cls(spec.dtype, spec.shape, names, ending, class_folders(names))

    def fits(self, manifest: BundleManifest) -> bool:
        """Whether a model has these inputs and classes."""
        return (self.dtype, self.shape, self.class_names) == (
            manifest.input.dtype,
            manifest.input.shape,
            manifest.class_names,
        )

    def encode(self, x: Array) -> bytes | None:
        """An input as the bytes of a file; None if a picture cannot hold its values."""
        held = io.BytesIO()
        if self.ending == "npy":
            np.save(held, x, allow_pickle=False)
            return held.getvalue()
        pixels = _as_picture(x, TensorSpec(self.dtype, self.shape))
        if pixels is None:
            return None
        from PIL import Image  # noqa: PLC0415 - only for models of pictures

        Image.fromarray(pixels).save(held, "png")
        return held.getvalue()


def read_form(folder: Path) -> KeptForm | None:
    """The form of a folder of kept inputs; None if it keeps none yet.

    Raises: ConfigurationError if it cannot be read.
    """
    try:
        raw = (folder / FORM).read_bytes()
    except FileNotFoundError:
        return None
    try:
        fields = orjson.loads(raw)
        if fields["format"] != FORMAT:
            raise ConfigurationError(
                f"{folder / FORM}: expected format {FORMAT}, got {fields['format']}; it is of"
                " another version of splitedge"
            )
        lists = {name: tuple(fields[name]) for name in ("shape", "class_names", "folders")}
        return KeptForm(**{**fields, **lists})
    except (ValueError, KeyError, TypeError) as err:
        raise ConfigurationError(
            f"{folder / FORM}: not readable; remove this folder or name another"
        ) from err


def class_folders(names: Sequence[str]) -> tuple[str, ...]:
    """Names of folders for classes: different ones, that every file system takes."""
    found: list[str] = []
    for number, name in enumerate(names):
        plain = re.sub(r"[^\w .+-]", "_", name).strip(" .")[:100] or f"class {number}"
        taken = {each.casefold() for each in found}
        found.append(plain if plain.casefold() not in taken else f"{plain} {number}")
    return tuple(found)


def _as_picture(x: Array, spec: TensorSpec, *, first: bool = False) -> Array | None:
    """(height, width) or (height, width, 3) bytes; None for what is no picture of bytes.

    Args:
        first: the answer holds for all inputs of a model. Numbers of 0 and 1 alone may be of a
            model that takes pictures in that scale, so they count as none.
    """
    if len(spec.shape) != 3 or not {spec.shape[0], spec.shape[2]} & {1, 3}:
        return None
    if x.dtype != np.uint8:
        pixels = x.astype(np.uint8)
        if not np.array_equal(pixels, x) or (first and x.max() <= 1):
            return None
        x = pixels
    planes = x if spec.shape[0] not in (1, 3) else x.transpose(1, 2, 0)
    return np.ascontiguousarray(planes[..., 0] if planes.shape[2] == 1 else planes)
