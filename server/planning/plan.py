"""The plan of a fleet: what each part takes, in machines, cores, memory and bytes a day.

One server with its broker and its database holds so many devices; a larger fleet is parted among
several such servers, each with devices of its own. Backends share the queries of one server.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from server.planning.figures import Figures
from server.planning.fleet import Fleet, Prices
from server.planning.limits import Limit, limits_of
from server.planning.queueing import servers_needed, wait_share
from server.planning.rates import Rates, rates_of
from server.registry.telemetry.history import AGE_MOST_S, POINTS_MOST, RAW_S, STEPS

DAY_S: Final = 86_400.0
MONTH_DAYS: Final = 30.0
SERVED: Final = "planning-service"
BEATS: Final = "planning-heartbeats"
SIZES: Final = "planning-sizes"


@dataclass(frozen=True, slots=True)
class Line:
    """One amount of a plan.

    Attributes:
        reports: names of the reports that it is from; empty for what follows from the fleet alone.
        beyond: how many times as far as was measured; at most 1 where it was measured.
    """

    part: str
    what: str
    value: float
    unit: str
    reports: tuple[str, ...] = ()
    beyond: float = 0.0

    @property
    def extrapolated(self) -> bool:
        """Whether it lies beyond what was measured."""
        return self.beyond > 1


@dataclass(frozen=True, slots=True)
class Plan:
    """A fleet's plan.

    Attributes:
        servers: each with a broker and a database of its own. backends: of each server.
        cores, memory_gb: of all machines' programs. machines: of the size that was given.
        gb_per_day: over the network, both directions.
        money_month: None without a price.
        limits: what breaks first, the nearest one first.
    """

    fleet: Fleet
    servers: int
    backends: int
    cores: int
    memory_gb: float
    machines: int
    gb_per_day: float
    money_month: float | None
    lines: tuple[Line, ...]
    limits: tuple[Limit, ...]


def plan_of(fleet: Fleet, figures: Figures, prices: Prices | None = None) -> Plan:
    """Plan a fleet.

    Raises: ConfigurationError for a network or a codec without figures, and for a deadline that the
        service alone takes.
    """
    prices = prices or Prices()
    rates = rates_of(fleet, figures)
    servers = max(1, math.ceil(fleet.devices / rates.devices_most))
    own = rates.of_one(servers)  # of one server
    backends = servers_needed(
        own.peak_per_s,
        rates.query_s,
        busy_most=fleet.busy_most,
        wait_s=rates.patience_s,
        late_most=fleet.late_most,
    )
    core_busy = own.control_share + own.broker_share
    cores = servers * (max(2, math.ceil(core_busy / fleet.busy_most)) + backends)
    server_mb = own.server_mb + own.broker_mb + backends * figures["backend_mb"].value
    memory_gb = servers * server_mb / 1e3
    gb_per_day = rates.bytes_per_day / 1e9
    machines = max(
        servers,
        math.ceil(cores / prices.machine_cores),
        math.ceil(memory_gb / prices.machine_gb),
    )
    lines = (
        *_load(fleet, rates),
        *_brokers(fleet, figures, own, servers),
        *_backends(fleet, figures, rates, own, (servers, backends)),
        *_database(fleet, figures, own),
        *_network(fleet, rates),
        *_people(fleet, figures),
    )
    return Plan(
        fleet,
        servers,
        backends,
        cores,
        memory_gb,
        machines,
        gb_per_day,
        _money(prices, machines, gb_per_day),
        lines,
        limits_of(fleet, figures, rates, backends),
    )


def _money(prices: Prices, machines: int, gb_per_day: float) -> float | None:
    if prices.machine_month is None and prices.traffic_gb is None:
        return None
    traffic = (prices.traffic_gb or 0.0) * gb_per_day * MONTH_DAYS
    return machines * (prices.machine_month or 0.0) + traffic


def _load(fleet: Fleet, rates: Rates) -> Iterator[Line]:
    part = "load"
    yield Line(part, "answers", fleet.answers_per_s, "/s")
    yield Line(part, "offloads, mean of the day", fleet.offloads_per_s, "/s")
    yield Line(part, "offloads, busiest minute", fleet.peak_per_s, "/s")
    yield Line(part, "heartbeats", fleet.beats_per_s, "/s")
    most = "devices that one server holds"
    yield Line(part, most, rates.devices_most, "", (BEATS, SERVED), rates.beyond)


def _brokers(fleet: Fleet, figures: Figures, own: Rates, servers: int) -> Iterator[Line]:
    part = "broker, each"
    beyond = own.devices / (figures["connection_bytes"].largest or math.inf)
    memory = ("brokers",)
    yield Line(part, "connections", own.devices, "", memory, beyond)
    yield Line(part, "memory", own.broker_mb * 1e6, "bytes", memory, beyond)
    busy = max(
        own.peak_per_s / (figures["broker_query_us"].largest or math.inf),
        own.devices / (figures["broker_beat_us"].largest or math.inf),
    )
    yield Line(part, "busy at the peak", own.broker_share, "of a core", (SERVED, BEATS), busy)
    name = "logins_tls_per_s" if fleet.tls else "logins_per_s"
    login_s = own.devices / figures[name].value
    yield Line(part, "all devices log in again", login_s, "s", memory, beyond)
    yield Line(part, "brokers", servers, "")


def _backends(
    fleet: Fleet, figures: Figures, rates: Rates, own: Rates, counts: tuple[int, int]
) -> Iterator[Line]:
    part, (servers, backends) = "backends", counts
    beyond = own.peak_per_s / (figures["server_query_us"].largest or math.inf) / backends
    from_reports = (SERVED,) if fleet.service_ms is None else ()
    yield Line(part, "of the processor, a query", 1e3 * rates.query_s, "ms", from_reports)
    yield Line(part, "backends of each server", backends, "", from_reports, beyond)
    busy = own.peak_per_s * rates.query_s / backends
    yield Line(part, "each is busy at the peak", busy, "of a core", from_reports, beyond)
    late = wait_share(backends, own.peak_per_s, rates.query_s, rates.patience_s)
    yield Line(part, "offloads that wait too long, Erlang C", late, "share", from_reports, beyond)
    memory = servers * backends * figures["backend_mb"].value * 1e6
    yield Line(part, "memory of all", memory, "bytes", (SERVED,))


def _database(fleet: Fleet, figures: Figures, own: Rates) -> Iterator[Line]:
    part = "server and database, each"
    beyond = own.devices / (figures["server_device_s"].largest or math.inf)
    yield Line(part, "busy with heartbeats", own.control_share, "of a core", (BEATS,), beyond)
    yield Line(part, "memory", own.server_mb * 1e6, "bytes", (BEATS,), beyond)
    rows = own.devices / max(fleet.heartbeat_s, RAW_S)
    written = rows / figures["rows_per_s"].value
    yield Line(part, "points of the history", rows, "rows/s", (BEATS,), written)
    point = figures["point_bytes"].value
    yield Line(part, "written", rows * point * DAY_S, "bytes a day", (BEATS,), written)
    full = own.devices * points_of_one(fleet.heartbeat_s)
    yield Line(part, "history of 30 days", full * point, "bytes", (BEATS,))
    kept_s = POINTS_MOST / rows
    yield Line(part, f"{POINTS_MOST:,} points last, at least", kept_s / 3_600, "hours")


def points_of_one(heartbeat_s: float) -> float:
    """Points of a device's whole history: raw, then thinned (server.registry.telemetry.history)."""
    ages = [age for _, _, age in STEPS] + [AGE_MOST_S]
    widths = [max(heartbeat_s, RAW_S), *(coarse for _, coarse, _ in STEPS)]
    begins = [0, *ages[:-1]]
    return sum(
        (end - begin) / width for begin, end, width in zip(begins, ages, widths, strict=True)
    )


def _network(fleet: Fleet, rates: Rates) -> Iterator[Line]:
    part = "network, all"
    for what, amount in rates.daily.items():
        given = {"queries": fleet.query_bytes, "bundles": fleet.bundle_bytes}.get(what)
        yield Line(part, what, amount, "bytes a day", (SIZES,) if given is None else ())
    yield Line(part, "mean of one device", rates.bytes_per_day / fleet.devices, "bytes a day")
    yield Line(part, "busiest minute", 8 * rates.peak_bytes_per_s / 1e6, "Mbit/s")


def _people(fleet: Fleet, figures: Figures) -> Iterator[Line]:
    part = "people"
    enrol = figures["enrol_s"]
    seconds = fleet.devices * enrol.value
    beyond = fleet.devices / (enrol.largest or math.inf)
    yield Line(part, "enrolment of all by one program", seconds, "s", (enrol.report,), beyond)
    page = figures["fleet_page_bytes"]
    beyond = fleet.devices / (page.largest or math.inf)
    # the page's own files are a part of it, whatever the number of devices
    weight = max(fleet.devices, page.largest or 0.0) * page.value
    yield Line(part, "first load of the fleet's page", weight, "bytes", (page.report,), beyond)
