"""Answers of the v2 protocol over HTTP: each output as JSON or as bytes, as the request asks.

Pure: no I/O. The server's answers and a device's own are written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import orjson

from edge_sdk.errors import FrameError
from edge_sdk.wire.frames import DATATYPES, Array, Frame

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
TEXTS: Final = "BYTES"
# by dtype, not by its name, which numpy puts together at every call
_DATATYPE_OF: Final = {
    **{dtype.newbyteorder("="): name for name, dtype in DATATYPES.items()},
    np.dtype(np.float64): "FP64",
}


def datatype_of(dtype: str | np.dtype[Any]) -> str:
    """The protocol's name of a dtype; that of texts is `BYTES`."""
    known = np.dtype(dtype)
    return TEXTS if known.kind == "U" else _DATATYPE_OF[known]


def read_header_length(text: str | None) -> int | None:
    """Number of bytes of a body that are JSON, by the header HEADER_LENGTH; None for all of them.

    Raises: FrameError if the header is no number of bytes.
    """
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise FrameError(f"{HEADER_LENGTH}: expected a number of bytes, got {text!r:.50}")
    return int(text)


def pack_answer(
    request: Frame,
    header: Mapping[str, Any],
    outputs: Mapping[str, Array],
) -> tuple[bytes, int | None]:
    """Body of the answer to `request`.

    Args:
        outputs: by name; a request without names gets them all. Floats are finite.
    Returns: the body; the number of its bytes that are JSON, None for all of them.
    Raises: FrameError for an output that there is not.
    """
    wanted = request.requested or tuple((name, {}) for name in outputs)
    all_binary = bool(request.parameters.get("binary_data_output"))
    described: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for name, parameters in wanted:
        if name not in outputs:
            raise FrameError(f"output {name!r:.100}: expected one of {', '.join(outputs)}")
        array = outputs[name]
        output: dict[str, Any] = {
            "name": name,
            "datatype": datatype_of(array.dtype),
            "shape": list(array.shape),
        }
        if parameters.get("binary_data", all_binary):
            raw = _bytes(array)
            parts.append(raw)
            output["parameters"] = {"binary_data_size": len(raw)}
        else:
            output["data"] = array.ravel().tolist()
        described.append(output)
    text = orjson.dumps({**header, "outputs": described})
    return (b"".join((text, *parts)), len(text)) if parts else (text, None)


def _bytes(array: Array) -> bytes:
    """The elements one after another; a text has its length in front, 4 bytes little-endian."""
    if array.dtype.kind != "U":
        return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    texts = [str(text).encode() for text in array.ravel()]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
