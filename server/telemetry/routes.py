"""History of the devices: `GET /api/v1/devices/{id}/telemetry` and `GET /api/v1/telemetry`."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from edge_sdk.wire.topics import ID_PATTERN
from server.registry.telemetry.history import AGE_MOST_S
from server.registry.telemetry.point import TelemetryPoint
from server.routes.authentication import Presence

POINTS_MOST: Final = 2_000


class LatencyView(BaseModel):
    """Latency of the answers of one source: quantiles in ms, and their number."""

    answers: int
    p50_ms: float
    p95_ms: float
    p99_ms: float


class PointView(BaseModel):
    """A device in one span of time, which ends at `at` (UTC seconds since 1970).

    `uncertainty` are counts of answers between the `uncertainty_edges`. null means not known; a
    `threshold` of null is also one that is infinite.
    """

    model_config = ConfigDict(from_attributes=True)

    at: float
    span_s: float
    exits: int
    offloads: int
    fallbacks: int
    bytes_up: int
    bytes_down: int
    restarts: int
    late_lost: int
    bundle: str
    presence: str
    threshold: float | None
    uncertainty: list[int]
    uncertainty_edges: list[float]
    round_trip_ms: float | None
    memory_bytes: int | None
    memory_available_bytes: int | None
    agreement_bound: float | None
    agreement_delta: float | None
    audits: int | None
    disagreements: int | None
    spent: float | None
    earned: float | None
    joules: float | None
    late_waiting: int | None
    latency: dict[str, LatencyView] = Field(default_factory=dict)


class PointList(BaseModel):
    """Points of a device, oldest first."""

    points: list[PointView]


class FleetPointView(BaseModel):
    """Sums over devices in one span of time, which ends at `at`."""

    model_config = ConfigDict(from_attributes=True)

    at: float
    span_s: float
    exits: int
    offloads: int
    fallbacks: int
    devices: int


class FleetPointList(BaseModel):
    """Sums, oldest first; spans without a heartbeat are left out."""

    points: list[FleetPointView]


class Asked(BaseModel):
    """The time that is asked for, and the most points; neighbours are put together above that."""

    model_config = ConfigDict(extra="forbid")

    since_s: float = Field(default=3600.0, gt=0, le=AGE_MOST_S, allow_inf_nan=False)
    points: int = Field(default=360, ge=1, le=POINTS_MOST)


class AskedOfFleet(Asked):
    """The fleet whose devices are added up; by default all devices."""

    fleet: str | None = Field(default=None, pattern=f"^{ID_PATTERN.pattern}$")


def router(services: Presence) -> APIRouter:
    """The routes over `services`."""
    api = APIRouter(prefix="/api/v1", tags=["telemetry"])
    history = services.registry.telemetry

    @api.get("/devices/{device_id}/telemetry")
    def of_device(device_id: str, asked: Annotated[Asked, Query()]) -> PointList:
        """Points of a device in the last `since_s` seconds, oldest first."""
        services.registry.device(device_id)  # an unknown one is an error
        found = history.of(device_id, since_s=asked.since_s, points_max=asked.points)
        return PointList(points=[_view(point) for point in found])

    @api.get("/telemetry")
    def of_fleet(asked: Annotated[AskedOfFleet, Query()]) -> FleetPointList:
        """Sums over all devices, or those of a fleet, in the last `since_s` seconds."""
        found = history.of_fleet(asked.fleet, since_s=asked.since_s, points_max=asked.points)
        return FleetPointList(points=[FleetPointView.model_validate(point) for point in found])

    return api


def _view(point: TelemetryPoint) -> PointView:
    view = PointView.model_validate({**{name: getattr(point, name) for name in _NAMES}})
    for source, counts in point.latency.items():
        p50, p95, p99 = (point.latency_ms(source, share) or 0.0 for share in (0.5, 0.95, 0.99))
        view.latency[source] = LatencyView(answers=sum(counts), p50_ms=p50, p95_ms=p95, p99_ms=p99)
    return view


_NAMES: Final = tuple(name for name in PointView.model_fields if name != "latency")
