"""The price of answers: CPU time, watts and bytes, against numbers worked out by hand."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.answers.price import FORGETTING, AnswerMeter, Calibration
from edge_sdk.errors import InputError
from edge_sdk.settings import Power
from edge_sdk.settings_file.settings_file import SettingsFile
from tests.reader import Document

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fault_proxy import FaultProxy
    from tests.edge.fleet import Fleet

CORES = os.cpu_count() or 1
DECLARED = Power(sensors=False, idle_w=2.0, busy_w=6.0)
WATTS = 4.0 / CORES  # of a core above rest
NEVER_EXIT = -1.0


class Cpu:
    """CPU time that passes when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_answers_under_way_share_the_cpu_time() -> None:
    cpu = Cpu()
    meter = AnswerMeter(DECLARED, cpu_clock=cpu)
    cpu.now_s = 5.0  # nobody's
    first = meter.begin()
    cpu.now_s = 7.0  # 2 s of the first alone
    second = meter.begin()
    cpu.now_s = 11.0  # 4 s of both
    joules, source = meter.end(first, "device", 0)
    assert joules == pytest.approx((2 + 2) * WATTS)
    assert source == "declared"
    cpu.now_s = 12.0  # 1 s of the second alone
    assert meter.end(second, "server", 0)[0] == pytest.approx((2 + 1) * WATTS)
    report = meter.report()
    assert (report.device, report.server, report.fallback) == pytest.approx(
        (4 * WATTS, 3 * WATTS, 0.0)
    )
    assert report.joules == pytest.approx(7 * WATTS)
    assert (report.priced, report.unpriced) == (2, 0)
    assert (report.source, report.machine_joules, report.rest_w) == ("declared", None, None)
    assert report.detail == "2 W idle, 6 W busy: the settings"


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 10)), max_size=40))
def test_the_shares_add_up_to_the_cpu_time_while_answers_were_under_way(
    steps: list[tuple[bool, float]],
) -> None:
    cpu, charged, busy_s = Cpu(), 0.0, 0.0
    marks: list[float] = []
    meter = AnswerMeter(DECLARED, cpu_clock=cpu)
    for starts, passed_s in steps:
        if starts or not marks:
            marks.append(meter.begin())
        else:
            charged += meter.end(marks.pop(0), "device", 0)[0] or 0.0
        cpu.now_s += passed_s
        busy_s += passed_s if marks else 0.0
    for mark in marks:
        charged += meter.end(mark, "device", 0)[0] or 0.0
    assert charged == pytest.approx(busy_s * WATTS)


def test_an_answer_that_is_not_made_takes_its_share_and_leaves_no_trace() -> None:
    cpu = Cpu()
    meter = AnswerMeter(DECLARED, cpu_clock=cpu)
    mark = meter.begin()
    meter.begin()
    cpu.now_s = 2.0
    meter.drop()
    cpu.now_s = 5.0
    assert meter.end(mark, "device", 0)[0] == pytest.approx((1 + 3) * WATTS)
    assert meter.report().priced == 1


def test_bytes_have_a_price_of_their_own() -> None:
    cpu = Cpu()
    power = Power(sensors=False, idle_w=2.0, busy_w=6.0, radio_j_per_mb=5.0)
    meter = AnswerMeter(power, cpu_clock=cpu)
    mark = meter.begin()
    cpu.now_s = 1.0
    # 200,000 bytes at 5 J a megabyte are 1 J
    assert meter.end(mark, "server", 200_000)[0] == pytest.approx(WATTS + 1.0)


def test_without_watts_there_are_no_joules_and_it_says_what_to_do(tmp_path: Path) -> None:
    meter = AnswerMeter(Power(), root=tmp_path)
    meter.start()
    assert meter.end(meter.begin(), "device", 0) == (None, "none")
    report = meter.report()
    meter.close()
    assert (report.source, report.joules, report.priced, report.unpriced) == ("none", 0, 0, 1)
    assert "declare idle_w and busy_w" in report.detail


def test_a_calibration_finds_rest_and_slope() -> None:
    line = Calibration()
    for window in range(12):
        cores = (0.0, 0.5, 1.0)[window % 3]
        line.add(2.0, 2.0 * cores, 2.0 * (5.0 + 8.0 * cores))
    assert line.line() == pytest.approx((5.0, 8.0))


def test_a_calibration_is_least_squares_weighted_by_duration_and_age() -> None:
    rng = np.random.default_rng(1)
    seconds = rng.uniform(1, 3, 60)
    cores = rng.uniform(0, 2, 60)
    watts = 5 + 8 * cores + rng.normal(0, 1, 60)
    line = Calibration()
    for s, c, p in zip(seconds, cores, watts, strict=True):
        line.add(s, s * c, s * p)
    weights = seconds * FORGETTING ** np.arange(59, -1, -1)
    slope, rest = np.polyfit(cores, watts, 1, w=np.sqrt(weights))
    assert line.line() == pytest.approx((rest, slope))


@pytest.mark.parametrize("fault", ["few windows", "one load", "noise", "falling", "no time"])
def test_no_calibration_where_the_windows_do_not_show_the_slope(fault: str) -> None:
    rng = np.random.default_rng(2)
    line = Calibration()
    for window in range(9 if fault == "few windows" else 40):
        cores = 0.5 if fault == "one load" else 0.01 * (window % 2)
        slope = -8.0 if fault == "falling" else 8.0
        noise = rng.normal(0, 3) if fault == "noise" else 0.0
        line.add(0.0 if fault == "no time" else 2.0, 2 * cores, 2 * (5 + slope * cores + noise))
    assert line.line() is None


