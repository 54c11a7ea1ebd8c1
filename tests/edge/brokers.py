"""A real Mosquitto as a user runs it, and an inbox for what arrives at a link."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

from edge_sdk.mqtt.messages import Message
from edge_sdk.wire.broker_address import BrokerAddress


class Mosquitto:
    """A Mosquitto without logins, on one port over restarts.

    Args:
        more: lines of its configuration.
    """

    def __init__(self, folder: Path, port: int, more: str = "") -> None:
        self.address = BrokerAddress("127.0.0.1", port)
        self.log = folder / "mosquitto.log"
        self._config = folder / "mosquitto.conf"
        self._config.write_text(
            f"listener {port} 127.0.0.1\nallow_anonymous true\nlog_dest stderr\nlog_type all\n"
            + more
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        program = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
        assert program is not None, "install Mosquitto 2.0 or newer to run the broker tests"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([program, "-c", str(self._config)], stderr=log)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None


class Inbox:
    """Collects messages, and waits for a number of them."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._arrived = threading.Condition()

    def __call__(self, message: Message) -> None:
        with self._arrived:
            self.messages.append(message)
            self._arrived.notify_all()

    def wait(self, count: int) -> list[Message]:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.messages) >= count, 10)
            return self.messages
