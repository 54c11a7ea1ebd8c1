"""Weights of an ONNX file, read and replaced without the onnx package: a device has none.

An ONNX file is a protobuf message. The fields that are read here, by number:

    ModelProto   7 graph
    GraphProto   5 initializer, repeated
    TensorProto  1 dims, 2 data_type (1 is float32), 4 float_data, 8 name, 9 raw_data
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.errors import BundleError

_GRAPH, _INITIALIZER = 7, 5
_DIMS, _DATA_TYPE, _FLOAT_DATA, _NAME, _RAW_DATA = 1, 2, 4, 8, 9
_FLOAT32: Final = 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def read_initialisers(path: Path, names: Collection[str]) -> dict[str, NDArray[np.float32]]:
    """The float32 initialisers of these names.

    Raises: BundleError if the file cannot be read, or lacks one of them.
    """
    try:
        # mapped, not read: a large prefix would take its size in memory once more
        model = np.memmap(path, np.uint8, "r").data
    except OSError as err:
        raise BundleError(f"{path.name}: cannot be read ({err.strerror})") from err
    except ValueError as err:
        raise BundleError(f"{path.name}: expected an ONNX file, got an empty one") from err
    found: dict[str, NDArray[np.float32]] = {}
    try:
        for tensor in _initialisers(model):
            found |= _tensor(tensor, names)
    except (IndexError, ValueError) as err:
        raise BundleError(f"{path.name}: expected an ONNX file, got other bytes ({err})") from err
    missing = sorted(set(names) - found.keys())
    if missing:
        raise BundleError(f"{path.name}: expected the float32 weight {missing[0]}, found none")
    return found


def with_values(path: Path, values: Mapping[str, NDArray[np.float32]]) -> bytes:
    """The file's content with other values of these float32 initialisers.

    They stay constants of the graph, which onnxruntime runs faster than graph inputs.

    Raises: BundleError if the file cannot be read, or lacks one of them in that shape.
    """
    there = read_initialisers(path, values.keys())
    content = bytearray(path.read_bytes())
    for tensor in _initialisers(memoryview(content)):
        for name in _tensor(tensor, values.keys()):
            value = np.ascontiguousarray(values[name], "<f4")
            if value.shape != there[name].shape:
                raise BundleError(
                    f"{path.name}: expected {name} of shape {there[name].shape}, got {value.shape}"
                )
            data = [part for number, part in _fields(tensor) if number == _RAW_DATA]
            if len(data) != 1 or not isinstance(data[0], memoryview):
                raise BundleError(f"{path.name}: expected the values of {name} as raw data")
            data[0][:] = value.tobytes()
    return bytes(content)


def _initialisers(model: memoryview) -> Iterator[memoryview]:
    """The graph's initialisers; a view of the file's content."""
    for number, graph in _fields(model):
        if number == _GRAPH and isinstance(graph, memoryview):
            for place, tensor in _fields(graph):
                if place == _INITIALIZER and isinstance(tensor, memoryview):
                    yield tensor


def _tensor(raw: memoryview, names: Collection[str]) -> dict[str, NDArray[np.float32]]:
    """The tensor by its name, if it is wanted and of float32."""
    dims: list[int] = []
    name, kind, data = "", 0, b""
    for number, value in _fields(raw):
        if isinstance(value, int):
            if number == _DIMS:
                dims.append(value)
            elif number == _DATA_TYPE:
                kind = value
        elif number == _DIMS:  # packed
            dims += _varints(value)
        elif number == _NAME:
            name = bytes(value).decode(errors="replace")
        elif number in {_RAW_DATA, _FLOAT_DATA}:
            data += bytes(value)
    if name not in names or kind != _FLOAT32:
        return {}
    if len(data) != 4 * prod(dims):
        raise ValueError(f"{name} has {len(data)} bytes for {dims}")
    return {name: np.frombuffer(data, "<f4").reshape(dims).astype(np.float32)}


def _fields(raw: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field of a message."""
    place = 0
    while place < len(raw):
        tag, place = _varint(raw, place)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, place = _varint(raw, place)
            yield number, value
            continue
        if wire == _BYTES:
            size, place = _varint(raw, place)
        elif wire in {_FIXED32, _FIXED64}:
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"field {number} has wire type {wire}")
        if place + size > len(raw):
            raise ValueError(f"field {number} ends beyond its message")
        yield number, raw[place : place + size]
        place += size


def _varints(raw: memoryview) -> list[int]:
    place, values = 0, []
    while place < len(raw):
        value, place = _varint(raw, place)
        values.append(value)
    return values


def _varint(raw: memoryview, place: int) -> tuple[int, int]:
    """A number in base 128, the lowest digits first, and the place behind it."""
    value = shift = 0
    while shift < 64:
        byte = raw[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise ValueError("a number of more than 64 bits")
