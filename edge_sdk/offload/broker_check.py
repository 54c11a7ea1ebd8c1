"""Whether a device's broker answers, for people who ask what is wrong."""

from __future__ import annotations

import socket
from typing import Final

from edge_sdk.errors import LinkError
from edge_sdk.identity import Identity
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.wire.broker_address import BrokerAddress

ANSWER_S: Final = 3.0


def broker_fault(
    identity: Identity, address: BrokerAddress, *, in_use: bool, timeout_s: float = ANSWER_S
) -> str:
    """Why the broker does not answer, or does not let this device in; empty if it does.

    Args:
        in_use: whether an agent has the device's connection. A broker keeps one a device, so a
            second login would end that; then only the broker's port is tried.
    Raises: ConfigurationError for a certificate file that cannot be used.
    """
    if in_use:
        try:
            socket.create_connection((address.host, address.port), timeout_s).close()
        except OSError as err:
            return f"{address.url}: {err.strerror or err}"
        return ""
    link = MqttLink(
        address,
        client_id=identity.device,
        password=identity.credential,
        ca=None if identity.ca is None else str(identity.ca),
        insecure=identity.insecure,
    )
    link.start()
    try:
        link.wait_connected(timeout_s)
    except LinkError as err:
        return str(err)
    finally:
        link.stop()
    return ""
