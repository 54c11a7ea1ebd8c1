"""Quantised files: they round values to steps.

A value between two steps takes either of them, by the order of an addition. So the same graph, cut
or whole, may give answers that are a few steps apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from onnx import NodeProto

STEP_TOLERANCE: Final = 5e-2  # of the largest value; one step of 8 bits is 0.4 to 0.8 %
_OF_OWN_RANGE: Final = "DynamicQuantize"
_ROUNDING: Final = ("QuantizeLinear", "QLinear", "QGemm", _OF_OWN_RANGE)


def rounds(nodes: Iterable[NodeProto]) -> bool:
    """Whether nodes round values to steps; rounded weights alone do not count."""
    return any(node.op_type.startswith(_ROUNDING) for node in nodes)


def ranges_own_values(nodes: Iterable[NodeProto]) -> bool:
    """Whether nodes take the size of their steps from the values at hand, and so from a batch."""
    return any(node.op_type.startswith(_OF_OWN_RANGE) for node in nodes)
