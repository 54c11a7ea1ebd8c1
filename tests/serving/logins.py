"""Logins at a broker, for the suites of all brokers."""

from __future__ import annotations

from edge_sdk.mqtt.link import MqttLink
from tests.waiting import wait_until


def is_let_in(link: MqttLink) -> bool:
    """Whether the broker lets a link in; it is started and stopped here."""
    link.start()
    try:
        wait_until(
            lambda: link.connected or "Not authorized" in link.last_error, lambda: link.last_error
        )
        return link.connected
    finally:
        link.stop()
