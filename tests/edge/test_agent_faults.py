"""EdgeAgent through outages: it answers in time, gives the reason, and recovers soon."""

from __future__ import annotations

import logging
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from edge_sdk import AgentSettings, EdgeAgent, Prediction
from edge_sdk.errors import StateInUseError
from tests.edge.digits import copy_version
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fault_proxy import FaultProxy
    from tests.edge.fleet import Fleet

pytestmark = pytest.mark.deadline

NEVER_EXIT = -1.0
DEADLINE_S = 0.5
GRACE_S = 0.25  # what DESIGN.md grants beyond the deadline
BACK_S = 5.0


def settings(**other: Any) -> AgentSettings:
    return AgentSettings(**{"threshold": NEVER_EXIT, "deadline_s": DEADLINE_S, **other})


def until_served(agent: EdgeAgent, digits: Digits, timeout_s: float) -> None:
    wait_until(lambda: agent.predict(digits.x[0]).source == "server", agent.status, timeout_s)


@pytest.fixture
def served(fleet: Fleet, proxy: FaultProxy, digits: Digits) -> Iterator[Callable[..., EdgeAgent]]:
    """Opens an agent behind the proxy, with the server known to be present."""
    opened: list[EdgeAgent] = []

    def start(name: str, **other: Any) -> EdgeAgent:
        agent = EdgeAgent.open(fleet.device(name, broker_port=proxy.port), settings(**other))
        opened.append(agent)
        until_served(agent, digits, 10.0)
        return agent

    yield start
    for agent in opened:
        agent.close()


def timed(agent: EdgeAgent, x: Any) -> tuple[Prediction, float]:
    start = time.monotonic()
    answer = agent.predict(x)
    return answer, time.monotonic() - start


def test_a_black_hole_costs_one_deadline_then_nothing_and_ends(
    served: Callable[..., EdgeAgent],
    proxy: FaultProxy,
    digits: Digits,
    thorough: bool,
    reached: Callable[..., None],
) -> None:
    """FAULTS row 1: the link goes dark in the middle of an offload; 1,000 times in full."""
    agent = served("hole")
    folder = digits.models / "digits" / "1" / "bundles" / "d2"
    with EdgeAgent.from_bundle(folder) as alone:
        local_s = statistics.median(timed(alone, x)[1] for x in digits.x[:100])
    proxy.hole()
    first, first_s = timed(agent, digits.x[0])
    assert (first.source, first.reason) == ("fallback", "no reply within the deadline")
    assert first.label == digits.exit_logits[0].argmax()
    assert DEADLINE_S <= first_s <= DEADLINE_S + GRACE_S
    later = [timed(agent, digits.x[i % 200]) for i in range(999 if thorough else 60)]
    slowest_s = max(seconds for _, seconds in later)
    reached(
        "black-hole",
        f"{1 + len(later)} of {1 + len(later)} answered; the first in {first_s:.3f} s of"
        f" {DEADLINE_S + GRACE_S:.2f}, the slowest of the others {1e3 * (slowest_s - local_s):.1f}"
        " ms after a local answer",
        first_s=first_s,
        slowest_s=slowest_s,
        local_s=local_s,
    )
    assert {answer.source for answer, _ in later} == {"fallback"}
    assert slowest_s < local_s + 0.05
    # beyond the local answer: a refusal, and another record
    assert statistics.median(seconds for _, seconds in later) < local_s + 0.0005
    assert agent.status().presence == "away"
    assert "no reply within the deadline" in agent.status().why_away
    proxy.lift()
    until_served(agent, digits, BACK_S)


def test_one_caller_s_short_deadline_leaves_the_server_to_the_others(
    served: Callable[..., EdgeAgent], proxy: FaultProxy, digits: Digits
) -> None:
    agent = served("hasty", deadline_s=2.0)
    proxy.latency_s = 0.05  # each way
    for x in digits.x[:10]:
        hasty = agent.predict(x, deadline_s=0.05)
        assert (hasty.source, hasty.reason) == ("fallback", "no reply within the deadline")
        assert agent.predict(x).source == "server"


