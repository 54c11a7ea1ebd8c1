"""A fleet as an operator describes it before it is there."""

from __future__ import annotations

from dataclasses import dataclass

from edge_sdk.checks import check_fields
from profiles.checks import number, optional, whole


@dataclass(frozen=True, slots=True)
class Fleet:
    """Devices, and what they do.

    Attributes:
        devices: their number.
        queries_per_hour: inputs that one device answers in an hour, mean over the day.
        offload: share of them that it asks the server about.
        peak: the busiest minute's queries over the mean.
        heartbeat_s: time between two heartbeats of a device.
        deadline_ms: of an offload.
        network: of the figures; codec: of its smashed data.
        service_ms: of the engine for one query; None takes the network's.
        query_bytes, bundle_bytes: payload of a query, files of a bundle; None takes the network's.
        updates_per_month: new bundles that every device loads.
        tls: whether devices connect by TLS.
        busy_most: share of a core that may be used at the peak.
        late_most: share of the offloads that may miss the deadline because they waited.
    """

    devices: int
    queries_per_hour: float = 60.0
    offload: float = 0.2
    peak: float = 3.0
    heartbeat_s: float = 30.0
    deadline_ms: float = 1_000.0
    network: str = "resnet18"
    codec: str = "int8"
    service_ms: float | None = None
    query_bytes: float | None = None
    bundle_bytes: float | None = None
    updates_per_month: float = 1.0
    tls: bool = True
    busy_most: float = 0.5
    late_most: float = 0.001

    def __post_init__(self) -> None:
        positive = number(above=0)
        check_fields(
            self,
            devices=whole(1, 1_000_000_000),
            queries_per_hour=number(least=0),
            offload=number(least=0, most=1),
            peak=number(least=1),
            heartbeat_s=number(least=1),
            deadline_ms=positive,
            service_ms=optional(positive),
            query_bytes=optional(positive),
            bundle_bytes=optional(positive),
            updates_per_month=number(least=0),
            busy_most=number(above=0, below=1),
            late_most=number(above=0, below=1),
        )

    @property
    def answers_per_s(self) -> float:
        """Answers a second of all devices, mean."""
        return self.devices * self.queries_per_hour / 3_600

    @property
    def offloads_per_s(self) -> float:
        """Offloads a second of all devices, mean."""
        return self.answers_per_s * self.offload

    @property
    def peak_per_s(self) -> float:
        """Offloads a second of all devices, in the busiest minute."""
        return self.offloads_per_s * self.peak

    @property
    def beats_per_s(self) -> float:
        """Heartbeats a second of all devices."""
        return self.devices / self.heartbeat_s


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices that the reader pays, and the machines; None is not told in money.

    Attributes:
        machine_cores, machine_gb: of one machine.
        machine_month: price of one machine for a month.
        traffic_gb: price of a GB over the network.
    """

    machine_cores: int = 4
    machine_gb: float = 8.0
    machine_month: float | None = None
    traffic_gb: float | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            machine_cores=whole(1, 1_024),
            machine_gb=number(above=0),
            machine_month=optional(number(least=0)),
            traffic_gb=optional(number(least=0)),
        )
