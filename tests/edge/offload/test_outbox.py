"""The outbox: a query survives kills, once and in order, until its answer is acknowledged."""

from __future__ import annotations

import math
import random
import resource
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import orjson
import pytest

from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.bundles.runner import BundleRunner
from edge_sdk.errors import ConfigurationError, StorageError
from edge_sdk.manifest import BundleManifest
from edge_sdk.offload.availability import Presence
from edge_sdk.offload.late_answers import LateAnswers, is_retryable
from edge_sdk.offload.offloader import Offloader
from edge_sdk.offload.outbox import OUTBOX_NAME, Answer, Outbox, QueuedQuery
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import Problem, Reply, new_id
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fault_proxy import FaultProxy
    from tests.edge.fleet import Fleet

NEVER_EXIT = -1.0

# A real agent in a process of its own. It prints the id of each prediction as soon as it has it:
# from then on that query must not be lost. With "drain" it only takes answers, and acknowledges.
AGENT = """
import sys, time
from pathlib import Path
import numpy as np
from edge_sdk import AgentSettings, EdgeAgent

state, samples, what = Path(sys.argv[1]), np.load(sys.argv[2]), sys.argv[3]
settings = AgentSettings(threshold=-1.0, late_answers=True, deadline_s=0.3, codec="fp32")
agent = EdgeAgent.open(state, settings)
at = 0
while True:
    if what == "ask":
        answer = agent.predict(samples[at % len(samples)])
        print("asked", answer.id or "-", at % len(samples), flush=True)
        at += 1
    for late in agent.late_answers():
        print("late", late.id, late.prediction.label, flush=True)
        agent.acknowledge(late.id)
        print("done", late.id, flush=True)
    time.sleep(0.002)
"""


@pytest.fixture(scope="module")
def manifest(digits: Digits) -> BundleManifest:
    return BundleManifest.load(digits.models / "digits" / "1" / "bundles" / "d2")


def query(
    manifest: BundleManifest,
    identifier: str,
    value: float = 0.0,
    *,
    size: int = 4,
    uncertainty: float = 1.5,
    threshold: float = 0.5,
) -> QueuedQuery:
    tensor = Tensor("z2", np.full((1, size), value, np.float32), {"scale": 0.5})
    return QueuedQuery(identifier, 1000.0, manifest, tensor, uncertainty, threshold)