def test_a_stopped_server_is_like_a_black_hole(
    fleet: Fleet, served: Callable[..., EdgeAgent], digits: Digits
) -> None:
    """FAULTS row 1."""
    agent = served("stopped")
    os.kill(fleet.pid, signal.SIGSTOP)  # the broker, its child, goes on
    try:
        answer, seconds = timed(agent, digits.x[0])
        assert answer.source == "fallback"
        assert seconds <= DEADLINE_S + GRACE_S
        assert timed(agent, digits.x[0])[1] < 0.05
    finally:
        os.kill(fleet.pid, signal.SIGCONT)
    until_served(agent, digits, BACK_S)


def test_a_reset_in_mid_offload_falls_back_before_the_deadline(
    fleet: Fleet, served: Callable[..., EdgeAgent], proxy: FaultProxy, digits: Digits
) -> None:
    """FAULTS row 1."""
    agent = served("reset")
    proxy.latency_s = 0.2
    threading.Timer(0.1, proxy.reset).start()
    start = time.monotonic()
    answer = agent.predict(digits.x[0], deadline_s=5.0)
    assert time.monotonic() - start < 1.0
    assert answer.source == "fallback"
    assert "connection was lost" in answer.reason
    proxy.latency_s = 0.0
    until_served(agent, digits, BACK_S)


def test_latency_within_the_deadline_is_waited_for(
    served: Callable[..., EdgeAgent], proxy: FaultProxy, digits: Digits
) -> None:
    agent = served("slow", deadline_s=2.0)
    proxy.latency_s = 0.1
    answer, seconds = timed(agent, digits.x[0])
    assert answer.source == "server"
    assert 0.2 <= seconds < 2.0
    assert answer.latency_ms == pytest.approx(1e3 * seconds, rel=0.05)


def test_a_broker_that_comes_later_is_found(fleet: Fleet, digits: Digits, free_port: int) -> None:
    state = fleet.device("early-bird", broker_port=free_port)
    with EdgeAgent.open(state, settings()) as agent:
        first, seconds = timed(agent, digits.x[0])
        assert first.source == "fallback"
        assert f"no broker at mqtt://127.0.0.1:{free_port}" in first.reason
        assert seconds <= DEADLINE_S + GRACE_S
        assert timed(agent, digits.x[0])[1] < 0.05
        # after 3 s without a link it asks the server for the broker
        until_served(agent, digits, 8.0)
    kept = orjson.loads((state / "connection.json").read_bytes())
    assert kept["broker"]["url"].endswith(f":{fleet.broker_port}")


@pytest.mark.parametrize(
    "damaged",
    [None, b"", b"[]", b"{}", b'{"broker": {"url": 7}}', b'{"broker": {"url": "mqtt://h:18.3"}}'],
)
def test_device_whose_connection_file_is_damaged_answers_and_has_it_made_again(
    fleet: Fleet, digits: Digits, damaged: bytes | None
) -> None:
    """FAULTS row 32."""
    state = fleet.device("flash-damage")
    file = state / "connection.json"
    if damaged is None:
        file.unlink()
    else:
        file.write_bytes(damaged)
    with EdgeAgent.open(state, settings()) as agent:
        assert timed(agent, digits.x[0])[0].source == "fallback"
        until_served(agent, digits, 8.0)
    assert orjson.loads(file.read_bytes())["broker"]["url"].endswith(f":{fleet.broker_port}")


def test_a_restarted_server_is_used_again_within_seconds(
    fleet: Fleet, served: Callable[..., EdgeAgent], digits: Digits
) -> None:
    agent = served("patient")
    answers: list[tuple[Prediction, float]] = []
    done = threading.Event()

    def classify() -> None:
        while not done.wait(0.01):
            answers.append(timed(agent, digits.x[len(answers) % 200]))

    thread = threading.Thread(target=classify, daemon=True)
    thread.start()
    try:
        fleet.restart()
    finally:
        done.set()
        thread.join()
    assert "fallback" in {answer.source for answer, _ in answers}
    assert max(seconds for _, seconds in answers) <= DEADLINE_S + GRACE_S
    until_served(agent, digits, BACK_S)


