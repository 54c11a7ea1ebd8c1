"""Limits of one server: its parts, by how near a fleet comes to what they can do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from server.planning.figures import Figures
from server.planning.fleet import Fleet
from server.planning.rates import Rates
from server.registry.telemetry.history import POINTS_MOST, RAW_S, ROWS_AT_ONCE

#: Seconds after which all devices should be back when a broker was restarted.
BACK_S: Final = 60.0
#: Seconds between two turns in which the history is thinned (server.services.FULL_CHECK_S).
THINNED_EACH_S: Final = 30.0
HISTORY_S: Final = 86_400.0
LINK_MBIT: Final = 1_000.0


@dataclass(frozen=True, slots=True)
class Limit:
    """One part, if the whole fleet had one server and one backend.

    Attributes:
        demand, capacity: in `unit`.
        devices: at which the demand is the capacity, with the same queries of each.
        reports: that the capacity is from; empty where it is a setting, or given by the reader.
        instead: what to put there.
    """

    what: str
    demand: float
    capacity: float
    unit: str
    devices: float
    reports: tuple[str, ...]
    instead: str

    @property
    def used(self) -> float:
        """The demand over the capacity."""
        return self.demand / self.capacity


def limits_of(fleet: Fleet, figures: Figures, rates: Rates, backends: int) -> tuple[Limit, ...]:
    """The limits of one server with one backend, the nearest first.

    Args:
        backends: of the plan, which the advice names.
    """
    found = [
        *_limits_of_process(fleet, figures, rates, backends),
        *_limits_of_broker(fleet, figures, rates),
        *_limits_of_history(fleet, figures),
        *_limits_of_page(fleet, figures),
    ]
    return tuple(sorted(found, key=lambda limit: -limit.used))


def _limit(  # noqa: PLR0917 - each is a line of its own where it is called
    fleet: Fleet,
    what: str,
    demand: float,
    capacity: float,
    unit: str,
    reports: tuple[str, ...],
    instead: str,
) -> Limit:
    devices = fleet.devices * capacity / demand if demand else math.inf
    return Limit(what, demand, capacity, unit, devices, reports, instead)


def _limits_of_process(
    fleet: Fleet, figures: Figures, rates: Rates, backends: int
) -> Iterator[Limit]:
    base = figures["server_base_s"].value / 60
    yield _limit(
        fleet,
        "heartbeats and housekeeping, one process",
        rates.control_share - base,
        1.0 - base,
        "cores",
        ("planning-heartbeats",),
        f"several servers of at most {rates.devices_most:,} devices",
    )
    yield _limit(
        fleet,
        "queries, one backend",
        rates.peak_per_s,
        1 / rates.query_s,
        "queries/s",
        ("planning-service",),
        f"{backends} backend{'s' if backends > 1 else ''} for each server",
    )
    yield _limit(
        fleet,
        f"the server's link of {LINK_MBIT:,.0f} Mbit/s",
        8 * rates.peak_bytes_per_s / 1e6,
        LINK_MBIT,
        "Mbit/s",
        ("planning-sizes",),
        "a smaller codec, a deeper cut, several servers",
    )


def _limits_of_broker(fleet: Fleet, figures: Figures, rates: Rates) -> Iterator[Limit]:
    yield _limit(
        fleet,
        "messages, one Mosquitto, which uses one core",
        rates.broker_share,
        1.0,
        "cores",
        ("planning-service", "planning-heartbeats"),
        "EMQX, which uses all cores, or a server with a Mosquitto for each part of the fleet",
    )
    logins = figures["logins_tls_per_s" if fleet.tls else "logins_per_s"].value
    yield _limit(
        fleet,
        f"all devices are back {BACK_S:g} s after the broker was restarted",
        fleet.devices / logins,
        BACK_S,
        "s",
        ("brokers",),
        "several brokers; one that resumes TLS sessions, or ends TLS on more cores",
    )


def _limits_of_history(fleet: Fleet, figures: Figures) -> Iterator[Limit]:
    rows = fleet.devices / max(fleet.heartbeat_s, RAW_S)
    rate = figures["rows_per_s"]
    yield _limit(
        fleet,
        "points of the history that SQLite takes",
        rows,
        rate.value,
        "rows/s",
        (rate.report,),
        "PostgreSQL (`--registry`), or heartbeats further apart (`heartbeat_s`)",
    )
    yield _limit(
        fleet,
        "a day of history at the default bound",
        min(rows * HISTORY_S, fleet.devices * (120 + 1_380)),
        POINTS_MOST,
        "points",
        (),
        "`--telemetry-points`; Prometheus for what lies further back",
    )
    yield _limit(
        fleet,
        "points that housekeeping thins",
        rows,
        ROWS_AT_ONCE / THINNED_EACH_S,
        "rows/s",
        (),
        "heartbeats further apart; the oldest points are dropped in place of thinned",
    )


def _limits_of_page(fleet: Fleet, figures: Figures) -> Iterator[Limit]:
    page = figures["fleet_page_bytes"]
    yield _limit(
        fleet,
        "devices with which the dashboard was measured",
        fleet.devices,
        page.largest or math.inf,
        "devices",
        (page.report,),
        "tags and fleets as filters; Grafana over `/metrics` for the whole",
    )
