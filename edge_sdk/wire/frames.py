"""Frames: the Open Inference Protocol v2 with its binary tensor extension, as values and bytes.

Pure: no I/O. One decoder serves both ends, over MQTT and HTTP. Over MQTT a frame is

    4 bytes, big-endian: length of the JSON · the JSON · the tensors' bytes, little-endian, in order

Over HTTP the header `Inference-Header-Content-Length` holds the length; a body without that header
is JSON only, with tensor values as (nested) lists.

All sizes are checked before memory is allocated (`Limits`); nothing is unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from edge_sdk.errors import FrameError, FrameTooLargeError, shown
from edge_sdk.wire.topics import PAYLOAD_BYTES

Array = NDArray[Any]

DATATYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "FP32": np.dtype("<f4"),
    "FP16": np.dtype("<f2"),
    "UINT8": np.dtype("u1"),
    "INT8": np.dtype("i1"),
    "INT64": np.dtype("<i8"),
}
_DATATYPE_OF: Final = {dtype.newbyteorder("="): name for name, dtype in DATATYPES.items()}
_INTEGERS: Final = ("UINT8", "INT8", "INT64")
_NUMBERS: Final = frozenset({int, float})
_TEXTS: Final = ("id", "model_name", "model_version", "error")
PREFIX_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a frame that a receiver accepts. Sizes in bytes.

    `elements` bounds the product of a tensor's sizes other than 0.
    """

    frame_bytes: int = PAYLOAD_BYTES
    header_bytes: int = 65_536
    tensors: int = 16
    rank: int = 8
    elements: int = 4_000_000


MQTT_LIMITS: Final = Limits()
# a JSON-only body holds its tensors in the header, so that the header may be as long as the body
HTTP_LIMITS: Final = Limits(frame_bytes=16_000_000, header_bytes=16_000_000, elements=16_000_000)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One named tensor and its parameters, for example the scale of an int8 codec."""

    name: str
    array: Array
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frame:
    """A v2 infer request (`inputs`) or response (`outputs`).

    Attributes:
        header: all top-level JSON members but the tensors: id, parameters, model_name, error...
        tensors: in the order of the frame.
        requested: the outputs that a request names, with their parameters.
    """

    header: Mapping[str, Any]
    tensors: tuple[Tensor, ...] = ()
    requested: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    def tensor(self, name: str) -> Tensor:
        """The tensor with that name.

        Raises: FrameError naming the tensors of the frame.
        """
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        names = ", ".join(tensor.name for tensor in self.tensors) or "none"
        raise FrameError(f"frame: expected a tensor {name!r}, got {names}")

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Parameters of the frame itself."""
        return self.header.get("parameters") or {}


def encode(
    header: Mapping[str, Any], tensors: Sequence[Tensor], *, key: str
) -> tuple[bytes, list[memoryview]]:
    """The JSON and the binary parts of a frame, with its tensors under `key`.

    Args:
        key: `inputs` for a request, `outputs` for a response.
    Raises: FrameError for a dtype that is not in DATATYPES.
    """
    described = []
    parts = []
    for tensor in tensors:
        array = np.asarray(tensor.array, order="C")  # keeps rank 0, ascontiguousarray does not
        try:
            datatype = _DATATYPE_OF[array.dtype]
        except KeyError:
            known = ", ".join(DATATYPES)
            raise FrameError(
                f"tensor {tensor.name}: expected one of {known}, got {array.dtype}"
            ) from None
        described.append(
            {
                "name": tensor.name,
                "datatype": datatype,
                "shape": array.shape,
                "parameters": {**tensor.parameters, "binary_data_size": array.nbytes},
            }
        )
        if array.nbytes:  # a memoryview of nothing cannot be cast
            parts.append(array.data.cast("B"))
    return orjson.dumps({**header, key: described}), parts


def pack(header: Mapping[str, Any], tensors: Sequence[Tensor], *, key: str) -> bytes:
    """A frame's bytes for MQTT: length, JSON, tensors."""
    text, parts = encode(header, tensors, key=key)
    return b"".join((len(text).to_bytes(PREFIX_BYTES, "big"), text, *parts))


def pack_request(header: Mapping[str, Any], tensors: Sequence[Tensor]) -> bytes:
    """An infer request's bytes for MQTT."""
    return pack(header, tensors, key="inputs")


def pack_response(header: Mapping[str, Any], tensors: Sequence[Tensor]) -> bytes:
    """An infer response's bytes for MQTT."""
    return pack(header, tensors, key="outputs")


