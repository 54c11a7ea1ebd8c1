"""The plan of a fleet: amounts worked out by hand, limits, prices and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.errors import ConfigurationError
from server.planning.figures import Figure, Figures, NetworkFigures, load_figures
from server.planning.fleet import Fleet, Prices
from server.planning.plan import Plan, plan_of, points_of_one
from server.planning.rates import MQTT_BYTES, TCP_BYTES, TLS_BYTES
from server.planning.words import amount
from server.services import FULL_CHECK_S
from tests.commands import Splitedge

VALUES = {
    "connection_bytes": 10_000.0,
    "connection_tls_bytes": 20_000.0,
    "logins_per_s": 1_000.0,
    "logins_tls_per_s": 100.0,
    "broker_base_mb": 10.0,
    "server_query_us": 500.0,
    "broker_query_us": 100.0,
    "backend_mb": 200.0,
    "server_base_s": 6.0,  # a tenth of a core
    "server_device_s": 0.006,  # 1e-4 of a core
    "server_base_mb": 150.0,
    "server_device_mb": 0.01,
    "broker_beat_us": 50.0,
    "rows_per_s": 1_000.0,
    "point_bytes": 500.0,
    "heartbeat_bytes": 800.0,
    "enrol_s": 0.01,
    "fleet_page_bytes": 200.0,
    "agent_mb": 90.0,
}
NETWORK = NetworkFigures(2, {"int8": 1_000.0}, 200.0, 3_000_000.0, {1: 0.0095, 2: 0.015})
FIGURES = Figures(
    {name: Figure(value, "", "brokers", "", 5_000.0) for name, value in VALUES.items()},
    {"small": NETWORK},
)


def planned(devices: int, prices: Prices | None = None, **more: object) -> Plan:
    fleet = replace(Fleet(devices, network="small"), **more)  # type: ignore[arg-type]  # checked when built
    return plan_of(fleet, FIGURES, prices)


def value(plan: Plan, what: str, part: str = "") -> float:
    (found,) = (
        line.value for line in plan.lines if line.what == what and line.part.startswith(part)
    )
    return found


def test_amounts_are_those_worked_out_by_hand() -> None:
    plan = planned(3_600, queries_per_hour=100.0, offload=0.2, peak=3.0)
    # 3,600 x 100 / 3,600 s = 100 answers/s, 20 offloads/s, 60 at the peak, 120 heartbeats/s
    assert value(plan, "answers") == pytest.approx(100.0)
    assert value(plan, "offloads, mean of the day") == pytest.approx(20.0)
    assert value(plan, "offloads, busiest minute") == pytest.approx(60.0)
    assert value(plan, "heartbeats", "load") == pytest.approx(120.0)
    # 9.5 ms of the engine and 0.5 ms around it; 0.6 erlang, half of a core each: two backends
    assert value(plan, "of the processor, a query") == pytest.approx(10.0)
    assert (plan.servers, plan.backends) == (1, 2)
    assert value(plan, "each is busy at the peak") == pytest.approx(0.3)
    # 0.1 + 3,600 x 1e-4 of a core for heartbeats
    assert value(plan, "busy with heartbeats") == pytest.approx(0.46)
    # 60 x 100 us + 120 x 50 us
    assert value(plan, "busy at the peak", "broker") == pytest.approx(0.012)
    assert value(plan, "all devices log in again") == pytest.approx(36.0)


def test_bytes_a_day_are_those_worked_out_by_hand() -> None:
    plan = planned(1_000, queries_per_hour=36.0, offload=0.5, updates_per_month=2.0)
    # 5 offloads/s and 33.3 heartbeats/s, 86,400 s a day
    around = MQTT_BYTES + TCP_BYTES + TLS_BYTES
    daily = {
        "queries": 432_000 * 1_000,
        "replies": 432_000 * 200,
        "heartbeats": 2_880_000 * 800,
        "bundles": 1_000 * 3_000_000 * 2 / 30,
        "headers of MQTT, TCP and TLS": (2 * 432_000 + 2_880_000) * around,
    }
    for what, expected in daily.items():
        assert value(plan, what, "network") == pytest.approx(expected)
    assert plan.gb_per_day == pytest.approx(sum(daily.values()) / 1e9)


def test_a_fleet_above_one_server_is_parted_among_several() -> None:
    # half of a core less the tenth at rest, 1e-4 of a core for each: 4,000 devices
    assert planned(4_000, offload=0.0).servers == 1
    assert planned(4_001, offload=0.0).servers == 2
    many = planned(1_000_000, offload=0.0)
    assert many.servers == 250
    assert value(many, "connections") == 4_000


def test_points_of_one_device_are_those_of_the_ages_and_steps() -> None:
    # an hour at 30 s, 23 hours at 60 s, 29 days at 900 s
    assert points_of_one(30.0) == 120 + 1_380 + 2_784


@given(devices=st.integers(1, 10**7), more=st.integers(1, 10**7))
def test_more_devices_never_take_less(devices: int, more: int) -> None:
    small, large = planned(devices), planned(devices + more)
    assert small.servers <= large.servers
    assert small.servers * small.backends <= large.servers * large.backends
    assert small.gb_per_day < large.gb_per_day
    assert small.machines <= large.machines


@pytest.mark.parametrize("devices", [10, 10_000, 1_000_000])
def test_a_limit_is_full_at_the_devices_that_it_names(devices: int) -> None:
    limits = plan_of(Fleet(devices), load_figures()).limits
    assert [limit.used for limit in limits] == sorted((one.used for one in limits), reverse=True)
    for limit in limits:
        if limit.what.startswith("a day of history") or limit.devices < 2:
            continue
        there = plan_of(Fleet(round(limit.devices)), load_figures()).limits
        (same,) = (one for one in there if one.what == limit.what)
        # the broker and the server have a part that does not grow, devices are whole
        assert same.used == pytest.approx(1.0, rel=0.02)


def test_the_plan_thins_as_often_as_the_server_does() -> None:
    from server.planning.limits import THINNED_EACH_S

    assert THINNED_EACH_S == FULL_CHECK_S


def test_what_lies_beyond_the_measurements_says_so() -> None:
    def extrapolated(devices: int) -> bool:
        lines = planned(devices, busy_most=0.9, offload=0.0).lines
        return any(line.extrapolated for line in lines if line.part == "broker, each")

    assert not extrapolated(5_000)
    assert extrapolated(6_000)


def test_money_is_told_at_prices_that_were_given_alone() -> None:
    assert planned(1_000).money_month is None
    prices = Prices(machine_cores=2, machine_gb=4.0, machine_month=10.0, traffic_gb=0.1)
    plan = planned(1_000, prices)
    expected = 10.0 * plan.machines + 0.1 * 30 * plan.gb_per_day
    assert plan.money_month == pytest.approx(expected)
    assert 2 * plan.machines >= plan.cores


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"network": "huge"}, "network: expected one of small, got huge"),
        ({"codec": "jpeg"}, "codec: expected one of int8, got jpeg"),
        ({"deadline_ms": 5.0}, "no answer could be in time"),
        ({"offload": 1.5}, "offload: expected"),
        ({"devices": 0}, "devices: expected"),
    ],
)
def test_a_fleet_that_cannot_be_planned_is_refused(
    changed: dict[str, object], message: str
) -> None:
    values: Any = changed  # wrong on purpose
    with pytest.raises(ConfigurationError, match=message):
        plan_of(replace(Fleet(10, network="small"), **values), FIGURES)


def test_the_command_tells_the_plan_and_where_its_figures_are_from(splitedge: Splitedge) -> None:
    called = splitedge("server", "plan", "--devices", 10_000, "--offload", "20%")
    assert called.status == 0
    assert called.out.startswith("10,000 devices: ")
    assert "planning-heartbeats" in called.out
    assert "What breaks first" in called.out
    told = splitedge("server", "plan", "--devices", 10, "--machine-price", 5, "--json").json
    assert told["money_month"] == 5.0 * told["machines"]
    assert told["fleet"]["offload"] == 0.2


def test_the_command_refuses_a_share_above_one(splitedge: Splitedge) -> None:
    called = splitedge("server", "plan", "--devices", 10, "--offload", "120%")
    assert called.status == 2
    assert "expected a share such as 20%" in " ".join(called.err.split())


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (0.0, "", "0"),
        (12_345.0, "", "12,345"),
        (0.1234, "of a core", "0.123 of a core"),
        (2.5e9, "bytes a day", "2.5 GB a day"),
        (100.0, "bytes", "100 bytes"),
        (90.0, "s", "90 s"),
        (7_200.0, "s", "2 hours"),
        (0.001, "share", "0.1 %"),
        (33.333, "/s", "33.3/s"),
        (1e-9, "share", "below 0.0001 %"),
    ],
)
def test_amounts_are_written_as_people_read_them(number: float, unit: str, text: str) -> None:
    assert amount(number, unit) == text
