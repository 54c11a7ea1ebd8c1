"""The metrics of a server, in one object."""

from __future__ import annotations

from server.metrics.devices import DeviceMetrics
from server.metrics.exposition import exposition, new_registry
from server.metrics.queries import QueryMetrics
from server.metrics.state import StateMetrics, StateServices


class ServerMetrics:
    """Counts from its making on; safe from any thread.

    Attributes:
        devices: takes the points of the devices' history.
    """

    def __init__(self, services: StateServices) -> None:
        self._registry = new_registry("server")
        services.inference.batcher.observers.add(QueryMetrics(self._registry))
        self.devices = DeviceMetrics(self._registry)
        self._registry.register(StateMetrics(services))

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics, and their content type, as the header `accept` asks."""
        return exposition(self._registry, accept)
