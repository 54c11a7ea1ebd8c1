"""Messages of this process to the service manager that started it: the protocol of sd_notify(3).

A datagram of `NAME=VALUE` lines goes to the socket that the manager names in the environment.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping
from typing import Final

logger = logging.getLogger(__name__)

SOCKET: Final = "NOTIFY_SOCKET"
WATCHDOG: Final = "WATCHDOG_USEC"
WATCHDOG_PID: Final = "WATCHDOG_PID"
# a manager that does not read must not hold up the agent
SEND_S: Final = 1.0


class Notifier:
    """Tells the service manager how this process is; does nothing where there is none.

    Args:
        address: of the manager's socket; empty where there is none.
        watchdog_s: the manager restarts the process after so long without `alive`; 0 for never.
    """

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self.watchdog_s = watchdog_s if address else 0.0
        self._address = address

    @classmethod
    def take(cls, environment: MutableMapping[str, str]) -> Notifier:
        """The notifier that the environment asks for, which child processes shall not inherit."""
        address = environment.pop(SOCKET, "")
        watchdog = environment.pop(WATCHDOG, "")
        pid = environment.pop(WATCHDOG_PID, "")
        meant = pid in ("", str(os.getpid())) and watchdog.isdecimal()
        return cls(address, int(watchdog) / 1e6 if meant else 0.0)

    @property
    def managed(self) -> bool:
        """Whether a service manager started this process."""
        return bool(self._address)

    def ready(self, status: str) -> None:
        """Say that the process does its work from now on."""
        self._send(f"READY=1\nSTATUS={_line(status)}")

    def status(self, status: str) -> None:
        """Give the line that `systemctl status` shows."""
        self._send(f"STATUS={_line(status)}")

    def alive(self) -> None:
        """Say that the work goes on."""
        self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """Say that the process ends in order."""
        self._send("STOPPING=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        # "@" stands for the zero byte of Linux's abstract names
        address = self._address.replace("@", "\0", 1) if self._address[0] == "@" else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(SEND_S)
                sender.sendto(text.encode(), address)
        except OSError as err:  # a manager that is being restarted: the next message may arrive
            logger.warning("the service manager was not told (%s)", err.strerror or err)


def _line(text: str) -> str:
    return " ".join(text.split())
