"""The service manager's end of its socket, which a test reads."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import wait_until


class Manager:
    """What a service has said, in order.

    Args:
        address: of the socket, as NOTIFY_SOCKET names it; "@" stands for an abstract name.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.said: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address.replace("@", "\0", 1) if address[0] == "@" else address)
        self._socket.setblocking(False)

    def environment(self, watchdog_s: float) -> dict[str, str]:
        """Variables that systemd sets for a service with a watchdog."""
        return {"NOTIFY_SOCKET": self.address, "WATCHDOG_USEC": str(round(1e6 * watchdog_s))}

    def read(self) -> list[str]:
        """Take all that has been said since the last call."""
        new: list[str] = []
        while True:
            try:
                new.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                self.said += new
                return new

    def wait(self, text: str, timeout_s: float = 30) -> str:
        """The next message that contains the text."""
        return wait_until(
            lambda: next((each for each in self.read() if text in each), ""),
            lambda: f"{text}; said: {self.said}",
            timeout_s,
        )

    def is_silent(self, for_s: float) -> bool:
        """Whether no sign of life comes for so long."""
        self.read()
        time.sleep(for_s)  # the absence of a message shows in no other way
        return "WATCHDOG=1" not in self.read()

    def close(self) -> None:
        self._socket.close()


@contextmanager
def listening_manager(folder: Path) -> Iterator[Manager]:
    """A manager whose socket is in that folder."""
    manager = Manager(str(folder / "notify"))
    try:
        yield manager
    finally:
        manager.close()
