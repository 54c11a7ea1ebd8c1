"""The rules of the boxes: no threads, no HTTP, and a clock that is a number."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from edge_sdk.training.protocol.http import Decline, Join
from edge_sdk.training.protocol.messages import (
    EndRound,
    Evaluate,
    Features,
    OutputGradient,
    Outputs,
    Ready,
    Reply,
    Request,
    Scores,
    StartRound,
    Step,
    Update,
)
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.protocol.training import Training
from server.training.fleet.api import DeclineBody, JoinBody
from server.training.fleet.box import TRANSITIONS, Box, BoxEvent, BoxState, Message, Missed
from server.training.fleet.boxes import Boxes

FETCH_S = 5.0
SILENCE_S = 15.0
PLAN = Plan("tiny", (1, 8, 8), 4, (0.5,), (1.0,), depth=1, training=Training(0.1, 10))


def boxes_of(*devices: str, lockstep: bool = True) -> Boxes:
    """Boxes of devices with 30 samples that joined at 0."""
    boxes = Boxes([], {}, lockstep=lockstep, fetch_s=FETCH_S, silence_s=SILENCE_S)
    for device in devices:
        boxes.hear(device, 0.0)
        boxes.join(device, Join(30, (1, 8, 8)))
    return boxes


def start(number: int = 1) -> StartRound:
    return StartRound(number, PLAN, {})


def ready(number: int = 1, samples: int = 30) -> Ready:
    return Ready(number, samples, 2)


def update(number: int = 1, samples: int = 30) -> Update:
    return Update(number, {}, samples, 0.5, 3, 0)


def keep(boxes: Boxes, device: str, reply: Update) -> str:
    """Hand in an update that was not asked for, on a disk that takes it at once."""
    outcome = boxes.take(device, "", reply)
    return boxes.place(device, reply) if outcome == "kept" else outcome


def box_in(state: BoxState) -> Box:
    """A box that came to that state."""
    box = Box()
    if state is not BoxState.EMPTY:
        box.put(Message("m", start()), 0.0)
    if state is BoxState.FETCHED:
        box.fetch("")
    if state is BoxState.ANSWERED:
        box.answer(ready())
    if state is BoxState.DECLINED:
        box.decline("it cannot")
    assert box.state is state
    return box


# one box


def test_every_state_can_be_closed_and_takes_another_request() -> None:
    assert TRANSITIONS.keys() == set(BoxState)
    for state in BoxState:
        box = box_in(state)
        box.close("pi", 1.0, away=False)
        assert (box.state, box.message, box.reply) == (BoxState.EMPTY, None, None)
        box = box_in(state)
        box.put(Message("n", start(2)), 9.0)
        assert (box.state, box.put_at, box.reply, box.reason) == (BoxState.WAITING, 9.0, None, "")


@pytest.mark.parametrize("state", BoxState)
def test_a_reply_is_taken_until_one_is_there(state: BoxState) -> None:
    box = box_in(state)
    takes = state not in {BoxState.EMPTY, BoxState.ANSWERED}
    assert box.open is takes
    assert box.answers(ready()) is takes
    assert (BoxEvent.ANSWER in TRANSITIONS[state]) is takes


@pytest.mark.parametrize("state", BoxState)
def test_a_message_is_fetched_while_the_device_owes_an_answer(state: BoxState) -> None:
    box = box_in(state)
    pending = state in {BoxState.WAITING, BoxState.FETCHED}
    assert box.pending is pending
    assert (box.fetch("") is not None) is pending
    assert box.fetch("m") is None  # the device dealt with it


def test_only_a_deadline_without_a_reason_is_missed_by_the_device() -> None:
    box = box_in(BoxState.FETCHED)
    assert box.close("pi", 2.5, away=False) == Missed("pi", "start", "no reply within 2.5 s")
    assert box.missed_deadline
    assert box.hear(1.0)
    assert not box.hear(2.0)
    box.put(Message("n", start()), 0.0)
    assert box.close("pi", 2.5, away=True) == Missed("pi", "start", "it is away")
    box = box_in(BoxState.DECLINED)
    assert box.close("pi", 2.5, away=False) == Missed("pi", "start", "it cannot")
    assert not box.missed_deadline
    box = box_in(BoxState.ANSWERED)
    assert box.close("pi", 2.5, away=False) == ready()
    assert not box.missed_deadline


ZEROS = torch.zeros(1)


@pytest.mark.parametrize(
    ("request_", "reply", "name"),
    [
        (start(1), ready(1), "start"),
        (Step(1, 4), Features(1, 4, ZEROS, None, None), "step 4"),
        (Outputs(1, 4, ZEROS), OutputGradient(1, 4, ZEROS, 0.0), "outputs of step 4"),
        (EndRound(1), update(1), "end"),
        (Evaluate(1, PLAN, {}), Scores(1, 10, 5, None), "evaluate"),
    ],
)
def test_a_request_has_one_kind_of_reply_and_a_name(
    request_: Request, reply: Reply, name: str
) -> None:
    box = Box()
    box.put(Message("m", request_), 0.0)
    assert box.answers(reply)
    others: list[Reply] = [
        ready(2),
        update(2),
        Features(1, 5, ZEROS, None, None),
        OutputGradient(1, 5, ZEROS, 0.0),
        Scores(2, 10, 5, None),
    ]
    assert not any(box.answers(other) for other in others)  # of another round or step
    missed = box.close("pi", 1.0, away=False)
    assert isinstance(missed, Missed)
    assert missed.what == name


# which device is awaited


def test_a_device_is_awaited_until_it_is_silent_or_leaves_its_message() -> None:
    boxes = boxes_of("ada", "bob")
    for device in ("ada", "bob"):
        assert boxes.put(device, Message(device, start()), 0.0)
    assert boxes.next_change(["ada", "bob"]) == FETCH_S
    assert boxes.fetch("ada", "") is not None
    assert boxes.awaited(["ada", "bob"], 4.9) == ["ada", "bob"]
    assert boxes.awaited(["ada", "bob"], FETCH_S) == ["ada"]
    assert boxes.next_change(["ada"]) == SILENCE_S
    boxes.beat("ada", 10.0)
    assert boxes.awaited(["ada"], SILENCE_S + 9.9) == ["ada"]
    assert boxes.awaited(["ada"], SILENCE_S + 10.0) == []


def test_a_sign_of_life_is_no_answer_to_a_missed_deadline() -> None:
    boxes = boxes_of("pi")
    boxes.put("pi", Message("m", start()), 0.0)
    assert boxes.close(["pi"], 0.1, 0.1) == {}
    boxes.beat("pi", 1.0)
    assert (boxes.present(1.0), boxes.alive(1.0)) == ([], ["pi"])
    assert boxes.hear("pi", 2.0)
    assert boxes.present(2.0) == ["pi"]
    boxes.beat("stranger", 2.0)
    assert boxes.alive(2.0) == ["pi"]


def test_a_restart_loses_what_was_fetched_and_only_that() -> None:
    boxes = boxes_of("ada", "bob")
    for device in ("ada", "bob"):
        boxes.put(device, Message(device, start()), 0.0)
    boxes.fetch("ada", "")
    for device in ("ada", "bob"):
        boxes.join(device, Join(30, (1, 8, 8)))
    assert boxes.awaited(["ada", "bob"], 1.0) == ["bob"]
    assert boxes.fetch("bob", "") is not None


def test_when_the_rounds_are_over_scores_alone_are_awaited() -> None:
    boxes = boxes_of("ada", "bob")
    boxes.put("ada", Message("a", EndRound(1)), 0.0)
    boxes.put("bob", Message("b", Evaluate(1, PLAN, {})), 0.0)
    boxes.end_rounds()
    assert boxes.awaited(["ada", "bob"], 0.0) == ["bob"]
    boxes.close(["ada", "bob"], 1.0, 0.0)
    assert [missed.why for missed in boxes.take_missed()] == [
        "the rounds are over",
        "no reply within 1 s",
    ]


# which reply counts


def test_replies_are_told_apart() -> None:
    boxes = boxes_of("pi")
    boxes.put("pi", Message("m", start()), 0.0)
    assert boxes.take("pi", "m", ready(7)) == "foreign"
    assert boxes.take("pi", "made up", ready()) == "foreign"
    assert boxes.take("pi", "m", ready()) == "taken"
    assert boxes.take("pi", "m", ready()) == "duplicate"
    assert boxes.close(["pi"], 1.0, 1.0) == {"pi": ready()}
    assert boxes.take("pi", "m", ready()) == "duplicate"
    boxes.put("pi", Message("n", start(2)), 2.0)
    boxes.close(["pi"], 1.0, 3.0)
    assert boxes.take("pi", "n", ready(2)) == "late"


def test_a_device_that_reports_more_samples_than_at_first_is_not_awaited() -> None:
    boxes = boxes_of("pi")
    boxes.put("pi", Message("m", start()), 0.0)
    assert boxes.take("pi", "m", ready(samples=31)) == "foreign"
    assert boxes.awaited(["pi"], 0.0) == []
    boxes.close(["pi"], 1.0, 0.0)
    assert [m.why for m in boxes.take_missed()] == ["it reported more samples than when it joined"]
    assert boxes.take("pi", "", update(samples=31)) == "foreign"


def test_an_update_counts_once_however_it_comes() -> None:
    boxes = boxes_of("pi")
    boxes.put("pi", Message("m", EndRound(1)), 0.0)
    assert boxes.take("pi", "", update()) == "taken"  # unasked, and just asked for
    assert boxes.take("pi", "m", update()) == "duplicate"
    assert boxes.take("pi", "", update()) == "duplicate"
    assert boxes.take("pi", "", update(2)) == "foreign"  # of a round that has not begun
    assert boxes.take("pi", "", update(0)) == "foreign"


def test_an_early_update_answers_the_end_of_its_round_and_declines_its_steps() -> None:
    boxes = boxes_of("pi")
    boxes.put("pi", Message("m", Step(1, 0)), 0.0)
    boxes.fetch("pi", "")
    assert keep(boxes, "pi", update()) == "kept"
    assert boxes.kept() == {("pi", 1)}
    assert boxes.awaited(["pi"], 0.0) == []
    assert not boxes.put("pi", Message("n", Step(1, 1)), 0.0)  # nothing to fetch
    boxes.close(["pi"], 1.0, 0.0)
    assert [m.why for m in boxes.take_missed()] == ["it finished the round without the server"]
    assert not boxes.put("pi", Message("o", EndRound(1)), 0.0)
    assert boxes.close(["pi"], 1.0, 0.0) == {"pi": update()}
    assert (boxes.kept(), boxes.take_late()) == (set(), {})


@pytest.mark.parametrize("lockstep", [True, False])
def test_an_early_update_is_late_once_its_round_is_over(lockstep: bool) -> None:
    boxes = boxes_of("ada", "bob", lockstep=lockstep)
    for device in ("ada", "bob"):
        boxes.put(device, Message(device, start()), 0.0)
        boxes.close([device], 1.0, 0.0)
    assert keep(boxes, "ada", update()) == "kept"
    boxes.put("bob", Message("2", start(2)), 0.0)  # in lockstep this ends round 1 for ada too
    assert (boxes.take_late() == {"ada": update()}) is lockstep
    boxes.put("ada", Message("3", start(2)), 0.0)
    assert (boxes.take_late() == {"ada": update()}) is not lockstep


def test_an_update_is_reserved_while_the_disk_takes_it() -> None:
    boxes = boxes_of("pi")
    boxes.put("pi", Message("m", start()), 0.0)
    boxes.close(["pi"], 1.0, 0.0)
    assert boxes.take("pi", "", update()) == "kept"
    assert boxes.is_being_kept("pi")
    assert boxes.kept() == {("pi", 1)}
    boxes.release("pi")  # the disk is full: it may come again
    assert boxes.kept() == set()
    assert boxes.take("pi", "", update()) == "kept"
    boxes.put("pi", Message("n", EndRound(1)), 1.0)  # asked for while it is written
    assert boxes.place("pi", update()) == "taken"
    assert boxes.close(["pi"], 1.0, 1.0) == {"pi": update()}


# what may come over the network


def test_bodies_have_the_fields_of_the_protocol() -> None:
    assert JoinBody.model_fields.keys() == {field.name for field in fields(Join)}
    assert DeclineBody.model_fields.keys() == {field.name for field in fields(Decline)}
