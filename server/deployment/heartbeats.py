"""News from devices over MQTT, kept until the server's housekeeping takes it.

Network threads note; one other thread takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from edge_sdk.errors import FrameError, ManifestError
from edge_sdk.manifest import check_bundle_name
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.mqtt.messages import Message
from edge_sdk.wire.topics import Kind, all_devices, parse_topic

# a heartbeat has about a kilobyte; what is longer is not read
HEARTBEAT_BYTES: Final = 65_536


@dataclass(slots=True)
class News:
    """News of some seconds.

    Attributes:
        seen: devices from which anything came.
        connected: those that have just connected.
        gone: those that said goodbye, or whose connection broke, and from which nothing came after
            that.
        running: bundle that each of these runs, by device id.
        heartbeats: the newest heartbeat of each of these, by device id: the time that it came, UTC
            seconds since 1970, and its content.
    """

    seen: set[str] = field(default_factory=set)
    connected: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    running: dict[str, str] = field(default_factory=dict)
    heartbeats: dict[str, tuple[float, dict[str, Any]]] = field(default_factory=dict)


class Heartbeats:
    """Collects news.

    Args:
        clock: UTC seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._news = News()

    def note(self, device: str) -> None:
        """Note that something came from a device."""
        with self._lock:
            self._news.seen.add(device)
            self._news.gone.discard(device)

    def note_message(self, kind: Kind, device: str, payload: bytes) -> None:
        """Note a status or a telemetry message; content that cannot be read is left out."""
        content = _content(payload)
        bundle = _bundle(content.get("bundle")) if kind is Kind.TELEMETRY else None
        with self._lock:
            self._news.seen.add(device)
            self._news.gone.discard(device)
            if kind is Kind.STATUS and content.get("status") == "online":
                self._news.connected.add(device)
            elif kind is Kind.STATUS:
                self._news.gone.add(device)
            if bundle is not None:
                self._news.running[device] = bundle
            if kind is Kind.TELEMETRY and content:
                self._news.heartbeats[device] = self._clock(), content

    def take(self) -> News:
        """The news since the last call."""
        with self._lock:
            taken, self._news = self._news, News()
        return taken


def hear_devices(link: MqttLink, heard: Callable[[Kind, str, bytes], None]) -> None:
    """Call `heard` in the network thread with the kind, the device and the payload of each
    telemetry and status message of every device.

    One process of a deployment does so, however many answer queries.
    """

    def hear(message: Message) -> None:
        try:
            topic = parse_topic(message.topic)
        except FrameError:
            return
        if not message.retained:
            heard(topic.kind, topic.device, message.payload)

    link.subscribe(all_devices(Kind.TELEMETRY), hear, qos=0)
    link.subscribe(all_devices(Kind.STATUS), hear)


def _content(payload: bytes) -> dict[str, Any]:
    if len(payload) > HEARTBEAT_BYTES:
        return {}
    try:
        content = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return {}
    return content if isinstance(content, dict) else {}


def _bundle(value: object) -> str | None:
    try:
        return check_bundle_name(value) if isinstance(value, str) else None
    except ManifestError:
        return None
