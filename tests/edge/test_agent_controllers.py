"""Thresholds that adapt while an agent runs."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from edge_sdk import AgentSettings, Agreement, Budget, EdgeAgent
from edge_sdk.errors import ConfigurationError
from edge_sdk.gate.controllers import AgreementReport
from edge_sdk.session import Array
from edge_sdk.wire.frames import Tensor
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fault_proxy import FaultProxy
    from tests.edge.fleet import Fleet

pytestmark = pytest.mark.deadline

BURST = 50  # offloads that a budget may spend at once


def open_gate(agent: EdgeAgent, digits: Digits) -> AgreementReport:
    """Predict until a threshold holds; until then every query is offloaded, and an audit."""
    for x in digits.x:
        if report_of(agent).bound is not None:
            return report_of(agent)
        answer = agent.predict(x)
        # the audit that opens the gate is counted in the background
        assert answer.source == "server" or report_of(agent).bound is not None
    raise AssertionError(f"no threshold holds: {report_of(agent)}")


def report_of(agent: EdgeAgent) -> AgreementReport:
    report = agent.status().agreement
    assert report is not None
    return report


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"threshold": 0.5, "controller": Budget(0.1)}, "expected one of them, got both"),
        ({"offload": False, "controller": Agreement(0.05)}, "controller needs offload"),
        ({"offload": False, "late_answers": True}, "late_answers needs offload"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AgentSettings(**fields)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Budget(-0.1), "limit: expected a finite number of at least 0"),
        (lambda: Budget(math.inf), "limit: expected a finite number of at least 0"),
        (lambda: Budget(1.0, cost=0.0), "cost: expected a finite number above 0"),
        (lambda: Agreement(0.0), "delta: expected a finite number above 0"),
        (lambda: Agreement(0.05, confidence=1.0), "confidence: expected a finite number above 0"),
        (lambda: Agreement(0.05, audit_share=0.0), "audit_share: expected a finite number above 0"),
        # 2,000 audits can show no disagreement below 0.26 %
        (lambda: Agreement(0.001), "window: expected at least 5296"),
    ],
)
def test_numbers_out_of_range_are_refused_when_the_record_is_built(
    build: Callable[[], object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build()


def test_a_budget_holds_from_several_threads(fleet: Fleet, digits: Digits) -> None:
    settings = AgentSettings(controller=Budget(0.2), deadline_s=5.0)
    with EdgeAgent.open(fleet.device("budget"), settings) as agent:
        with ThreadPoolExecutor(4) as pool:
            inputs = [digits.x[i % 200] for i in range(1000)]
            answers = list(pool.map(agent.predict, inputs))
        assert agent.status().agreement is None
    offloads = sum(answer.source != "device" for answer in answers)
    # by arithmetic: 0.2 earned a prediction, and at most a burst saved or overdrawn
    assert 0.2 * 1000 - BURST <= offloads <= 0.2 * 1000 + BURST
    for answer in answers:
        assert (answer.source == "device") == (answer.uncertainty < answer.threshold)
    assert len({answer.threshold for answer in answers}) > 10


def test_a_budget_of_nothing_keeps_everything_on_the_device(fleet: Fleet, digits: Digits) -> None:
    settings = AgentSettings(controller=Budget(0.0))
    with EdgeAgent.open(fleet.device("miser"), settings) as agent:
        assert {agent.predict(x).source for x in digits.x[:100]} == {"device"}
        assert agent.status().bytes_up == 0
        assert agent.status().threshold == math.inf


def test_agreement_opens_the_gate_as_far_as_the_server_agrees(fleet: Fleet, digits: Digits) -> None:
    settings = AgentSettings(controller=Agreement(0.3), deadline_s=5.0)
    with EdgeAgent.open(fleet.device("agreeing"), settings) as agent:
        assert agent.status().threshold == -math.inf
        assert report_of(agent).bound is None
        report = open_gate(agent, digits)
        answers = [agent.predict(x) for x in digits.x]
    assert report.bound is not None
    assert report.bound <= 0.3
    assert report.threshold in {point.threshold for point in agent.manifest.gate.curve}
    exits = np.array([answer.source == "device" for answer in answers])
    assert exits.any()
    # on all the data that the audits were drawn from, with the labels by torch
    exit_labels, labels = digits.exit_logits.argmax(axis=1), digits.logits.argmax(axis=1)
    assert (exit_labels != labels)[exits].mean() <= 0.3


def test_exits_are_audited_in_the_background(
    fleet: Fleet, proxy: FaultProxy, digits: Digits
) -> None:
    controller = Agreement(0.3, audit_share=1.0)
    state = fleet.device("audited", broker_port=proxy.port)
    with EdgeAgent.open(state, AgentSettings(controller=controller, deadline_s=2.0)) as agent:
        open_gate(agent, digits)
        sure = [x for x in digits.x if agent.predict(x).source == "device"]
        proxy.latency_s = 0.02
        before = report_of(agent).audits
        exits_s = []
        for x in sure[:100]:
            start = time.monotonic()
            if agent.predict(x).source == "device":
                exits_s.append(time.monotonic() - start)
        assert statistics.median(exits_s) < 0.005  # a round trip alone takes 0.04 s
        # every 25th audit makes a report
        wait_until(lambda: report_of(agent).audits >= before + 25, "the next report")
        names = {thread.name for thread in threading.enumerate()}
        assert "splitedge-audit" in names


def test_an_audit_uses_the_input_as_it_was(
    fleet: Fleet, digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    # with a `prefix` graph the smashed data are made from x after the caller has its answer
    controller = Agreement(0.3, audit_share=1.0)
    settings = AgentSettings(controller=controller, deadline_s=2.0)
    with EdgeAgent.open(fleet.device("buffer", "pair/1/d2"), settings) as agent:
        open_gate(agent, digits)
        sure = next(x for x in digits.x if agent.predict(x).source == "device")
        sent: list[Array] = []
        smashed = agent._bundle.runner.smashed

        def watched(x: Array, z: Array | None) -> Tensor:
            sent.append(x.copy())
            return smashed(x, z)

        monkeypatch.setattr(agent._bundle.runner, "smashed", watched)
        seen = sure + np.float32(0.001)  # no earlier audit has this one
        buffer = seen.copy()
        assert agent.predict(buffer).source == "device"
        buffer[:] = 0.0
        wait_until(lambda: any(np.array_equal(one, seen) for one in sent), "the audit")
