"""The sink `mqtt://HOST/TOPIC`: one message for each answer, at a broker of the user's own."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

import orjson

from edge_sdk.errors import LinkError
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.pipeline.answer import Row
from edge_sdk.wire.broker_address import BrokerAddress

# A link that is only just being made is not away.
CONNECT_S: Final = 0.5
CONFIRM_S: Final = 5.0


class TopicWriter:
    """Publishes rows as JSON on a topic.

    Args:
        address: of the broker, with the login of its URL; without one, no login is sent.
        topic: without wildcards.
        qos: 0 or 1. retain: whether the broker keeps the newest row for later subscribers.
        ca: PEM file of the authority that verifies the broker; None takes the system's store.
        confirmed: wait until the broker has said that it has the rows (QoS 1). What it does not say
            within seconds is written again, so it may come twice.
    """

    def __init__(
        self,
        address: BrokerAddress,
        topic: str,
        *,
        qos: int = 1,
        retain: bool = False,
        ca: str | None = None,
        confirmed: bool = False,
    ) -> None:
        self._confirmed = confirmed
        self._topic = topic
        self._qos = qos
        self._retain = retain
        self._link = MqttLink(
            address,
            client_id=f"splitedge-{secrets.token_hex(6)}",
            username=address.username or "",
            password=address.password,
            ca=ca,
            insecure=True,  # the user names the broker and its login by URL
        )
        self._link.start()

    def write(self, rows: Sequence[Row]) -> int:
        """Hand the rows to the link.

        Raises: LinkError with the reason while the broker cannot be reached, or does not confirm.
        """
        try:
            self._link.wait_connected(CONNECT_S)
        except LinkError as err:
            raise LinkError(self._link.last_error) from err
        written = 0
        for row in rows:
            payload = orjson.dumps(row)
            if not self._link.publish(self._topic, payload, qos=self._qos, retain=self._retain):
                break
            written += 1
        if written and self._confirmed and not self._link.flush(CONFIRM_S):
            raise LinkError(f"the broker did not confirm within {CONFIRM_S:.0f} s")
        return written

    def close(self, timeout_s: float) -> int:
        """Wait until the broker has what was handed over, and disconnect.

        Returns: rows that the broker did not acknowledge.
        """
        self._link.flush(timeout_s)
        # rows that must be confirmed and were not did not count as written
        lost = 0 if self._confirmed else self._link.unacknowledged
        self._link.stop()
        return lost
