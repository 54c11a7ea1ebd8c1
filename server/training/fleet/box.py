"""One device's box: a request, whether the device has it, and its answer. No waiting, no locks.

A request goes from WAITING over FETCHED to ANSWERED or DECLINED, and then the box is EMPTY again.
An answer may also come while the request is WAITING, because a device that finished a round without
the server hands in its update unasked. TRANSITIONS has every event that a state allows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

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
    to_bytes,
)

# Enough to tell a second reply from a late one; a device has one message at a time.
IDS_REMEMBERED: Final = 64
FINISHED_ALONE: Final = "it finished the round without the server"
RESTARTED: Final = "it was restarted"
AWAY: Final = "it is away"


class BoxState(Enum):
    """State of a box's request."""

    EMPTY = auto()  # no request
    WAITING = auto()  # the device has not fetched it
    FETCHED = auto()  # the device has it
    ANSWERED = auto()  # its reply is here
    DECLINED = auto()  # it will not be answered, and the reason is known


class BoxEvent(Enum):
    """Event that changes the state of a box."""

    PUT = auto()
    FETCH = auto()
    ANSWER = auto()
    DECLINE = auto()
    CLOSE = auto()


_S, _E = BoxState, BoxEvent
# A request that was never closed gives way to the next one. A late reply makes a decline good.
TRANSITIONS: Final[Mapping[BoxState, Mapping[BoxEvent, BoxState]]] = {
    _S.EMPTY: {
        _E.PUT: _S.WAITING,
        _E.CLOSE: _S.EMPTY,
    },
    _S.WAITING: {
        _E.PUT: _S.WAITING,
        _E.FETCH: _S.FETCHED,
        _E.ANSWER: _S.ANSWERED,
        _E.DECLINE: _S.DECLINED,
        _E.CLOSE: _S.EMPTY,
    },
    _S.FETCHED: {
        _E.PUT: _S.WAITING,
        _E.FETCH: _S.FETCHED,
        _E.ANSWER: _S.ANSWERED,
        _E.DECLINE: _S.DECLINED,
        _E.CLOSE: _S.EMPTY,
    },
    _S.ANSWERED: {
        _E.PUT: _S.WAITING,
        _E.CLOSE: _S.EMPTY,
    },
    _S.DECLINED: {
        _E.PUT: _S.WAITING,
        _E.ANSWER: _S.ANSWERED,
        _E.DECLINE: _S.DECLINED,
        _E.CLOSE: _S.EMPTY,
    },
}


class Message:
    """A request under way to a device."""

    def __init__(self, identifier: str, request: Request) -> None:
        self.id = identifier
        self.request = request
        self._raw = b""

    def raw(self) -> bytes:
        """The message's bytes, made when it is first fetched."""
        self._raw = self._raw or to_bytes(self.request)
        return self._raw


@dataclass(frozen=True, slots=True)
class Missed:
    """A message that got no reply in time.

    what: `start`, `end`, `step N`, `outputs of step N` or `evaluate`.
    """

    device: str
    what: str
    why: str


@dataclass(slots=True)
class Box:
    """One device's request, and its answer.

    Attributes:
        message: the request under way; None while the box is empty.
        put_at, heard_at: when the request was put, and when the device was last heard of.
        reason: why the request was declined.
        missed_deadline: the device missed one, and has asked or answered nothing since.
        early_update: of the round under way, finished without the server.
        round, ended_round: the last round it was asked anything in, and asked to end.
        answered: whether a message of that id was answered, for the last messages.
    """

    state: BoxState = BoxState.EMPTY
    message: Message | None = None
    put_at: float = 0.0
    heard_at: float = 0.0
    reply: Reply | None = None
    reason: str = ""
    missed_deadline: bool = False
    early_update: Update | None = None
    round: int = 0
    ended_round: int = 0
    answered: OrderedDict[str, bool] = field(default_factory=OrderedDict)

    @property
    def open(self) -> bool:
        """Whether a reply to the request would be taken."""
        return BoxEvent.ANSWER in TRANSITIONS[self.state]

    @property
    def pending(self) -> bool:
        """Whether the device has yet to answer the request or decline it."""
        return self.state in {BoxState.WAITING, BoxState.FETCHED}

    def hear(self, now: float) -> bool:
        """The device asks or answers; True if it had missed a deadline, and counts again."""
        back, self.missed_deadline, self.heard_at = self.missed_deadline, False, now
        return back

    def put(self, message: Message, now: float) -> None:
        """Put a request in. A round that the device finished already is answered or declined."""
        self._move(BoxEvent.PUT)
        self.message, self.put_at, self.reply, self.reason = message, now, None, ""
        self.answered[message.id] = False
        while len(self.answered) > IDS_REMEMBERED:
            self.answered.popitem(last=False)
        request, early = message.request, self.early_update
        if isinstance(request, EndRound):
            self.ended_round = request.round
            if early is not None:
                self._move(BoxEvent.ANSWER)
                self.reply, self.early_update = early, None
        elif early is not None and not isinstance(request, Evaluate):
            self.decline(FINISHED_ALONE)

    def fetch(self, after: str) -> Message | None:
        """The request, unless it is the one that the device dealt with last."""
        message = self.message
        if message is None or not self.pending or message.id == after:
            return None
        self._move(BoxEvent.FETCH)
        return message

    def answers(self, reply: Reply) -> bool:
        """Whether the reply is of the kind, round and step that the open request asks for."""
        return self.open and self.message is not None and _fits(self.message.request, reply)

    def answer(self, reply: Reply) -> None:
        """Take the reply."""
        self._move(BoxEvent.ANSWER)
        self.reply, self.reason = reply, ""
        if self.message is not None:
            self.answered[self.message.id] = True

    def decline(self, reason: str) -> None:
        """Expect no reply any more."""
        self._move(BoxEvent.DECLINE)
        self.reason = reason

    def close(self, device: str, deadline_s: float, *, away: bool) -> Reply | Missed | None:
        """Empty the box: its reply, or what was missed and why; None where it is empty already."""
        state, message, reply = self.state, self.message, self.reply
        self._move(BoxEvent.CLOSE)
        self.message = self.reply = None
        if message is None or state is BoxState.ANSWERED:
            return reply
        self.missed_deadline = state is not BoxState.DECLINED
        why = self.reason or (AWAY if away else f"no reply within {deadline_s:g} s")
        return Missed(device, _name(message.request), why)

    def _move(self, event: BoxEvent) -> None:
        self.state = TRANSITIONS[self.state][event]


def _fits(request: Request, reply: Reply) -> bool:
    if reply.round != request.round:
        return False
    match request:
        case StartRound():
            return isinstance(reply, Ready)
        case Step():
            return isinstance(reply, Features) and reply.step == request.step
        case Outputs():
            return isinstance(reply, OutputGradient) and reply.step == request.step
        case EndRound():
            return isinstance(reply, Update)
        case Evaluate():
            return isinstance(reply, Scores)


def _name(request: Request) -> str:
    match request:
        case StartRound():
            return "start"
        case Step():
            return f"step {request.step}"
        case Outputs():
            return f"outputs of step {request.step}"
        case EndRound():
            return "end"
        case Evaluate():
            return "evaluate"
