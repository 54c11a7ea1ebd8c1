"""Observers of answers: what they are told, corrections, and observers that fail."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray

from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.answers.observer import REMEMBERED_MAX, Answered, AnswerObserver, Part
from edge_sdk.errors import ConfigurationError, InputError

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fleet import Fleet

pytestmark = pytest.mark.deadline

NEVER_EXIT = -1.0


class Diary(AnswerObserver):
    """Writes down all that it is told."""

    name = "diary"

    def __init__(self, *parts: Part) -> None:
        self.remembers = frozenset(parts)
        self.told: list[Answered] = []
        self.inputs: list[NDArray[Any]] = []
        self.corrections: list[tuple[Answered, int]] = []
        self.closed = 0

    def answered(self, answered: Answered) -> None:
        assert answered.x is not None
        self.told.append(answered)
        self.inputs.append(answered.x.copy())

    def corrected(self, answered: Answered, label: int) -> None:
        self.corrections.append((answered, label))

    def report(self) -> Mapping[str, Any]:
        return {"told": len(self.told)}

    def close(self) -> None:
        self.closed += 1


class Faulty(AnswerObserver):
    """Fails at its second answer."""

    name = "faulty"
    calls = 0
    closed = False

    def close(self) -> None:
        self.closed = True

    def answered(self, answered: Answered) -> None:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("no")


def alone(digits: Digits, *observers: AnswerObserver) -> EdgeAgent:
    return EdgeAgent.from_bundle(bundle_of(digits), observers=observers)


def bundle_of(digits: Digits) -> Any:
    return digits.models / "digits" / "1" / "bundles" / "d2"


def test_an_observer_is_told_of_each_answer_with_its_input_and_z(digits: Digits) -> None:
    import torch

    diary = Diary()
    with alone(digits, diary) as agent:
        answers = [agent.predict(x) for x in digits.x[:5]]
        assert agent.status().reports == {"diary": {"told": 5}}
    assert [told.prediction for told in diary.told] == answers
    assert len({answer.id for answer in answers}) == 5
    assert all(len(bytes.fromhex(answer.id)) == 16 and not answer.late for answer in answers)
    np.testing.assert_array_equal(np.stack(diary.inputs), digits.x[:5])
    with torch.no_grad():
        z = digits.net.prefix(2)(torch.from_numpy(digits.x[:5])).numpy()
    seen = np.concatenate([told.z for told in diary.told if told.z is not None])
    np.testing.assert_allclose(seen, z, atol=1e-5)
    assert [told.decision.label for told in diary.told] == [answer.label for answer in answers]
    assert diary.closed == 1


def test_without_observers_answers_have_no_id_and_no_correction_is_taken(digits: Digits) -> None:
    with alone(digits) as agent:
        assert agent.predict(digits.x[0]).id == ""
        assert agent.status().reports == {}
        with pytest.raises(ConfigurationError, match="nothing here takes corrections"):
            agent.correct("0" * 32, 1)


def test_one_more_observer_can_be_added_to_a_running_agent(digits: Digits) -> None:
    first, second = Diary(), Diary("z")
    with alone(digits) as agent:
        agent.predict(digits.x[0])
        agent.add_observer(first)
        answer = agent.predict(digits.x[1])
        with pytest.raises(ConfigurationError, match="nothing here takes corrections"):
            agent.correct(answer.id, 1)
        agent.add_observer(second)
        assert agent.correct(agent.predict(digits.x[2]).id, 1)
    assert [len(first.told), len(second.told)] == [2, 1]
    assert [first.corrections, len(second.corrections)] == [[], 1]


def test_a_correction_brings_the_answer_back_with_its_own_copy_of_the_input(digits: Digits) -> None:
    keeper, learner = Diary("x"), Diary("z")
    with alone(digits, keeper, learner) as agent:
        buffer = digits.x[3].copy()
        answer = agent.predict(buffer)
        buffer[:] = 7.0
        assert agent.correct(answer.id, "4")
        assert not agent.correct(answer.id, 4)  # once
        assert not agent.correct("f" * 32, 4)  # never known
    for diary in (keeper, learner):
        [(told, label)] = diary.corrections
        assert (told.prediction, label) == (answer, 4)
        np.testing.assert_array_equal(told.x, digits.x[3])
        assert told.z is not None


@pytest.mark.parametrize("label", [10, -1, "ten", 1.0, True, None])
def test_a_label_that_is_no_class_is_refused_and_the_answer_stays(
    digits: Digits, label: Any
) -> None:
    with alone(digits, Diary("z")) as agent:
        answer = agent.predict(digits.x[0])
        with pytest.raises(InputError, match="label: expected 0 to 9 or one of 0, 1, 2"):
            agent.correct(answer.id, label)
        index: Any = np.int64(9)  # what argmax gives
        assert agent.correct(answer.id, index)


def test_only_the_newest_answers_can_be_corrected(digits: Digits) -> None:
    with alone(digits, Diary("x")) as agent:
        answers = [agent.predict(digits.x[0]) for _ in range(REMEMBERED_MAX + 1)]
        assert not agent.correct(answers[0].id, 1)
        assert agent.correct(answers[1].id, 1)


def test_a_failing_observer_is_logged_once_and_the_others_go_on(
    digits: Digits, caplog: pytest.LogCaptureFixture
) -> None:
    faulty, diary = Faulty(), Diary()
    with caplog.at_level(logging.ERROR), alone(digits, faulty, diary) as agent:
        for x in digits.x[:4]:
            agent.predict(x)
    assert (faulty.calls, len(diary.told)) == (2, 4)
    assert faulty.closed
    assert [record.getMessage() for record in caplog.records] == [
        "observer=faulty failed; it is not called again"
    ]


def test_observers_see_offloads_with_both_ends_answers(fleet: Fleet, digits: Digits) -> None:
    diary = Diary("x")
    settings = AgentSettings(threshold=NEVER_EXIT, deadline_s=5.0, codec="fp32")
    state = fleet.device("observed")
    with EdgeAgent.open(state, settings, observers=[diary]) as agent:
        buffer = np.empty_like(digits.x[0])

        def inputs() -> Any:
            for x in digits.x[:6]:
                buffer[:] = x  # a caller that uses one buffer for all
                yield buffer

        answers = list(agent.predict_many(inputs()))
        assert agent.correct(answers[0].id, 0)
    assert [answer.source for answer in answers] == ["server"] * 6
    told = {each.prediction.id: each for each in diary.told}
    for at, answer in enumerate(answers):
        seen = told[answer.id]
        assert seen.prediction is answer
        assert answer.label == digits.logits[at].argmax()
        assert seen.decision.label == digits.exit_logits[at].argmax()
        np.testing.assert_array_equal(seen.x, digits.x[at])


def test_a_fallback_has_an_id_and_says_whether_a_late_answer_follows(
    fleet: Fleet, digits: Digits
) -> None:
    for late_answers in (False, True):
        diary = Diary()
        # no broker listens at port 1
        state = fleet.device(f"falls-back-{late_answers}".lower(), broker_port=1)
        settings = AgentSettings(
            threshold=NEVER_EXIT, deadline_s=0.05, late_answers=late_answers, heartbeat_s=600
        )
        with EdgeAgent.open(state, settings, observers=[diary]) as agent:
            answer = agent.predict(digits.x[0])
            assert (answer.source, answer.late) == ("fallback", late_answers)
            assert [told.prediction.id for told in diary.told] == [answer.id]
            assert answer.id != ""


@pytest.mark.parametrize("told", [np.float32(1), "caf\udce9"])
def test_a_report_that_json_cannot_hold_stops_no_heartbeat(
    digits: Digits, told: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Diary):
        name = "odd"

        def report(self) -> Mapping[str, Any]:
            return {"told": told}

    with alone(digits, Odd(), Diary()) as agent:
        assert orjson.loads(orjson.dumps(asdict(agent.status())))["reports"] == {
            "diary": {"told": 0}
        }
    assert "observer=odd failed; it is not called again" in caplog.text