@contextmanager
def full_disk(spare_bytes: int = 0) -> Iterator[None]:
    """Let no file grow, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (spare_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_queries_wait_in_order_and_come_back_whole(
    tmp_path: Path, manifest: BundleManifest
) -> None:
    outbox = Outbox(tmp_path)
    for number in range(5):
        assert outbox.put(query(manifest, f"q{number}", number))
    outbox.close()
    again = Outbox(tmp_path)
    waiting = again.waiting(3)
    assert [one.id for one in waiting] == ["q0", "q1", "q2"]
    assert (waiting[2].asked_at, waiting[2].uncertainty, waiting[2].threshold) == (1000.0, 1.5, 0.5)
    assert waiting[2].manifest == manifest
    assert waiting[2].tensor.name == "z2"
    assert waiting[2].tensor.parameters == {"scale": 0.5}
    np.testing.assert_array_equal(waiting[2].tensor.array, np.full((1, 4), 2.0, np.float32))
    assert again.unanswered() == 5


def test_an_answer_is_given_until_acknowledged(tmp_path: Path, manifest: BundleManifest) -> None:
    outbox = Outbox(tmp_path)
    outbox.put(query(manifest, "a", uncertainty=math.nan, threshold=math.inf))
    outbox.put(query(manifest, "b"))
    assert outbox.acknowledge("a") is False  # it has no answer yet
    probabilities = [0.25] + [0.75] + [0.0] * 8
    outbox.answer([("b", Answer(reason="gone")), ("a", Answer(1, probabilities, 12.5))])
    outbox.close()
    outbox = Outbox(tmp_path)
    first, second = outbox.answers()
    assert (first.id, second.id, second.prediction, second.reason) == ("a", "b", None, "gone")
    assert first.prediction is not None
    assert first.prediction.label == 1
    assert first.prediction.class_name == "1"
    assert first.prediction.probabilities.tolist() == probabilities
    assert (first.prediction.source, first.prediction.latency_ms) == ("server", 12.5)
    assert math.isnan(first.prediction.uncertainty)
    assert first.prediction.threshold == math.inf
    assert outbox.acknowledge("a") is True
    assert outbox.acknowledge("a") is False
    assert [late.id for late in outbox.answers()] == ["b"]


def test_duplicates_change_nothing(tmp_path: Path, manifest: BundleManifest) -> None:
    outbox = Outbox(tmp_path)
    outbox.put(query(manifest, "a", 1.0))
    outbox.put(query(manifest, "a", 2.0))
    assert [one.tensor.array[0, 0] for one in outbox.waiting(10)] == [1.0]
    outbox.answer([("a", Answer(3)), ("a", Answer(4)), ("unknown", Answer(5))])
    outbox.answer([("a", Answer(6))])
    assert [late.prediction and late.prediction.label for late in outbox.answers()] == [3]
    outbox.acknowledge("a")
    outbox.answer([("a", Answer(7))])
    assert outbox.answers() == []


def test_the_newest_is_refused_when_full(tmp_path: Path, manifest: BundleManifest) -> None:
    outbox = Outbox(tmp_path, rows_max=2)
    assert [outbox.put(query(manifest, name)) for name in "abc"] == [True, True, False]
    outbox.answer([("a", Answer(1))])
    assert outbox.put(query(manifest, "c")) is False  # an answer takes a place until acknowledged
    outbox.acknowledge("a")
    assert outbox.put(query(manifest, "c")) is True
    assert [one.id for one in outbox.waiting(10)] == ["b", "c"]


def test_bytes_are_bounded_over_restarts(tmp_path: Path, manifest: BundleManifest) -> None:
    # a frame: 1,000 bytes of tensor, less than 250 of JSON, so two of them and not three
    outbox = Outbox(tmp_path, bytes_max=2_500)
    kept = [outbox.put(query(manifest, name, size=250)) for name in "abc"]
    assert kept == [True, True, False]
    outbox.close()
    outbox = Outbox(tmp_path, bytes_max=2_500)
    assert outbox.put(query(manifest, "c", size=250)) is False
    outbox.answer([("a", Answer(1))])
    assert outbox.put(query(manifest, "c", size=250)) is True


def test_a_full_disk_is_said_and_survived(tmp_path: Path, manifest: BundleManifest) -> None:
    outbox = Outbox(tmp_path)
    outbox.put(query(manifest, "a"))
    with full_disk(), pytest.raises(StorageError, match=r"outbox\.db: .*free some space"):
        outbox.put(query(manifest, "b"))
    assert outbox.put(query(manifest, "c"))  # without a restart
    assert [one.id for one in outbox.waiting(10)] == ["a", "c"]


def test_a_damaged_file_is_set_aside(
    tmp_path: Path, manifest: BundleManifest, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / OUTBOX_NAME).write_bytes(b"worn flash " * 1000)
    outbox = Outbox(tmp_path)
    assert outbox.put(query(manifest, "a"))
    assert (tmp_path / f"{OUTBOX_NAME}.damaged").read_bytes().startswith(b"worn flash")
    assert "renamed to outbox.db.damaged" in caplog.text


def test_a_file_of_a_later_splitedge_is_left_alone(
    tmp_path: Path, manifest: BundleManifest
) -> None:
    with sqlite3.connect(tmp_path / OUTBOX_NAME) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StorageError, match="written by a later version of splitedge"):
        Outbox(tmp_path).put(query(manifest, "a"))


def test_rows_that_cannot_be_read_are_settled_and_hold_up_nothing(
    tmp_path: Path, manifest: BundleManifest
) -> None:
    with closing(Outbox(tmp_path)) as outbox:
        for number in range(5):
            outbox.put(query(manifest, f"q{number}"))
        outbox.answer([("q4", Answer(0, [1.0]))])
    with sqlite3.connect(tmp_path / OUTBOX_NAME) as database:
        database.execute("INSERT INTO bundle VALUES ('old/1/d1', '{\"format\": 0}')")
        database.execute("UPDATE query SET frame = x'00' WHERE id = 'q0'")
        database.execute("UPDATE query SET frame = NULL WHERE id = 'q1'")
        database.execute("UPDATE query SET bundle = 'old/1/d1' WHERE id IN ('q2', 'q4')")
    database.close()
    with closing(Outbox(tmp_path)) as outbox:
        assert [one.id for one in outbox.waiting(2)] == ["q3"]
        late = {one.id: one for one in outbox.answers()}
        assert sorted(late) == ["q0", "q1", "q2", "q4"]
        for identifier in ("q0", "q1", "q2"):
            assert late[identifier].reason.startswith("the query cannot be read: ")
        assert late["q4"].reason.startswith("the answer cannot be read: ")
        assert all(outbox.acknowledge(identifier) for identifier in late)


def test_only_its_owner_reads_the_outbox(tmp_path: Path, manifest: BundleManifest) -> None:
    with closing(Outbox(tmp_path)) as outbox:
        outbox.put(query(manifest, "q"))
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert set(modes.values()) == {0o600}, modes


def test_threads_share_an_outbox(tmp_path: Path, manifest: BundleManifest) -> None:
    outbox = Outbox(tmp_path)

    def fill(name: int) -> None:
        for number in range(10):
            outbox.put(query(manifest, f"{name}-{number}"))

    threads = [threading.Thread(target=fill, args=(name,), daemon=True) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.id for one in outbox.waiting(100)}) == 40


def late_settings(**other: Any) -> AgentSettings:
    fields = {"threshold": NEVER_EXIT, "late_answers": True, "deadline_s": 0.3, "codec": "fp32"}
    return AgentSettings(**{**fields, **other})


@pytest.mark.deadline
def test_fallbacks_are_answered_late_in_order(
    fleet: Fleet, proxy: FaultProxy, digits: Digits
) -> None:
    state = fleet.device("late", broker_port=proxy.port)
    with EdgeAgent.open(state, late_settings()) as agent:
        assert agent.predict(digits.x[0], deadline_s=5.0).source == "server"
        proxy.hole()
        fallbacks = [agent.predict(x) for x in digits.x[:30]]
        assert {answer.source for answer in fallbacks} == {"fallback"}
        assert len({answer.id for answer in fallbacks} - {""}) == 30
        assert agent.status().counters.late_waiting == 30
        assert agent.late_answers() == []
        proxy.lift()
        wait_until(lambda: len(agent.late_answers()) == 30, "30 late answers")
        late = agent.late_answers()
        assert [one.id for one in late] == [answer.id for answer in fallbacks]
        labels = [one.prediction.label for one in late if one.prediction is not None]
        assert labels == digits.logits[:30].argmax(axis=1).tolist()
        assert all(one.prediction and one.prediction.latency_ms > 0 for one in late)
        assert [agent.acknowledge(one.id) for one in late] == [True] * 30
        assert agent.late_answers() == []
        assert agent.status().counters.late_waiting == 0


@pytest.mark.deadline
def test_a_query_the_server_will_never_answer_says_so(
    fleet: Fleet, digits: Digits, manifest: BundleManifest
) -> None:
    state = fleet.device("never")
    outbox = Outbox(state)
    unknown = orjson.loads(manifest.to_json()) | {"bundle": "digits/77/d2"}
    outbox.put(query(BundleManifest.from_json(orjson.dumps(unknown)), new_id()))
    outbox.close()
    with EdgeAgent.open(state, late_settings()) as agent:
        wait_until(lambda: len(agent.late_answers()) == 1, "one late answer")
        (late,) = agent.late_answers()
    assert late.prediction is None
    assert "unknown_model" in late.reason


@pytest.mark.deadline
def test_an_answer_to_an_older_bundle_s_query_is_read_by_its_manifest(
    fleet: Fleet, digits: Digits, manifest: BundleManifest
) -> None:
    state = fleet.device("older", "pair/1/d2")
    folder = digits.models / "digits/1/bundles/d2"
    runner = BundleRunner(folder, manifest, AgentSettings(codec="fp32"))
    tensor = runner.smashed(digits.x[3], runner.exit(digits.x[3])[1])
    outbox = Outbox(state)
    outbox.put(QueuedQuery(new_id(), time.time(), manifest, tensor, 1.0, 0.5))
    outbox.close()
    with EdgeAgent.open(state, late_settings()) as agent:
        assert agent.manifest.bundle == "pair/1/d2"
        wait_until(lambda: len(agent.late_answers()) == 1, "one late answer")
        (late,) = agent.late_answers()
    assert late.prediction is not None
    assert late.prediction.label == digits.logits[3].argmax()


class Failing:
    """An offloader with a server that fails at one query each time."""

    presence = Presence.PRESENT

    def __init__(self, bad: str) -> None:
        self._bad = bad
        self.asked: list[str] = []

    def begin(self, tensor: Any, target: Any, deadline_s: float, identifier: str) -> str:
        self.asked.append(identifier)
        return identifier

    def finish(self, pending: str) -> Reply:
        if pending == self._bad:
            return Reply(pending, problem=Problem.FAILED, detail="out of memory")
        return Reply(pending)


@pytest.mark.deadline
def test_query_the_server_fails_at_is_settled_after_three_times(
    tmp_path: Path, manifest: BundleManifest
) -> None:
    """FAILED over MQTT and 500 over HTTP alike; the queries behind it wait no longer."""
    outbox, (bad, good) = Outbox(tmp_path), (new_id(), new_id())
    for identifier in (bad, good):
        outbox.put(query(manifest, identifier))
    server = Failing(bad)
    late = LateAnswers(
        outbox, cast(Offloader, server), lambda *_: (1, np.array([0.0, 1.0])), pause_s=0.01
    )
    wait_until(lambda: len(late.answers()) == 2, "two answers")
    first, second = late.answers()
    late.close()
    assert (first.id, first.prediction) == (bad, None)
    assert first.reason == "server: failed: out of memory"
    assert second.prediction is not None
    assert server.asked.count(bad) == 3
    assert is_retryable(Reply(bad, problem=Problem.FAILED))  # so a first failure is kept


def test_without_the_setting_there_are_no_late_answers(fleet: Fleet) -> None:
    with EdgeAgent.open(fleet.device("early"), AgentSettings()) as agent:
        with pytest.raises(ConfigurationError, match="late_answers=True"):
            agent.late_answers()
        with pytest.raises(ConfigurationError, match="late_answers=True"):
            agent.acknowledge("a")


@pytest.mark.deadline
def test_a_full_disk_does_not_break_predict(
    fleet: Fleet, proxy: FaultProxy, digits: Digits, caplog: pytest.LogCaptureFixture
) -> None:
    """FAULTS row 6."""
    state = fleet.device("full", broker_port=proxy.port)
    with EdgeAgent.open(state, late_settings()) as agent:
        agent.predict(digits.x[0], deadline_s=5.0)
        proxy.hole()
        assert agent.predict(digits.x[0]).id != ""
        with full_disk():
            answers = [agent.predict(x) for x in digits.x[:5]]
        assert [(answer.source, answer.id) for answer in answers] == [("fallback", "")] * 5
        assert agent.status().counters.late_lost == 5
        assert caplog.text.count("a query was not saved") == 1
        assert agent.predict(digits.x[0]).id != ""


def test_an_outbox_that_cannot_be_opened_does_not_break_predict(
    fleet: Fleet, digits: Digits, free_port: int
) -> None:
    state = fleet.device("shut", broker_port=free_port)
    (state / OUTBOX_NAME).mkdir()
    with EdgeAgent.open(state, late_settings()) as agent:
        answer = agent.predict(digits.x[0])
        assert (answer.source, answer.id) == ("fallback", "")
        assert agent.status().counters.late_waiting is None
        with pytest.raises(StorageError):
            agent.late_answers()


class Agent:
    """A real agent in a process of its own; a thread reads the lines that it prints."""

    def __init__(self, state: Path, samples: Path, what: str) -> None:
        command = [sys.executable, "-P", "-c", AGENT, str(state), str(samples), what]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.lines: list[list[str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):  # a kill may cut the last one
                self.lines.append(line.split())

    def wait_for_lines(self, count: int) -> None:
        wait_until(lambda: len(self.lines) >= count, f"{count} lines", 20.0)

    def kill(self) -> list[list[str]]:
        """Kill it with signal 9; the lines it printed."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self.lines


