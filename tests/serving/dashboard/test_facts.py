"""Facts of the pages: what the registry says, and nothing that is not there."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson
import pytest

import server
from benchmarks.dashboard.simulated import SimulatedDevice
from edge_sdk.manifest import BundleManifest, GatePoint
from edge_sdk.state import StateLock
from profiles.measured import BundleMeasurement, Conditions, GraphMeasurement
from server.dashboard.facts.fleet import PROFILES_OLD_S, FleetReader
from server.dashboard.facts.history import HistoryFacts, held_out_shares
from server.dashboard.facts.training import ROUNDS_MOST, read_log
from server.dashboard.pages import assets
from server.dashboard.reading import FRESH_S, Fresh
from server.deployment.presence import GONE_S, ONLINE_S, presence_of
from server.registry.rollouts.records import Member, RolloutPlan
from server.registry.telemetry.history import LastReading
from server.registry.telemetry.reading import Reading
from server.rollouts.overview import NewestRollouts

if TYPE_CHECKING:
    from tests.serving.conftest import Exported
    from tests.serving.dashboard.conftest import World

NO_HISTORY = orjson.loads(orjson.dumps(HistoryFacts([])))
ROUND = {
    "round": 1,
    "accuracy": None,
    "loss": 1.5,
    "bytes_up": 10,
    "bytes_down": 20,
    "seconds": 0.5,
    "participants": ["pi-1"],
    "missing": ["pi-2", "pi-3"],
    "missing_why": {"pi-2": "it is away"},
    "refused": {"pi-4": "its update is not finite"},
}


def test_a_device_is_online_while_its_heartbeats_come(world: World) -> None:
    device = world.enrol("pi-1")
    assert presence_of(device, time.time()) == "never"
    world.registry.touch("pi-1")
    seen = world.registry.device("pi-1")
    assert seen.last_seen is not None
    assert presence_of(seen, seen.last_seen + ONLINE_S - 0.1) == "online"
    assert presence_of(seen, seen.last_seen + ONLINE_S) == "offline"
    assert presence_of(world.enrol("pi-2", approve=True), time.time()) == "waiting"
    assert presence_of(world.registry.revoke("pi-1"), time.time()) == "revoked"


def test_a_device_that_went_away_is_offline_unless_it_comes_back_at_once(world: World) -> None:
    world.enrol("pi-1")
    world.registry.touch("pi-1")
    world.registry.depart("pi-1")
    gone = world.registry.device("pi-1")
    assert gone.gone_at is not None
    assert presence_of(gone, gone.gone_at + GONE_S - 0.1) == "online"
    assert presence_of(gone, gone.gone_at + GONE_S) == "offline"
    world.registry.touch("pi-1")
    assert presence_of(world.registry.device("pi-1"), gone.gone_at + GONE_S) == "online"


def test_a_line_says_what_a_device_runs_wants_and_refused(world: World) -> None:
    world.sign_in()
    world.enrol("pi-1", fleet="yard")
    world.registry.catalogue.publish("digits", 1)
    world.registry.reports.note_update("pi-1", "digits/1/d1", "digits/1/d2", "no memory")
    found = Conditions("digits/1/d1", 100_000_000, 1.5, 4.0, 50.0)
    world.registry.capabilities.report_conditions("pi-1", found)
    facts = world.facts("fleet")
    (line,) = facts["devices"]
    told = {key: line[key] for key in ("id", "fleet", "presence", "runs", "refused", "why")}
    assert told == {
        "id": "pi-1",
        "fleet": "yard",
        "presence": "never",
        "runs": "digits/1/d1",
        "refused": "digits/1/d2",
        "why": "no memory",
    }
    assert line["wants"] == "digits/1"
    assert (line["memory_bytes"], line["latency_ms"], line["round_trip_ms"]) == (1e8, 1.5, 4.0)
    assert [fleet["fleet"] for fleet in facts["fleets"]] == ["yard"]


def test_a_devices_page_has_its_bundles_and_events(world: World, exported: Exported) -> None:
    world.sign_in()
    exported.install(world.settings.state / "models")
    world.registry.catalogue.publish("digits", 1)
    world.enrol("pi-1")
    graphs = {"exit": GraphMeasurement(0.4, 1_000_000, 20)}
    measured = BundleMeasurement("digits/1/d2", graphs, 2.5, 1_500_000)
    world.registry.capabilities.measured("pi-1", measured)
    world.registry.capabilities.failed("pi-1", "digits/1/d4", "no memory left")
    world.registry.reports.note_running({"pi-1": "digits/1/d2"})
    facts = world.facts("devices/pi-1")
    assert facts["choices"] == ["digits/1/d1", "digits/1/d2", "digits/1/d4"]
    assert facts["running"]["name"] == "digits/1/d2"
    assert len(facts["running"]["curve"]) > 2
    assert facts["measured"][0]["graphs"]["exit"]["latency_ms"] == 0.4
    assert facts["refused"] == {"digits/1/d4": "no memory left"}
    assert facts["left"][0]["held_until"] > time.time()
    assert facts["events"][0]["what"] == "device.enrol"
    assert "credential" not in orjson.dumps(facts["line"]).decode()
    assert world.ask("GET", "/dashboard/facts/devices/nobody").status_code == 404


def test_a_devices_history_adds_up(world: World) -> None:
    world.sign_in()
    world.enrol("pi-1")
    assert world.facts("devices/pi-1/history") == NO_HISTORY
    device, now = SimulatedDevice("pi-1", "digits/1/d2", seed=0), time.time()
    for minutes in (3, 2, 1):
        reading = Reading.from_heartbeat(device.heartbeat(60.0))
        last = {"pi-1": LastReading(now - 60 * minutes, reading)}
        world.registry.telemetry.record(last)
    facts = world.facts("devices/pi-1/history?since_s=3600")
    answers = reading.counts["exits"], reading.counts["offloads"], reading.counts["fallbacks"]
    assert (facts["exits"], facts["offloads"], facts["fallbacks"]) == answers
    assert sum(facts["uncertainty"]["counts"]) == sum(answers)
    assert len(facts["uncertainty"]["edges"]) == len(facts["uncertainty"]["counts"]) + 1
    assert facts["threshold"] == device.threshold
    # the answers were drawn around these medians, and a bin is a power of two
    assert device.device_ms / 2 < facts["points"][-1]["device_ms"] < 2 * device.device_ms
    assert device.server_ms / 2 < facts["points"][-1]["server_ms"] < 2 * device.server_ms
    (line,) = world.facts("fleet")["devices"]
    assert (line["exits"], line["offloads"], line["fallbacks"]) == answers
    assert line["memory_bytes"] == reading.gauges["memory_available_bytes"]
    assert line["offloading"]
    assert sum(one["exits"] for one in world.facts("history")) == answers[0]
    assert world.ask("GET", "/dashboard/facts/devices/pi-1/history?since_s=1").status_code == 400
    assert world.ask("GET", "/dashboard/facts/devices/nobody/history").status_code == 404
    off = Reading.from_heartbeat({**device.heartbeat(60.0), "offloading": False})
    world.registry.telemetry.record({"pi-1": LastReading(now, off)})
    assert not world.facts("devices/pi-1")["line"]["offloading"]


def test_a_histogram_begins_anew_with_a_bundle_and_has_its_held_out_samples(
    world: World, exported: Exported
) -> None:
    world.sign_in()
    world.enrol("pi-1")
    exported.install(world.settings.state / "models")
    now, counted = time.time(), Counter[str]()
    for minutes, bundle in ((3, "digits/1/d1"), (2, "digits/1/d2"), (1, "digits/1/d2")):
        device = SimulatedDevice("pi-1", bundle, seed=minutes)
        reading = Reading.from_heartbeat(device.heartbeat(60.0))
        world.registry.telemetry.record({"pi-1": LastReading(now - 60 * minutes, reading)})
        counted[bundle] += sum(reading.counts[one] for one in ("exits", "offloads", "fallbacks"))
        shown = world.facts("devices/pi-1/history")["uncertainty"]
        assert (shown["bundle"], sum(shown["counts"])) == (bundle, counted[bundle])
    assert shown["since"] == pytest.approx(now - 180, abs=1)
    assert sum(shown["held_out"]) == pytest.approx(1)
    gate = BundleManifest.load(exported.folder / "bundles" / "d2").gate
    below = np.cumsum([0, *shown["held_out"]])
    for edge, share in zip(shown["edges"], below, strict=True):
        # the exit rates beside the edge hold the share between them
        rates = [one.exit_rate for one in gate.curve if one.threshold <= edge]
        above = [one.exit_rate for one in gate.curve if one.threshold >= edge]
        assert max(rates, default=0) - 1e-9 <= share <= min(above, default=1) + 1e-9


def test_shares_of_held_out_samples_are_differences_of_exit_rates() -> None:
    rates = {0.5: 0.2, 1.0: 0.6, 2.0: 0.9}
    curve = [GatePoint(at, rate, 1.0, 1.0) for at, rate in rates.items()]
    shares = held_out_shares(curve, (0.0, 0.5, 1.0, 2.0, 2.4))
    assert shares == pytest.approx((0.2, 0.4, 0.3, 0.1))
    # 0.75 lies in the middle of 0.5 and 1.0, 2.1 at a quarter of the way from 2.0 to 2.4
    assert held_out_shares(curve, (0.0, 0.75, 2.1, 2.4)) == pytest.approx((0.4, 0.525, 0.075))
    assert held_out_shares(curve[:2], (0.0, 2.4)) is None


def test_models_show_their_curves_and_a_damaged_one_none(world: World, exported: Exported) -> None:
    world.sign_in()
    folder = exported.install(world.settings.state / "models")
    world.registry.catalogue.publish("digits", 1)
    world.registry.catalogue.publish("digits", 2)  # its files are not on this disk
    (folder / "bundles" / "d2" / "manifest.json").write_text("{")
    newest, first = world.facts("models")["versions"]
    assert (newest["state"]["version"], newest["bundles"]) == (2, [])
    assert [one["variant"] for one in first["bundles"]] == ["d1", "d4"]
    size = sum(path.stat().st_size for path in (folder / "bundles" / "d1").iterdir())
    assert first["bundles"][0]["size_bytes"] == size
    rates = [point["exit_rate"] for point in first["bundles"][0]["curve"]]
    assert rates == sorted(rates)


def test_rounds_are_shown_as_they_end(world: World) -> None:
    world.sign_in()
    folder = world.settings.state / "training" / "yard"
    with StateLock(folder, "training"):
        (running,) = world.facts("training")
        assert (running["state"], running["log"]["rounds"]) == ("running", [])
    (folder / "log.jsonl").write_bytes(orjson.dumps(ROUND) + b'\n{"round": 2, "acc')
    (stopped,) = world.facts("training")
    assert stopped["state"] == "stopped"
    (one,) = stopped["log"]["rounds"]
    assert stopped["log"]["ended"] == 1
    assert one["missing"] == {"pi-2": "it is away", "pi-3": "no reply in time"}
    assert one["refused"] == {"pi-4": "its update is not finite"}


def test_rounds_are_those_of_the_training_that_is_shown(world: World) -> None:
    world.sign_in()
    for at, name in enumerate(("first", "second")):
        folder = world.settings.state / "training" / name
        folder.mkdir(parents=True)
        (folder / "log.jsonl").write_bytes(orjson.dumps(ROUND) + b"\n")
        os.utime(folder / "log.jsonl", (at, at))
    for asked, shown in (("", "second"), ("?of=first", "first"), ("?of=none", "second")):
        found = world.facts(f"training{asked}")
        assert [one["name"] for one in found if one["log"]["rounds"]] == [shown]


@pytest.mark.parametrize("report", ["[]", '{"recipe": 1}', '{"recipe": {"train": []}}', "{"])
def test_a_report_of_another_form_is_no_reason_to_fail(world: World, report: str) -> None:
    world.sign_in()
    folder = world.settings.state / "training" / "yard"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(report)
    (one,) = world.facts("training")
    assert one["rounds_wanted"] is None


def test_a_log_of_another_release_is_no_reason_to_fail(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'[]\n{"round": 1}\n' + orjson.dumps(ROUND) + b"\n" + b"\xff\n")
    assert [one.round for one in read_log(log).rounds] == [1]
    assert read_log(tmp_path / "none").rounds == []


def test_of_a_long_training_the_newest_rounds_are_listed_and_all_are_counted(
    tmp_path: Path,
) -> None:
    log, last = tmp_path / "log.jsonl", ROUNDS_MOST + 1_000
    with log.open("wb") as file:
        for number in range(1, last + 1):
            line = {**ROUND, "round": number, "bytes_up": 20, "bytes_down": 30}
            file.write(orjson.dumps(line) + b"\n")
    found = read_log(log)
    assert [one.round for one in found.rounds] == list(range(1_001, last + 1))
    assert (found.ended, found.bytes_up, found.bytes_down) == (last, 20 * last, 30 * last)


def test_the_audit_log_is_filtered_as_the_api_filters_it(world: World) -> None:
    world.sign_in()
    world.enrol("pi-1")
    world.enrol("pi-2")
    entries = world.facts("audit?about=pi-1&what=device.")["entries"]
    assert [one["who"] for one in entries] == ["pi-1"]
    assert world.ask("GET", "/dashboard/facts/audit?limit=0").status_code == 400


def test_facts_are_worked_out_once_a_second_for_all_who_look() -> None:
    now, calls = 100.0, count(1)
    fresh = Fresh(lambda: next(calls), clock=lambda: now)
    assert [fresh.get(), fresh.get()] == [b"1", b"1"]
    now += FRESH_S
    assert fresh.get() == b"2"


def test_who_looks_while_facts_are_worked_out_gets_those_of_before() -> None:
    now, go, began = 100.0, threading.Event(), threading.Event()

    def work() -> float:
        if now > 100.0:
            began.set()
            assert go.wait(20)
        return now

    fresh = Fresh(work, clock=lambda: now)
    first = fresh.get()
    now += FRESH_S
    thread = threading.Thread(target=fresh.get)
    thread.start()
    try:
        assert began.wait(20)
        assert fresh.get() == first
    finally:
        go.set()
        thread.join()
    assert fresh.get() == b"101.0"


def test_facts_that_have_not_changed_are_not_sent_again(world: World) -> None:
    world.sign_in()
    first = world.ask("GET", "/dashboard/facts/models")
    again = world.ask(
        "GET", "/dashboard/facts/models", headers={"If-None-Match": first.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")
    assert "no-cache" in first.headers["cache-control"]
    world.registry.catalogue.publish("digits", 1)
    time.sleep(FRESH_S)
    changed = world.ask(
        "GET", "/dashboard/facts/models", headers={"If-None-Match": first.headers["etag"]}
    )
    assert changed.status_code == 200


def test_events_of_every_kind_can_be_chosen() -> None:
    script = assets().files["pages/audit.js"].content.decode()
    offered = set(re.findall(r'\["([a-z]+\.)", ', script))
    package = Path(server.__file__).parent
    files = [package / "signing" / "cli.py", package / "upkeep" / "backup.py"]
    for room in ("audit", "registry"):
        files += [path for path in (package / room).rglob("*.py") if "schema" not in path.name]
    text = "".join(path.read_text() for path in files if "migrations" not in path.parts)
    written = re.findall(r'"([a-z]+\.)(?!db"|json")[a-z-]+"', text)
    assert len(written) > 30
    assert offered == set(written)


@pytest.mark.parametrize("name", ["fleet", "models", "training", "audit"])
def test_an_empty_server_has_facts_too(world: World, name: str) -> None:
    world.sign_in()
    assert world.facts(name) is not None


def test_lines_that_are_read_again_show_what_is_new(world: World) -> None:
    now = 1_000.0
    reader = FleetReader(world.registry, clock=lambda: now)
    simulated = {name: SimulatedDevice(name, "digits/1/d2", seed=0) for name in ("pi-1", "pi-2")}

    def beat(name: str, memory_bytes: int) -> None:
        simulated[name].memory_bytes = memory_bytes
        content = simulated[name].heartbeat(30.0)
        content["memory"]["available_bytes"] = memory_bytes
        last = LastReading(time.time(), Reading.from_heartbeat(content))
        world.registry.telemetry.record({name: last})

    def memory() -> dict[str, int | None]:
        return {one.id: one.memory_bytes for one in reader.lines()}

    world.enrol("pi-1")
    assert memory() == {"pi-1": None}
    beat("pi-1", 100)
    world.enrol("pi-2")
    assert memory() == {"pi-1": 100, "pi-2": None}
    beat("pi-2", 200)
    assert memory() == {"pi-1": 100, "pi-2": 200}
    beat("pi-1", 300)
    lines = reader.lines()
    assert [one.memory_bytes for one in lines] == [300, 200]
    assert {one.hardware for one in lines} == {"raspberry-pi-4, 4 cores"}
    assert lines[1].exits is None, "the sums of an hour are those of the first look"
    world.registry.update_profile("pi-1", {"name": "other"})
    now += PROFILES_OLD_S
    (first, second) = reader.lines()
    assert (first.hardware, second.exits is not None) == ("other", True)


def test_devices_of_a_roll_out_that_is_over_are_told_when_it_is_looked_at(world: World) -> None:
    world.sign_in()
    for version in (1, 2):
        world.registry.catalogue.publish("digits", version)
    world.registry.catalogue.activate("digits", 1)
    world.enrol("pi-1")
    rollouts = world.registry.rollouts
    for _ in range(2):
        started = rollouts.start(RolloutPlan("digits", 2), 1)
        joined = Member(started.id, "pi-1", 0, None, time.time())
        assert rollouts.apply(started, started, joined=[joined])
        rollouts.abort(started.id)
    live = rollouts.start(RolloutPlan("digits", 2), 1)
    assert rollouts.apply(live, live, joined=[Member(live.id, "pi-1", 0, None, time.time())])
    newest = NewestRollouts(world.registry)
    for _ in range(2):
        states, more = newest.read(2)
        assert ([(one.id, one.joined, len(one.members)) for one in states], more) == (
            [(3, 1, 1), (2, 1, 0)],
            1,
        )
    assert [one["device"] for one in world.facts("rollouts/1")["members"]] == ["pi-1"]
    assert world.ask("GET", "/dashboard/facts/rollouts/9").status_code == 404
    rollouts.abort(live.id)
    states, _ = newest.read(2)
    assert [(one.state, one.members) for one in states] == [("aborted", ())] * 2
