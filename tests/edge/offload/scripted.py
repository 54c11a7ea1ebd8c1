"""A scripted server: on a real broker, with any reply at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from edge_sdk.mqtt.link import MqttLink
from edge_sdk.mqtt.messages import Message
from edge_sdk.offload.availability import Presence
from edge_sdk.offload.offloader import Offloader
from edge_sdk.offload.pending import Outcome, Target
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.frames import Tensor, unpack
from edge_sdk.wire.messages import Query, Reply, pack_reply, read_query
from edge_sdk.wire.topics import Kind, Topic, all_devices
from server.broker.child import BrokerChild
from tests.waiting import wait_until

TARGET = Target("digits", "1")
TENSOR = Tensor("z2", np.zeros((1, 4), np.float32))
SECRET = "s" * 43


class Scripted:
    """A server with replies that the test decides; probes are answered unless `mute`."""

    def __init__(self, broker: BrokerChild) -> None:
        self.mute = False
        self.on_query: Callable[[Query], None] = lambda query: self.send(answer(query))
        self.queries: list[Query] = []
        self.query_bytes: list[int] = []
        self.qualities: list[int] = []  # QoS of the queries
        self.reply_bytes: list[int] = []
        self.probes: list[Query] = []
        self.statuses: list[Any] = []
        self.telemetry: list[Any] = []
        self.device = ""
        address = BrokerAddress("127.0.0.1", broker.port)
        self.link = MqttLink(address, client_id="backend-1", username="backend", password=SECRET)
        self.link.subscribe(all_devices(Kind.QUERY), self._receive)
        self.link.subscribe(
            all_devices(Kind.STATUS),
            lambda message: self.statuses.append(orjson.loads(message.payload)["status"]),
        )
        self.link.subscribe(
            all_devices(Kind.TELEMETRY),
            lambda message: self.telemetry.append(orjson.loads(message.payload)),
        )
        self.link.start()
        self.link.wait_connected(10.0)

    def send(self, reply: Reply) -> None:
        """Reply to the device."""
        payload = pack_reply(reply, "digits", "1")
        self.reply_bytes.append(len(payload))
        self.send_raw(payload)

    def send_raw(self, payload: bytes) -> None:
        """Publish any bytes on the device's reply topic."""
        self.link.publish(str(Topic("default", self.device, Kind.REPLY)), payload)

    def command(self, payload: bytes) -> None:
        """Publish any bytes on the device's command topic."""
        self.link.publish(str(Topic("default", self.device, Kind.COMMAND)), payload)

    def _receive(self, message: Message) -> None:
        query = read_query(unpack(message.payload))
        if query.tensor is None:
            self.probes.append(query)
            if not self.mute:
                self.send(Reply(query.id))
        else:
            self.queries.append(query)
            self.query_bytes.append(len(message.payload))
            self.qualities.append(message.qos)
            self.on_query(query)


def answer(query: Query, value: float = 0.0) -> Reply:
    return Reply(query.id, {"logits": np.full((1, 3), value, np.float32)})


Open = Callable[..., Offloader]


def wait_until_present(device: Offloader, timeout_s: float = 5.0) -> None:
    wait_until(lambda: device.presence is Presence.PRESENT, "the server is present", timeout_s)


def ask(offloader: Offloader, deadline_s: float = 2.0) -> Outcome:
    return offloader.finish(offloader.begin(lambda: TENSOR, TARGET, deadline_s))
