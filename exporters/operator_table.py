"""torch's table of ONNX operators, read once for all graphs of a process.

torch's exporter makes the table anew for each graph: it parses the source of some 500 functions.
That is 0.45 of the 0.95 s of processor time that a small graph takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch.onnx._internal.exporter import _registration

_READ: Final[Callable[..., Any] | None] = getattr(
    getattr(_registration, "ONNXRegistry", None), "from_torchlib", None
)


@contextmanager
def operators_read_once() -> Iterator[None]:
    """Let torch's exporter take the table of an earlier graph, within this block.

    The table belongs to nobody else: an exporter with operators of its own would add them to it, so
    the block must not contain one. torch has no public name for the table. A torch that keeps it
    elsewhere reads it anew for each graph, as it does outside of the block.
    """
    if _READ is None:
        yield
        return
    registry: Any = _registration.ONNXRegistry
    registry.from_torchlib = staticmethod(_table)
    try:
        yield
    finally:
        registry.from_torchlib = _READ


@functools.cache
def _table(**options: Any) -> Any:
    assert _READ is not None
    return _READ(**options)
