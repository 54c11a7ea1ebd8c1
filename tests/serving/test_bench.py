"""What `splitedge bench` says and how it counts; how fast a machine is, is no test."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge_sdk.cli.main import main
from server.bench.measure import Row, at_least, at_most, figure, not_measured, take_turns


class Clock:
    """A clock that only moves when something takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Worker:
    """Takes as long as it is told, call by call."""

    def __init__(self, clock: Clock, *seconds: float) -> None:
        self.clock = clock
        self.left = list(seconds)

    def __call__(self) -> None:
        self.clock.now += self.left.pop(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(
        "server.bench.measure.time", SimpleNamespace(perf_counter=clock.perf_counter)
    )
    return clock


def test_a_goal_is_met_at_the_limit_itself() -> None:
    assert at_most("a", 1.25, "x", 1.25, 59.0) == Row("a", 1.25, "x", 1.25, True, 59.0)
    assert at_least("b", 0.7, "x", 0.7, 100.0) == Row("b", 0.7, "x", 0.7, True, 100.0)


def test_rounding_what_is_shown_does_not_meet_a_goal() -> None:
    assert at_most("a", 1.25001, "x", 1.25, 1.0) == Row("a", 1.25, "x", 1.25, False, 1.0)
    assert at_least("b", 0.69999, "x", 0.7, 1.0) == Row("b", 0.7, "x", 0.7, False, 1.0)


def test_a_goal_that_nobody_looked_at_is_not_met() -> None:
    row = not_measured("server", "x", 0.7, "no broker")
    assert row == Row("server: not measured, no broker", None, "x", 0.7, False, None)


def test_a_figure_without_a_goal_is_no_miss() -> None:
    assert figure("energy", 0.12345, "mJ", None) == Row("energy", 0.1235, "mJ", None, True, None)


def test_energy_of_an_exit_and_of_an_offload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "bench.json"
    words = ["bench", "--quick", "--only", "energy", "--report", str(report)]
    monkeypatch.setattr(sys, "argv", ["splitedge", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    exits, offloads, ratio = json.loads(report.read_bytes())
    assert [row["unit"] for row in (exits, offloads, ratio)] == ["mJ", "mJ", "x"]
    assert {row["limit"] for row in (exits, offloads, ratio)} == {None}
    assert exits["value"] > 0
    assert ratio["value"] == pytest.approx(offloads["value"] / exits["value"], rel=0.01)
    assert "offload against exit" in ratio["name"]


def test_figure_is_the_median_of_the_medians_of_the_rounds(clock: Clock) -> None:
    # rounds (1, 9, 2), (3, 3, 50), (4, 5, 60): medians 2, 3, 5; their median 3
    one = Worker(clock, 1, 9, 2, 3, 3, 50, 4, 5, 60)
    other = Worker(clock, *[2] * 9)
    assert take_turns([one, other], rounds=3, calls=3) == [3, 2]
    assert (one.left, other.left) == ([], [])


def test_candidates_take_turns_round_by_round() -> None:
    order: list[str] = []
    take_turns([lambda: order.append("a"), lambda: order.append("b")], rounds=2, calls=3)
    assert "".join(order) == "aaabbbaaabbb"


def test_report_of_one_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "new" / "bench.json"
    words = ["bench", "--quick", "--only", "device", "--report", str(report)]
    monkeypatch.setattr(sys, "argv", ["splitedge", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    rows = json.loads(report.read_bytes())
    for row in rows:
        assert row.keys() == {"name", "value", "unit", "limit", "ok", "reference_value"}
        assert math.isfinite(row["value"])
        assert row["reference_value"] > 0
        assert "predict that exits on the device" in row["name"]
    # a ratio and a difference for each network, of the same two times
    for ratio, difference in zip(rows[::2], rows[1::2], strict=True):
        assert (ratio["unit"], ratio["limit"]) == ("x", 1.25)
        assert (difference["unit"], difference["limit"]) == ("us", 20)
        added_us = (ratio["value"] - 1) * ratio["reference_value"]
        assert difference["value"] == pytest.approx(added_us, abs=0.05)
    shown = capsys.readouterr().out
    assert "predict on the device" in shown
    assert "offload" not in shown


def test_a_running_agent_is_asked_over_both_doors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "bench.json"
    words = ["bench", "--quick", "--only", "service", "--report", str(report)]
    monkeypatch.setattr(sys, "argv", ["splitedge", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    rows = json.loads(report.read_text())
    assert [row["name"].partition(": ")[2] for row in rows] == [
        "HTTP to plain FastAPI",
        "socket to plain FastAPI",
    ]
    assert all(row["value"] > 0 and row["unit"] == "x" for row in rows)
