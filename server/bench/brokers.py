"""Brokers for the measurements: the embedded one, and Mosquitto if it is installed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from server.broker.child import BrokerChild
from server.broker.policy import Principal, credential_sha256

EMBEDDED: Final = "embedded"
MOSQUITTO: Final = "Mosquitto"
NO_MOSQUITTO: Final = "Mosquitto is not installed (apt install mosquitto)"
# a client may use its own topics only, so both ends of an echo use these
ECHO_USER: Final = "backend"
PING_USER: Final = "ping"
QUERY: Final = "splitedge/v1/default/ping/query"
REPLY: Final = "splitedge/v1/default/ping/reply"


@dataclass(frozen=True, slots=True)
class Broker:
    """A running broker on loopback."""

    name: str
    port: int


def find_mosquitto() -> str | None:
    """Path of its program, which may lie outside a user's PATH."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def embedded() -> Iterator[Broker]:
    """The embedded broker with the two principals of an echo."""
    child = BrokerChild()
    child.set_principal(Principal(ECHO_USER, "backend", None, credential_sha256("echo")))
    child.set_principal(Principal(PING_USER, "device", "default", credential_sha256("ping")))
    child.start()
    try:
        yield Broker(EMBEDDED, child.port)
    finally:
        child.stop()


@contextlib.contextmanager
def mosquitto(work: Path) -> Iterator[Broker]:
    """A Mosquitto on a free loopback port, without logins."""
    program = find_mosquitto()
    assert program is not None
    port = free_port()
    config = work / "mosquitto.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\n"
        "max_inflight_messages 1000\nmax_queued_messages 10000\npersistence false\n"
    )
    process = subprocess.Popen([program, "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        yield Broker(MOSQUITTO, port)
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    """A port on which no program listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"nothing listens on port {port}")
