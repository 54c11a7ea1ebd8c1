"""paho's client, as the link uses it."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any, Final

from paho.mqtt import client as paho
from paho.mqtt.enums import MQTTErrorCode

# Longest time that sent bytes may stay unacknowledged by the peer's TCP.
SILENCE_S: Final = 10.0


class Client(paho.Client):
    """paho's client, whose socket several threads may write to.

    paho takes a packet out of its queue, and puts back what the socket did not take: between the
    two, another thread would write into the middle of that packet.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._one_writes = threading.Lock()
        self._ending = False
        super().__init__(*args, **options)
        self.on_socket_open = _tune

    def loop_write(self) -> MQTTErrorCode:
        """Write what waits, and end a lost connection: for the network thread."""
        with self._one_writes:
            return super().loop_write()

    def write_now(self) -> None:
        """Write what waits, in any thread, handlers included.

        What is not written, and a connection that is lost, are left to the network thread: paho
        ends a connection only while no handler runs, so a handler would wait for itself.
        """
        with self._one_writes:
            if not self._ending:
                self._packet_write()

    def end_soon(self) -> None:
        """Leave all that is written from now on, a DISCONNECT say, to the network thread."""
        with self._one_writes:
            self._ending = True

    def cut_off(self) -> None:
        """Close the connection at once, whatever waits to be written."""
        sock: Any = self.socket()
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _tune(_client: paho.Client, _userdata: object, sock: Any) -> None:
    # a QoS 1 round trip on loopback takes 44 ms without, 0.9 ms with
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # finds a path that drops every packet; the keep-alive takes up to twice its interval
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * SILENCE_S))