@pytest.mark.deadline
def test_kills_of_agent_and_broker_lose_nothing_and_double_nothing(
    fleet: Fleet, digits: Digits, tmp_path: Path, thorough: bool, reached: Callable[..., None]
) -> None:
    """FAULTS rows 3 and 4: the outbox through kill -9 of the broker and of the agent."""
    kills, queued_each = (100, 160) if thorough else (10, 0)
    state, samples = fleet.device("killed"), tmp_path / "x.npy"
    np.save(samples, digits.x)
    lines: list[list[str]] = []
    moments = random.Random(1)

    def drain(until: int, within_s: float) -> list[list[str]]:
        """Let the server answer until no more queries wait; the lines of the agent, killed then."""
        agent, outbox = Agent(state, samples, "drain"), Outbox(state)
        wait_until(
            lambda: outbox.unanswered() <= until and (until > 0 or not outbox.answers()),
            f"at most {until} queries in the outbox",
            within_s,
        )
        outbox.close()
        return agent.kill()

    for turn in range(kills):
        if turn % 25 == 24:
            lines += drain(1_000, 300.0)  # the outbox holds 10,000
        if turn % 4 == 0:
            fleet.kill_broker()  # some agents start while there is none
        agent = Agent(state, samples, "ask")
        agent.wait_for_lines(6)
        while sum(line[0] == "asked" and line[1] != "-" for line in [*agent.lines]) < queued_each:
            fleet.kill_broker()  # until so many queries wait
            time.sleep(0.3)
        time.sleep(moments.uniform(0.0, 0.3))
        if turn % 4 == 2:
            fleet.kill_broker()
            time.sleep(moments.uniform(0.0, 0.3))
        lines += agent.kill()
    asked = {words[1]: int(words[2]) for words in lines if words[0] == "asked" and words[1] != "-"}
    assert len(asked) > kills

    lines += drain(0, 600.0 if thorough else 60.0)
    late = [(words[1], int(words[2])) for words in lines if words[0] == "late"]
    done = [words[1] for words in lines if words[0] == "done"]
    lost = len(set(asked) - {name for name, _ in late})
    twice = len(done) - len(set(done))
    reached(
        "broker-kill",
        f"{kills} kills, {lost} of {len(asked):,} queries lost, {twice} applied twice",
        kills=kills,
        asked=len(asked),
        lost=lost,
        twice=twice,
    )
    assert lost == 0
    assert len(asked) >= (15_000 if thorough else kills)
    assert len(done) == len(set(done))  # none given again once it was acknowledged
    order = list(asked)
    first_seen = list(dict.fromkeys(name for name, _ in late if name in asked))
    assert first_seen == order
    for name, label in late:
        if name in asked:
            assert label == digits.logits[asked[name]].argmax()