def unpack(raw: bytes | bytearray, limits: Limits = MQTT_LIMITS) -> Frame:
    """Read a frame from MQTT.

    Raises: FrameError for bytes that are no frame; FrameTooLargeError above `limits`.
    """
    return decode(*_prefixed(raw, limits), limits)


def unpack_header(raw: bytes | bytearray, limits: Limits = MQTT_LIMITS) -> tuple[Frame, bool]:
    """Read a frame from MQTT without its tensors, to answer that they will not be looked at.

    Returns: the frame, and whether it announces tensors.

    Raises: FrameError for bytes that are no frame; FrameTooLargeError above `limits`.
    """
    header, _ = _header_and_rest(*_prefixed(raw, limits), limits)
    return Frame(_without_tensors(header)), bool(header.get("inputs") or header.get("outputs"))


def decode(body: bytes | memoryview, header_bytes: int | None, limits: Limits) -> Frame:
    """Read a frame: its JSON is the first `header_bytes` of `body`, or all of it if None.

    Raises: FrameError, FrameTooLargeError.
    """
    header, binary = _header_and_rest(memoryview(body), header_bytes, limits)
    tensors, rest = _tensors(header, binary, limits)
    if rest:
        raise FrameError(f"frame: {rest} bytes after the last tensor")
    requested = _requested(header, limits) if "inputs" in header else ()
    return Frame(_without_tensors(header), tensors, requested)


def _prefixed(raw: bytes | bytearray, limits: Limits) -> tuple[memoryview, int]:
    """A frame from MQTT behind its prefix, and the length that the prefix announces."""
    if len(raw) > limits.frame_bytes:
        raise FrameTooLargeError(f"frame: at most {limits.frame_bytes} bytes, got {len(raw)}")
    if len(raw) < PREFIX_BYTES:
        raise FrameError(f"frame: expected a {PREFIX_BYTES}-byte length, got {len(raw)} bytes")
    return memoryview(raw)[PREFIX_BYTES:], int.from_bytes(raw[:PREFIX_BYTES], "big")


def _header_and_rest(
    view: memoryview, header_bytes: int | None, limits: Limits
) -> tuple[dict[str, Any], memoryview]:
    """The JSON of a frame, and the bytes behind it."""
    if len(view) > limits.frame_bytes:
        raise FrameTooLargeError(f"frame: at most {limits.frame_bytes} bytes, got {len(view)}")
    size = len(view) if header_bytes is None else header_bytes
    if size > limits.header_bytes:
        raise FrameTooLargeError(f"frame: JSON of at most {limits.header_bytes} bytes, got {size}")
    if not 0 <= size <= len(view):
        raise FrameError(f"frame: JSON of {size} bytes announced, got {len(view)}")
    return _header(view[:size]), view[size:]


def _without_tensors(header: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in header.items() if name not in ("inputs", "outputs")}


def _header(raw: memoryview) -> dict[str, Any]:
    try:
        header = orjson.loads(raw)
    except orjson.JSONDecodeError as err:
        raise FrameError(f"frame: not JSON ({err})") from err
    if not isinstance(header, dict):
        raise FrameError(f"frame: expected a JSON object, got {type(header).__name__}")
    for name in _TEXTS:
        value = header.get(name)
        if value is not None and not isinstance(value, str):
            raise FrameError(f"frame: {name}: expected a string, got {shown(value)}")
    _parameters(header, "frame")
    return header


def _parameters(owner: Mapping[str, Any], what: str) -> dict[str, Any]:
    given = owner.get("parameters")
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise FrameError(f"{what}: parameters: expected an object, got {shown(given)}")
    for name, value in given.items():
        if isinstance(value, dict | list):  # not in the protocol, and may be nested deeply
            raise FrameError(
                f"{what}: parameters: {shown(name)}: "
                f"expected a string, number or boolean, got {shown(value)}"
            )
    return given


def _tensors(
    header: dict[str, Any], binary: memoryview, limits: Limits
) -> tuple[tuple[Tensor, ...], int]:
    listed = header.get("inputs") if "inputs" in header else header.get("outputs", [])
    for described in _objects(listed, "tensors", limits.tensors):
        _check_described(described, limits)
    offset = 0
    tensors = []
    for described in listed or ():
        tensor, used = _tensor(described, binary[offset:], limits)
        tensors.append(tensor)
        offset += used
    return tuple(tensors), len(binary) - offset


