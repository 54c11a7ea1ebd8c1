"""A bare paho client that sends every payload back at its QoS: the reference for a round trip.

It runs as a process: `python -m server.bench.echo PORT USER PASSWORD FROM TO`.
"""

from __future__ import annotations

import socket
import sys
import threading
from typing import Any

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion


def connect(port: int, user: str, password: str, topic: str) -> Client:
    """A connected paho client on loopback, TCP_NODELAY set, subscribed to `topic` at QoS 1."""
    client = Client(CallbackAPIVersion.VERSION2, client_id=user)
    client.username_pw_set(user, password)
    client.on_socket_open = _no_delay
    ready = threading.Event()

    def subscribed(*_: object) -> None:
        ready.set()

    def connected(*_: object) -> None:
        client.subscribe(topic, 1)

    client.on_connect = connected
    client.on_subscribe = subscribed
    client.connect("127.0.0.1", port)
    client.loop_start()
    if not ready.wait(10):
        raise RuntimeError(f"no broker on port {port}")
    return client


def _no_delay(_client: Client, _userdata: object, sock: Any) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def main() -> None:
    """Echo until stdin closes."""
    port, user, password, source, target = sys.argv[1:6]
    client = connect(int(port), user, password, source)

    def back(_client: Client, _userdata: object, message: MQTTMessage) -> None:
        client.publish(target, message.payload, qos=message.qos)

    client.on_message = back
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    client.loop_stop()


if __name__ == "__main__":
    main()
