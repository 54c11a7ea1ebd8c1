"""The history of devices: differences of heartbeats, thinned with age, bounded in all."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.answers.tally import LATENCY_BINS, UNCERTAINTY_BINS
from profiles import load_reference
from server.errors import RegistryError
from server.registry.database import Registry
from server.registry.telemetry.history import AGE_MOST_S, LastReading
from server.registry.telemetry.point import TelemetryPoint, merged, point_between
from server.registry.telemetry.reading import COUNT_MOST, Reading
from server.telemetry.recorder import TelemetryRecorder
from tests.clock import Clock

NOON = 1_800_000_000.0  # a multiple of 900


@pytest.fixture
def clock() -> Clock:
    return Clock(NOON)


@pytest.fixture
def registry(registry_url: str, clock: Clock) -> Iterator[Registry]:
    """With the devices pi-1 and pi-2 of the fleet `yard`, and other of `default`."""
    opened = Registry.open(registry_url, clock=clock)
    profile = load_reference("raspberry-pi-4").to_dict()
    for name in ("pi-1", "pi-2"):
        opened.redeem_token(opened.create_token("yard"), name, profile)
    opened.redeem_token(opened.create_token(), "other", profile)
    yield opened
    opened.close()


def bins(count: int, *places: int) -> list[int]:
    return [int(index in places) for index in range(count)]


def heartbeat(exits: int, offloads: int = 0, fallbacks: int = 0, **more: Any) -> dict[str, Any]:
    """A heartbeat in the form that agents send."""
    counters = {"device": exits, "server": offloads, "fallback": fallbacks, "late_waiting": 0}
    return {
        "bundle": "m/1/d1",
        "presence": "present",
        "threshold": 0.5,
        "counters": counters,
        "run": "ab12",
        "uptime_s": 60.0,
        "answers": {
            "since": "cd34",
            "largest": 2.0,
            "uncertainty": [exits, *[0] * (UNCERTAINTY_BINS - 2), offloads],
            "latency": {"device": [0, 0, exits, *[0] * (LATENCY_BINS - 3)]},
        },
        "link": {"round_trip_ms": 3.5},
        "memory": {"resident_bytes": 70_000_000, "available_bytes": 500_000_000},
        **more,
    }


def last(at: float, content: dict[str, Any]) -> LastReading:
    return LastReading(at, Reading.from_heartbeat(content))


def test_a_point_is_the_difference_of_two_heartbeats(registry: Registry) -> None:
    history = registry.telemetry
    history.record({"pi-1": last(NOON - 60, heartbeat(10, 2))})
    history.record({"pi-1": last(NOON - 30, heartbeat(17, 3, 1))})
    first, second = history.of("pi-1")
    assert (first.exits, first.span_s) == (10, 60.0)
    assert (second.at, second.span_s) == (NOON - 30, 30.0)
    assert (second.exits, second.offloads, second.fallbacks) == (7, 1, 1)
    assert (second.uncertainty[0], second.uncertainty[-1], sum(second.uncertainty)) == (7, 1, 8)
    assert second.latency["device"][2] == 7
    assert (second.bundle, second.presence, second.threshold) == ("m/1/d1", "present", 0.5)
    assert (second.round_trip_ms, second.memory_bytes) == (3.5, 70_000_000)
    assert history.of("pi-2") == []


def test_a_span_that_has_offloading_switched_off_in_it_says_so(registry: Registry) -> None:
    history = registry.telemetry
    told = [True, False, False, True, True]
    for at, offloading in enumerate(told):
        content = heartbeat(10 + at, offloading=offloading)
        history.record({"pi-1": last(NOON - 300 + 30 * at, content)})
    points = history.of("pi-1")
    assert [point.offloading for point in points] == [True, False, False, False, True]
    assert not merged(points).offloading
    assert merged(points[-1:]).offloading
    assert "offloading" not in points[0].to_dict()  # as it nearly always is


def test_a_histogram_begins_anew_with_another_bundle(registry: Registry) -> None:
    history = registry.telemetry
    bundles = ("m/1/d1", "m/1/d1", "m/2/d1", "m/2/d1", "m/1/d1")
    for at, bundle in enumerate(bundles):
        content = heartbeat(7 * (at + 1), bundle=bundle)
        content["answers"]["since"] = f"{bundles.index(bundle) if at < 4 else 9:04x}"
        if at in (2, 4):  # counts of answers since the bundle was loaded
            content["answers"]["uncertainty"] = [3] * UNCERTAINTY_BINS
        if at == 3:
            content["answers"]["uncertainty"] = [5] * UNCERTAINTY_BINS
        history.record({"pi-1": last(NOON - 300 + 30 * at, content)})
    points = history.of("pi-1")
    assert [sum(one.uncertainty) for one in points] == [7, 7, 96, 64, 96]
    assert sum(merged(points[:2]).uncertainty) == 14
    assert merged(points[:4]).uncertainty == (5,) * UNCERTAINTY_BINS  # 3, and 2 more
    assert merged(points).uncertainty == (3,) * UNCERTAINTY_BINS  # not those of its first time
    assert merged(points).exits == 35


def test_a_restart_counts_from_zero_even_if_the_counts_are_higher(registry: Registry) -> None:
    history = registry.telemetry
    history.record({"pi-1": last(NOON - 60, heartbeat(10))})
    again = heartbeat(12, run="ef56", uptime_s=20.0)
    again["answers"]["since"] = "0078"
    history.record({"pi-1": last(NOON - 30, again)})
    point = history.of("pi-1")[-1]
    assert (point.exits, point.restarts, point.span_s) == (12, 1, 20.0)
    assert sum(point.uncertainty) == 12


def test_another_bundle_begins_its_histograms_and_goes_on_with_the_counts(
    registry: Registry,
) -> None:
    history = registry.telemetry
    history.record({"pi-1": last(NOON - 60, heartbeat(10))})
    changed = heartbeat(15, bundle="m/2/d1")
    changed["answers"] |= {"since": "99", "uncertainty": bins(UNCERTAINTY_BINS, 4), "latency": {}}
    history.record({"pi-1": last(NOON - 30, changed)})
    point = history.of("pi-1")[-1]
    assert (point.exits, point.restarts, point.bundle) == (5, 0, "m/2/d1")
    assert point.uncertainty == tuple(bins(UNCERTAINTY_BINS, 4))


def test_heartbeats_of_the_release_before_have_a_history_too(registry: Registry) -> None:
    def old(exits: int) -> dict[str, Any]:
        kept = ("bundle", "presence", "threshold", "counters")
        return {key: value for key, value in heartbeat(exits).items() if key in kept}

    history = registry.telemetry
    for step, exits in enumerate((1000, 1004, 3)):  # then it restarts
        history.record({"pi-1": last(NOON - 90 + 30 * step, old(exits))})
    points = history.of("pi-1")
    # how long it had counted is not known at first, so that is no point of the last minutes
    assert [(one.exits, one.restarts, one.uncertainty) for one in points] == [
        (0, 0, ()),
        (4, 0, ()),
        (3, 1, ()),
    ]


def test_an_unknown_device_has_no_history_and_spoils_no_other(registry: Registry) -> None:
    registry.telemetry.record({"pi-1": last(NOON, heartbeat(1)), "gone": last(NOON, heartbeat(1))})
    assert len(registry.telemetry.of("pi-1")) == 1
    assert registry.telemetry.of("gone") == []


def test_thinning_keeps_every_answer(registry: Registry, clock: Clock) -> None:
    """Thirty hours of heartbeats every 15 min and a bit, then a minute of them every 10 s."""
    history = registry.telemetry
    exits = 0
    times = [
        *(NOON + 930 * step for step in range(120)),
        *(NOON + 111_610 + 10 * i for i in range(6)),
    ]
    for at in times:
        exits += 3
        clock.now = at
        history.record({"pi-1": last(at, heartbeat(exits))})
    clock.now += 3_700
    while history.thin(rows_most=20):
        pass
    points = history.of("pi-1", since_s=AGE_MOST_S, points_max=10_000)
    assert sum(point.exits for point in points) == exits
    assert sum(sum(point.uncertainty) for point in points) == exits
    assert sum(point.span_s for point in points) == pytest.approx(60 + times[-1] - NOON)
    day_ago, hour_ago = clock.now - 86_400, clock.now - 3_600
    old = [point.at for point in points if point.at <= day_ago - 900]
    assert old
    assert all(at % 900 == 0 for at in old)
    middle = [point.at for point in points if day_ago < point.at <= hour_ago - 60]
    assert all(at % 60 == 0 for at in middle)
    assert len({point.at for point in points}) == len(points) < len(times)
    # the last minute of heartbeats is one point, or two where it lies across a full minute
    assert 1 <= sum(point.at > NOON + 111_600 for point in points) <= 2


def test_what_is_too_old_or_too_much_goes_oldest_first(registry: Registry, clock: Clock) -> None:
    history = registry.telemetry
    for step in range(20):
        history.record({"pi-1": last(NOON + 10 * step, heartbeat(step))})
    clock.now = NOON + 200
    assert history.prune(points_most=5) == 15
    assert [point.at for point in history.of("pi-1")] == [
        NOON + 10 * step for step in range(15, 20)
    ]
    clock.now = NOON + AGE_MOST_S + 180
    assert history.prune(by_age=False) == 0
    assert history.prune(points_most=4, by_age=False) == 1
    assert history.prune() == 2
    # a clock that was years ahead leaves no points that stay for ever
    history.record({"pi-1": last(NOON + 10 * AGE_MOST_S, heartbeat(99))})
    assert history.prune(by_age=False) == 0
    assert history.prune() == 1


def test_a_wrong_clock_puts_no_points_together(registry: Registry, clock: Clock) -> None:
    recorder = TelemetryRecorder(registry.telemetry)
    for step in range(20):
        registry.telemetry.record({"pi-1": last(NOON + 10 * step, heartbeat(step))})
    clock.now = NOON + AGE_MOST_S
    recorder.keep_bounds(by_age=False)
    assert registry.telemetry.prune(points_most=20, by_age=False) == 0
    assert len(registry.telemetry.of("pi-1", since_s=2 * AGE_MOST_S)) == 20
    clock.now = NOON + 7_200
    recorder.keep_bounds()
    assert len(registry.telemetry.of("pi-1", since_s=2 * AGE_MOST_S)) < 20


def test_few_points_are_asked_for_and_lose_nothing(registry: Registry, clock: Clock) -> None:
    history = registry.telemetry
    for step in range(100):
        clock.now = NOON + 10 * step
        history.record({"pi-1": last(clock.now, heartbeat(2 * step + 2))})
    points = history.of("pi-1", since_s=3_600, points_max=12)
    assert 0 < len(points) <= 12
    assert sum(point.exits for point in points) == 200
    assert [point.at for point in points] == sorted(point.at for point in points)


def test_a_fleet_is_added_up_by_the_database(registry: Registry, clock: Clock) -> None:
    history = registry.telemetry
    for device in ("pi-1", "pi-2", "other"):
        history.record({device: last(NOON + 30, heartbeat(4, 2, 1))})
        history.record({device: last(NOON + 90, heartbeat(9, 2, 3))})
    clock.now = NOON + 120
    yard = history.of_fleet("yard")
    counts = [(one.at, one.exits, one.offloads, one.fallbacks, one.devices) for one in yard]
    assert counts == [(NOON + 60, 8, 4, 2, 2), (NOON + 120, 10, 0, 4, 2)]
    assert [(one.exits, one.devices) for one in history.of_fleet()] == [(12, 3), (15, 3)]
    assert history.of_fleet("nowhere") == []
    assert history.sums()["pi-2"] == (9, 2, 3)
    assert history.last(["pi-1"])["pi-1"].reading.counts["exits"] == 9


def test_a_device_that_is_deleted_takes_its_history_along(registry: Registry) -> None:
    token = registry.create_token()
    device, _ = registry.redeem_token(token, "brief", load_reference("raspberry-pi-4").to_dict())
    registry.telemetry.record({"brief": last(NOON, heartbeat(1))})
    registry.undo_enrolment(device, token)
    assert registry.telemetry.of("brief") == []
    assert registry.telemetry.last() == {}


# the recorder


def test_a_locked_database_costs_resolution_and_no_answer(tmp_path: Path, clock: Clock) -> None:
    file = tmp_path / "registry.db"
    registry = Registry.open(f"sqlite:///{file}", clock=clock)
    registry.redeem_token(
        registry.create_token(), "pi-1", load_reference("raspberry-pi-4").to_dict()
    )
    monotonic = Clock(1e6)
    recorder = TelemetryRecorder(registry.telemetry, clock=monotonic)
    recorder.note({"pi-1": (NOON, heartbeat(5))})
    recorder.write()
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for step, exits in enumerate((8, 12)):
            monotonic.now += 30
            recorder.note({"pi-1": (NOON + 30 * (step + 1), heartbeat(exits))})
            if step == 0:
                with pytest.raises(RegistryError, match="try again"):
                    recorder.write()
    recorder.write()
    assert [point.exits for point in registry.telemetry.of("pi-1")] == [5, 7]
    registry.close()


def test_a_device_that_talks_all_the_time_gets_no_more_points_than_others(
    tmp_path: Path, clock: Clock
) -> None:
    registry = Registry.open(f"sqlite:///{tmp_path}/registry.db", clock=clock)
    registry.redeem_token(
        registry.create_token(), "pi-1", load_reference("raspberry-pi-4").to_dict()
    )
    monotonic = Clock(1e6)
    recorder = TelemetryRecorder(registry.telemetry, step_s=10.0, clock=monotonic)
    for second in range(31):
        monotonic.now += 1
        recorder.note({"pi-1": (NOON - 60 + second, heartbeat(second))})
        recorder.write()
    assert [point.exits for point in registry.telemetry.of("pi-1")] == [0, 10, 10, 10]
    recorder.note({"pi-1": (NOON - 10, heartbeat(44))}, gone=["pi-1", "pi-2"])
    recorder.write()  # it said goodbye
    assert registry.telemetry.of("pi-1")[-1].exits == 14
    recorder.note({"pi-1": (NOON, heartbeat(45))})
    recorder.write(last=True)  # the server stops
    assert registry.telemetry.of("pi-1")[-1].exits == 1
    registry.close()


# readings come from outside

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
KEYS = st.sampled_from(sorted(heartbeat(0)))


@settings(max_examples=50)
@given(st.dictionaries(KEYS, JSON), st.dictionaries(KEYS, JSON))
def test_any_heartbeat_is_read_and_kept_within_bounds(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    before = Reading.from_heartbeat({**heartbeat(1), **first})
    now = Reading.from_heartbeat({**heartbeat(2), **second})
    text = orjson.dumps(now.to_dict())
    assert len(text) < 4_096
    assert Reading.from_dict(orjson.loads(text)) == now
    point = point_between(before, now, at=NOON, span_s=30.0)
    both = merged([point, point_between(None, before, at=NOON - 30, span_s=0.0)])
    for one in (point, both):
        assert TelemetryPoint.from_dict(orjson.loads(orjson.dumps(one.to_dict()))) == one
    assert point.answers >= 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("counters", {"device": -1, "server": True, "fallback": COUNT_MOST + 1}),
        ("answers", {"largest": -1.0, "uncertainty": [1] * UNCERTAINTY_BINS}),
        ("answers", {"largest": 2.0, "uncertainty": [1] * (UNCERTAINTY_BINS + 1)}),
        ("threshold", float("inf")),
        ("run", "../../etc"),
        ("bundle", "../../etc"),
        ("presence", "<script>"),
        ("memory", [1]),
    ],
)
def test_what_no_agent_sends_is_left_out(field: str, value: object) -> None:
    reading = Reading.from_heartbeat({field: value})
    assert reading == Reading()