def _objects(listed: object, what: str, at_most: int) -> list[dict[str, Any]]:
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise FrameError(f"frame: {what}: expected a list of objects")
    if len(listed) > at_most:
        raise FrameTooLargeError(f"frame: at most {at_most} {what}, got {len(listed)}")
    return listed


def _check_described(described: Mapping[str, Any], limits: Limits) -> None:
    name, shape = described.get("name"), described.get("shape")
    if not isinstance(name, str) or not 0 < len(name) <= 100:
        raise FrameError(f"tensor: expected a name of 1 to 100 characters, got {shown(name)}")
    datatype = described.get("datatype")
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        known = ", ".join(DATATYPES)
        raise FrameError(f"tensor {name}: expected one of {known}, got {shown(datatype)}")
    sizes = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    if not sizes or len(shape or ()) > limits.rank:
        raise FrameError(f"tensor {name}: expected up to {limits.rank} sizes, got {shown(shape)}")
    # without the sizes of 0: numpy refuses a shape like [0, 2**62] although it has no element
    if math.prod(n or 1 for n in shape or ()) > limits.elements:
        raise FrameTooLargeError(
            f"tensor {name}: at most {limits.elements} elements, got {shown(shape)}"
        )
    _parameters(described, f"tensor {name}")


def _tensor(described: Mapping[str, Any], binary: memoryview, limits: Limits) -> tuple[Tensor, int]:
    name, shape = described["name"], tuple(described["shape"])
    dtype = DATATYPES[described["datatype"]]
    parameters = dict(_parameters(described, f"tensor {name}"))
    size = parameters.pop("binary_data_size", None)
    if size is None:
        array = _from_list(name, described, shape, limits)
        used = 0
    else:
        used = math.prod(shape) * dtype.itemsize
        if type(size) is not int or size != used:
            raise FrameError(f"tensor {name}: {used} bytes by its shape, {shown(size)} announced")
        if len(binary) < used:
            raise FrameError(f"tensor {name}: {used} bytes announced, {len(binary)} left")
        array = np.frombuffer(binary[:used], dtype).reshape(shape)
        if not array.flags.aligned:
            # onnxruntime and torch need aligned data, and the JSON before it has any length
            array = array.copy()
    _check_finite(name, array)
    return Tensor(name, array, parameters), used


def _from_list(
    name: str, described: Mapping[str, Any], shape: tuple[int, ...], limits: Limits
) -> Array:
    data = described.get("data")
    if not isinstance(data, list):
        raise FrameError(f"tensor {name}: expected data as a list, or binary_data_size")
    flat = _flatten(name, data, limits.elements)
    if len(flat) != math.prod(shape):
        raise FrameError(f"tensor {name}: {math.prod(shape)} values by its shape, got {len(flat)}")
    datatype = described["datatype"]
    if datatype in _INTEGERS and not set(map(type, flat)) <= {int}:
        raise FrameError(f"tensor {name}: expected whole numbers for {datatype}")
    try:
        # values beyond float32 become infinite here and are refused below
        with np.errstate(over="ignore"):
            return np.array(flat, DATATYPES[datatype]).reshape(shape)
    except (TypeError, ValueError, OverflowError) as err:
        raise FrameError(f"tensor {name}: values do not fit {datatype} ({err})") from err


def _flatten(name: str, data: list[Any], at_most: int) -> list[Any]:
    """The numbers of a nested list, level by level: recursion could exhaust the stack."""
    kinds = set(map(type, data))  # a loop over the values would take three times as long
    for _ in range(16):
        if list not in kinds:
            break
        if len(kinds) > 1:
            raise FrameError(f"tensor {name}: lists and numbers mixed at one level")
        if len(set(map(len, data))) > 1:
            raise FrameError(f"tensor {name}: lists of different lengths at one level")
        data = [value for item in data for value in item]
        if len(data) > at_most:
            raise FrameTooLargeError(f"tensor {name}: at most {at_most} elements")
        kinds = set(map(type, data))
    if not kinds <= _NUMBERS:
        raise FrameError(f"tensor {name}: expected numbers")
    return data


def _check_finite(name: str, array: Array) -> None:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise FrameError(f"tensor {name}: expected finite values, got NaN or infinity")


def _requested(header: dict[str, Any], limits: Limits) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    listed = _objects(header.get("outputs", []), "requested outputs", limits.tensors)
    requested = []
    for item in listed:
        name = item.get("name")
        if not isinstance(name, str):
            raise FrameError(f"requested output: expected a name, got {shown(name)}")
        requested.append((name, _parameters(item, "requested output")))
    return tuple(requested)
