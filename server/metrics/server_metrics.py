"""The metrics of a server, in one object."""

from __future__ import annotations

from server.metrics.devices import DeviceMetrics
from server.metrics.exposition import exposition, new_registry
from server.metrics.queries import QueryMetrics
from server.metrics.state import QueueMetrics, QueueServices, StateMetrics, StateServices


class BackendMetrics:
    """Metrics of queries alone; counts from its making on, safe from any thread.

    Args:
        program: `server` or `backend`.
    """

    def __init__(self, services: QueueServices, program: str = "backend") -> None:
        self._registry = new_registry(program)
        services.inference.batcher.observers.add(QueryMetrics(self._registry))
        self._registry.register(QueueMetrics(services))

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics, and their content type, as the header `accept` asks."""
        return exposition(self._registry, accept)


class ServerMetrics(BackendMetrics):
    """Metrics of queries, devices and the server's state.

    Attributes:
        devices: takes the points of the devices' history.
    """

    def __init__(self, services: StateServices) -> None:
        super().__init__(services, "server")
        self.devices = DeviceMetrics(self._registry)
        self._registry.register(StateMetrics(services))
