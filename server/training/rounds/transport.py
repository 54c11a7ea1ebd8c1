"""Transports, by which the server reaches its clients: one verb, `exchange`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from edge_sdk.errors import SplitedgeError
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.messages import Reply, Request

logger = logging.getLogger(__name__)


class Transport(Protocol):
    """Sends a request to each client and gathers the replies that come in time."""

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        """Replies by client, in the order of `requests`; a client that gave none is left out."""


class LocalTransport:
    """Clients in this process, visited one after another.

    Attributes:
        failures: the reason of each client that last gave no reply; the report takes them.
    """

    def __init__(self, clients: Mapping[str, TrainingClient]) -> None:
        self.clients = clients
        self.failures: dict[str, str] = {}

    def exchange(
        self,
        requests: Mapping[str, Request],
        deadline_s: float,  # noqa: ARG002 - nothing waits in one process
    ) -> dict[str, Reply]:
        """Ask one client after another; the deadline cannot pass in between."""
        replies = {}
        for name, request in requests.items():
            if name not in self.clients:
                continue
            try:
                replies[name] = self.clients[name].handle(request)
            except SplitedgeError as err:
                self.failures[name] = str(err)
                logger.warning("client=%s gives no reply: %s", name, err)
        return replies
