"""Wait in tests for a condition, with a deadline, in place of sleeping for a guessed time."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.01
# A condition that takes long, a command for one, is asked more rarely: other tests need the cores.
POLL_MAX_S = 1.0
PAUSES = 3  # times what the condition took


def wait_until(
    condition: Callable[[], T], what: str | Callable[[], object], timeout_s: float = 10.0
) -> T:
    """Poll `condition` until it is true, and return what it returned.

    Args:
        condition: called every 10 ms, or once in four times what it takes, up to a second more.
        what: what is waited for, as a failed test shall print it; a function is called then, and
            may look up the last error or a log.
    Raises: AssertionError when it is not true within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        asked = time.monotonic()
        if found := condition():
            return found
        now = time.monotonic()
        if now > deadline:
            awaited = what() if callable(what) else what
            raise AssertionError(f"not within {timeout_s:g} s: {awaited}")
        time.sleep(min(max(POLL_S, PAUSES * (now - asked)), POLL_MAX_S))


def is_listening(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a TCP connection to that port succeeds now."""
    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return False
    return True
