"""Times as people read them."""

from __future__ import annotations

import time
from typing import Final

# seconds, and the unit that is used from there on
_UNITS: Final = ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))


def ago(at: float | None, now: float | None = None) -> str:
    """The time since `at`, in the largest whole unit: `3 minutes ago`; empty for None.

    Args:
        at, now: UTC seconds since 1970; `now` is this moment by default.
    """
    if at is None:
        return ""
    passed = (time.time() if now is None else now) - at
    for seconds, unit in _UNITS:
        if passed >= seconds:
            return f"{plural(int(passed // seconds), unit)} ago"
    return "now" if passed > -60 else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def plural(count: int, noun: str) -> str:
    """A count and its noun: `1 device`, `2 devices`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
