"""Static int8 quantisation of an fp32 graph: quantise-dequantise pairs, per channel.

Weights take 7 of the 8 bits. x86 processors without VNNI add two products in 16 bits, which
overflow with 8 (docs/decisions/0062-seven-bits-for-weights.md); with 7 a graph answers alike on
all.

The layer with the overridable weights stays fp32, because personal parameters are trained and sent
as floats.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process

from exporters.errors import ExportError
from exporters.graphs import make_overridable, save, strip

CALIBRATION_SAMPLES: Final = 128


def quantize(
    source: Path, target: Path, calibration: NDArray[Any], overridable: Sequence[str]
) -> None:
    """Write the int8 form of the fp32 graph `source`.

    Args:
        calibration: (n, ...) raw inputs, which set the range of every activation.
        overridable: initialisers that are graph inputs too, in `source` and in the result.
    Raises: ExportError if onnxruntime cannot quantise the graph.
    """
    model = onnx.load(source)
    # the quantiser folds constants only, and an input is none: so these inputs come off first
    kept = [node for node in model.graph.input if node.name not in overridable]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    floats = [node.name for node in model.graph.node if set(node.input) & set(overridable)]
    with TemporaryDirectory() as folder:
        plain, prepared, quantised = (Path(folder) / f"{n}.onnx" for n in ("1", "2", "3"))
        onnx.save(model, plain)
        try:
            with _quiet():
                quant_pre_process(plain, prepared, skip_symbolic_shape=True)
                quantize_static(
                    prepared,
                    quantised,
                    _Samples(model.graph.input[0].name, calibration),
                    quant_format=QuantFormat.QDQ,
                    per_channel=True,
                    activation_type=QuantType.QUInt8,
                    weight_type=QuantType.QInt8,
                    reduce_range=True,
                    nodes_to_exclude=floats,
                )
        except Exception as err:  # the quantiser raises errors of numpy, onnx and its own
            raise ExportError(f"{source.name}: cannot be quantised ({err})") from err
        model = onnx.load(quantised)
    strip(model)
    make_overridable(model, overridable)
    save(model, target)


class _Samples(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
    """Feeds the calibration samples one by one, as the graph takes them."""

    def __init__(self, name: str, x: NDArray[Any]) -> None:
        self._feeds: Iterator[dict[str, NDArray[Any]]] = (
            {name: np.ascontiguousarray(x[i : i + 1])} for i in range(len(x))
        )

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        return next(self._feeds, None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop the quantiser's lines on the root logger: one for each weight without channels.

    The handler keeps `logging.warning` from configuring the program's logging.
    """
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)
    root.addFilter(_drop)
    try:
        yield
    finally:
        root.removeFilter(_drop)
        root.removeHandler(handler)


def _drop(_record: logging.LogRecord) -> bool:
    # a filter sees only the lines of its own logger, so loggers with names are not silenced
    return False
