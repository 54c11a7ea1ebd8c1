"""The trace that a query belongs to, as W3C Trace Context writes it: the text `traceparent`.

Pure, and used by both ends. The text comes from a peer, so it is read strictly, and what is not
valid counts as absent: a trace is for people, and no query may fail because of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

TRACEPARENT: Final = "traceparent"
# A later version may add fields at the end: they are not read.
CHARACTERS_MAX: Final = 256

_SAMPLED: Final = 1
_TEXT: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<more>-[ -~]*)?"
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span of a trace, as its children know it.

    Attributes:
        trace_id: 128 bits, not 0. span_id: 64 bits, not 0.
        sampled: whether the caller records the trace, and its children are to be recorded too.
    """

    trace_id: int
    span_id: int
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        """The text, of 55 characters."""
        flags = _SAMPLED if self.sampled else 0
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{flags:02x}"


def read_traceparent(text: object) -> TraceContext | None:
    """The context that a peer sent; None if there is none, or none that is valid."""
    if not isinstance(text, str) or len(text) > CHARACTERS_MAX:
        return None
    found = _TEXT.fullmatch(text)
    if found is None or found["version"] == "ff":
        return None
    if found["version"] == "00" and found["more"] is not None:
        return None
    trace_id, span_id = int(found["trace"], 16), int(found["span"], 16)
    if not trace_id or not span_id:
        return None
    return TraceContext(trace_id, span_id, bool(int(found["flags"], 16) & _SAMPLED))