def test_late_settled_queries_of_a_stream_have_a_deadline_each(
    served: Callable[..., EdgeAgent], proxy: FaultProxy, digits: Digits
) -> None:
    agent = served("stream")
    proxy.hole()
    start = time.monotonic()
    answers = list(agent.predict_many(digits.x[:100]))
    # offloads under way miss the deadline with the first; the other inputs are not offloaded
    assert time.monotonic() - start < DEADLINE_S + GRACE_S + 0.25
    assert [answer.label for answer in answers] == digits.exit_logits[:100].argmax(axis=1).tolist()
    assert {answer.source for answer in answers} == {"fallback"}


def test_the_second_agent_on_a_state_folder_is_told_who_has_it(
    fleet: Fleet, digits: Digits
) -> None:
    """FAULTS row 30."""
    state = fleet.device("twice")
    with EdgeAgent.open(state, settings()) as agent:
        with pytest.raises(StateInUseError, match=f"process {os.getpid()} already runs as agent"):
            EdgeAgent.open(state, settings())
        assert agent.predict(digits.x[0]).source == "server"
    with EdgeAgent.open(state, settings()) as agent:
        assert agent.predict(digits.x[0]).source == "server"


def test_closing_leaves_no_thread_and_frees_the_folder(fleet: Fleet, digits: Digits) -> None:
    state = fleet.device("tidy", max_packet_bytes=200)
    before = set(threading.enumerate())
    agent = EdgeAgent.open(state, settings(late_answers=True))
    agent.predict(digits.x[0], deadline_s=5.0)
    assert len(set(threading.enumerate()) - before) >= 5  # link, watch, outbox, HTTP, health
    agent.close()
    agent.close()
    assert set(threading.enumerate()) - before == set()
    # a bundle that answered is confirmed although its health window was not over
    assert orjson.loads((state / "active.json").read_bytes())["unproven_starts"] is None


def test_refresh_changes_the_bundle_between_predictions_under_load(
    fleet: Fleet, digits: Digits
) -> None:
    state = fleet.device("fresh", "pair/1/d2")
    # above every entropy of ten classes, ln 10 = 2.303: all exit
    with EdgeAgent.open(state, AgentSettings(deadline_s=5.0)) as agent:
        answers: list[tuple[float, Prediction]] = []
        failures: list[Exception] = []
        done = threading.Event()

        def classify() -> None:
            at = 0
            while not done.is_set():
                begun = time.monotonic()
                try:
                    answers.append((begun, agent.predict(digits.x[at % 200])))
                except Exception as err:  # noqa: BLE001 - any error would reach a user
                    failures.append(err)
                at += 1

        threads = [threading.Thread(target=classify, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            models = fleet.state / "models"
            staged = fleet.state / "staged" / "pair" / "2"
            copy_version(models / "pair" / "1", staged, threshold=2.5)
            fleet.assign("pair")
            staged.rename(models / "pair" / "2")
            wait_until(lambda: agent.refresh() == "pair/2/d2", "the new bundle", 20.0)
            changed_at = time.monotonic()
            wait_until(
                lambda: sum(begun > changed_at for begun, _ in answers) >= 100, "answers after it"
            )
        finally:
            done.set()
            for thread in threads:
                thread.join()
            fleet.assign("digits")
        assert failures == []
        # an offload under way keeps the gate that decided it
        after = [answer for begun, answer in answers if begun > changed_at]
        assert {answer.threshold for answer in after} == {2.5}
        assert {answer.source for answer in after} == {"device"}
        assert agent.status().bundle == "pair/2/d2"


def test_an_agent_whose_identity_is_gone_does_not_fill_its_log(
    fleet: Fleet, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator deletes the state folder of a revoked device, whose agent still runs."""
    caplog.set_level(logging.DEBUG)
    state = fleet.device("deleted", broker_port=free_port)
    with EdgeAgent.open(state):
        (state / "agent.json").unlink()
        wait_until(
            lambda: any("agent.json" in line for line in caplog.messages), "it was not looked for"
        )
    assert "broker not located: " in caplog.text
    assert "watching the server failed" not in caplog.text