def test_sensors_take_over_once_they_are_calibrated(tmp_path: Path) -> None:
    zone = tmp_path / "sys/class/powercap/intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0\n")
    (zone / "max_energy_range_uj").write_text("262143328850\n")
    counter = zone / "energy_uj"
    counter.write_text("0\n")
    cpu, clock, joules = Cpu(), Cpu(), 0.0
    meter = AnswerMeter(Power(idle_w=2.0, busy_w=6.0), root=tmp_path, clock=clock, cpu_clock=cpu)
    meter.start()
    try:
        assert meter.end(meter.begin(), "device", 0)[1] == "declared"
        for window in range(10):
            cores = window % 2
            clock.now_s += 10.0
            cpu.now_s += 10.0 * cores
            joules += 10.0 * (20.0 + 12.0 * cores)
            counter.write_text(f"{round(joules * 1e6)}\n")
            meter.take_window()
        mark = meter.begin()
        cpu.now_s += 0.5
        joules_of_one, source = meter.end(mark, "device", 0)
        assert joules_of_one == pytest.approx(6.0)
        assert source == "rapl"
        report = meter.report()
        assert (report.rest_w, report.watts_per_core) == pytest.approx((20.0, 12.0))
        assert report.machine_joules == pytest.approx(2600.0)
        assert report.detail == "package-0, calibrated over 10 windows"
    finally:
        meter.close()


def test_an_exit_costs_joules_and_no_bytes(digits: Digits) -> None:
    folder = digits.models / "digits" / "1" / "bundles" / "d2"
    settings = AgentSettings(offload=False, power=DECLARED)
    with EdgeAgent.from_bundle(folder, settings) as agent:
        before_s = time.process_time()
        answers = [agent.predict(x) for x in digits.x]
        used_j = (time.process_time() - before_s) * WATTS
        with pytest.raises(InputError):
            agent.predict(np.zeros(3, np.float32))
        one_more = agent.predict(digits.x[0])
        energy = agent.status().energy
    assert energy is not None
    joules = [answer.joules or 0.0 for answer in answers]
    assert all(joule > 0 for joule in joules)
    # the loop around the calls has the rest
    assert 0.5 * used_j < math.fsum(joules) <= used_j
    assert {answer.energy_source for answer in answers} == {"declared"}
    assert {(answer.bytes_up, answer.bytes_down) for answer in answers} == {(0, 0)}
    assert energy.device == pytest.approx(math.fsum([*joules, one_more.joules or 0.0]))
    assert (energy.priced, energy.server) == (len(answers) + 1, 0.0)
    # a refused input is not under way for ever: it would halve the shares of all that follow
    assert agent._meter is not None
    assert agent._meter._under_way == 0


def test_without_the_setting_answers_have_no_joules(digits: Digits) -> None:
    folder = digits.models / "digits" / "1" / "bundles" / "d2"
    with EdgeAgent.from_bundle(folder) as agent:
        answer = agent.predict(digits.x[0])
        assert (answer.joules, answer.energy_source) == (None, "none")
        assert agent.status().energy is None


@pytest.mark.deadline
def test_an_offload_has_its_bytes_on_the_wire_and_its_joules(
    fleet: Fleet, digits: Digits, proxy: FaultProxy
) -> None:
    state = fleet.device("priced", broker_port=proxy.port)
    settings = AgentSettings(threshold=NEVER_EXIT, deadline_s=5.0, heartbeat_s=600, power=DECLARED)
    with EdgeAgent.open(state, settings) as agent:
        first = agent.predict(digits.x[0])  # connects
        up, down, before = proxy.bytes_up, proxy.bytes_down, agent.status()
        answers = [agent.predict(x) for x in digits.x[:20]]
        after = agent.status()
        # topic, packet id, properties and acknowledgements of MQTT come on top
        assert 0 < proxy.bytes_up - up - sum(answer.bytes_up for answer in answers) < 20 * 250
        assert 0 < proxy.bytes_down - down - sum(answer.bytes_down for answer in answers) < 20 * 250
        many = list(agent.predict_many(digits.x[:20]))
        energy = agent.status().energy
    assert [answer.source for answer in answers] == ["server"] * 20
    z_bytes = 2 * int(np.prod(agent.manifest.smashed.shape))  # fp16
    assert agent.manifest.smashed.codec in {"fp16", "int8"}
    assert all(answer.bytes_up > z_bytes / 2 for answer in answers)
    assert after.bytes_up - before.bytes_up == sum(answer.bytes_up for answer in answers)
    assert after.bytes_down - before.bytes_down == sum(answer.bytes_down for answer in answers)
    assert energy is not None
    assert energy.server == pytest.approx(
        math.fsum(answer.joules or 0.0 for answer in [first, *answers, *many])
    )
    assert all((answer.joules or 0.0) > 0 for answer in [*answers, *many])


def test_the_document_shows_settings_that_are_read() -> None:
    settings = SettingsFile.from_toml(Document("docs/price.md").snippet("settings").encode()).agent
    assert settings.power == Power(board="raspberry-pi-4")
