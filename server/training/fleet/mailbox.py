"""What every device is asked and what it answers: the trainer's side of the network, without HTTP.

A device has a box with at most one message. Messages have ids; of the replies to one id the first
complete one counts, and what comes later, twice or unasked is counted and dropped. A device that
missed a deadline is behind until it asks or answers again: nobody waits for it meanwhile. Nor for
one that is silent: whatever it works at, a device that is well says all the time that it is there.

An update of a round that is over is kept apart: the next round may still merge it. Where rounds
begin together, that of all is over when anybody is asked for a later one; else each has its own.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
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

logger = logging.getLogger(__name__)

# An idle device polls all the time, so one that has not come for its message is not there.
FETCH_S: Final = 5.0
# A device beats four times in this; a Pi that swaps misses some of them.
SILENCE_S: Final = 15.0
# Enough to tell a second reply from a late one; a device has one message at a time.
IDS_REMEMBERED: Final = 64
MORE_SAMPLES: Final = "it says it has more samples than when it came"
ALONE: Final = "it finished the round without the server"
OVER: Final = "the rounds are over"


class Outcome(StrEnum):
    """What became of a reply."""

    TAKEN = "taken"
    KEPT = "kept"  # an update that nobody waits for yet
    LATE = "late"
    DUPLICATE = "duplicate"
    FOREIGN = "foreign"  # to no message of ours, or of another kind, round or step


class Message:
    """A request under way to a device."""

    def __init__(self, identifier: str, request: Request) -> None:
        self.id = identifier
        self.request = request
        self._raw = b""

    def raw(self) -> bytes:
        """As it travels; made when first fetched."""
        self._raw = self._raw or to_bytes(self.request)
        return self._raw


@dataclass(frozen=True, slots=True)
class Hello:
    """A device that is there: samples it has, their shape, and how many classes the recipe has."""

    samples: int
    input_shape: tuple[int, ...]
    classes: int


@dataclass(frozen=True, slots=True)
class Missed:
    """A message that got no reply in time.

    what: `start`, `end`, `step N`, `outputs of step N` or `evaluate`.
    """

    device: str
    what: str
    why: str


@dataclass(slots=True)
class _Box:
    message: Message | None = None
    put_at: float = 0.0
    fetched: bool = False
    reply: Reply | None = None
    declined: str = ""
    behind: bool = False  # it missed a deadline, and has not come for anything since
    heard_at: float = 0.0
    held: Update | None = None  # of the round under way, finished without the server
    round: int = 0  # the last one it was asked for
    ended: int = 0  # the last round whose end it was asked for
    answered: OrderedDict[str, bool] = field(default_factory=OrderedDict)  # by id
    listeners: list[Callable[[], object]] = field(default_factory=list)


class Mailbox:
    """The boxes of all devices; every call is safe from any thread.

    Args:
        delivered: (device, round) of the updates that count already, after a restart.
        late: updates of past rounds that were kept before it.
        keep: called with each update that is kept for a later round, before the device is told.
        together: whether the devices' rounds begin together; else each may be at another one.
        fetch_s: how long a device may leave its message before it is taken for away.
        silence_s: how long one may be silent altogether, whatever it was asked.
    """

    def __init__(
        self,
        delivered: Iterable[tuple[str, int]] = (),
        *,
        late: Mapping[str, Update] | None = None,
        keep: Callable[[str, Update], None] | None = None,
        together: bool = True,
        fetch_s: float = FETCH_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._changed = threading.Condition()
        self._boxes: dict[str, _Box] = {}
        self._there: dict[str, Hello] = {}
        self._delivered = set(delivered)
        self._late = dict(late or {})
        self._delivered |= {(name, update.round) for name, update in self._late.items()}
        self._keep_update = keep
        self._keeping: dict[str, int] = {}  # round of the update that is being kept, by device
        self._together = together
        self._missed: list[Missed] = []
        self._fetch_s = fetch_s
        self._silence_s = silence_s
        self._session = secrets.token_hex(4)
        self._issued = 0
        self._round = max((number for _, number in self._delivered), default=0)
        self._rounds_over = False
        self._ended = False
        self._counts: Counter[Outcome] = Counter()

    @property
    def ended(self) -> bool:
        """Whether training is over."""
        return self._ended

    # the trainer's side

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        """Put a request into each box and wait for the replies, `deadline_s` at most.

        Several may wait at a time, each for devices of its own.

        Returns: those that came, in the order of `requests`.
        """
        with self._changed:
            now = time.monotonic()
            end = now + deadline_s
            boxes = {name: self._put(name, request, now) for name, request in requests.items()}
            while True:
                now = time.monotonic()
                waiting = [box for box in boxes.values() if self._awaited(box, now)]
                if not waiting or now >= end:
                    break
                patience = [box.heard_at + self._silence_s for box in waiting]
                patience += [box.put_at + self._fetch_s for box in waiting if not box.fetched]
                self._changed.wait(min([end, *patience]) - now)
            for name, box in boxes.items():
                self._close(name, box, deadline_s, now)
            return {name: box.reply for name, box in boxes.items() if box.reply is not None}

    def wait_there(self, count: int, timeout_s: float) -> list[str]:
        """Those that said hello and are neither behind nor silent, by name: as soon as there are
        `count` of them, or the time is over.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._present()) >= count, timeout_s)
            return self._present()

    def samples(self) -> dict[str, int]:
        """How many each device that is there says it has."""
        with self._changed:
            return {name: said.samples for name, said in self._there.items()}

    def take_late(self) -> dict[str, Update]:
        """Updates of past rounds that came since the last call, one a device, by name."""
        with self._changed:
            late, self._late = dict(sorted(self._late.items())), {}
            return late

    def kept(self) -> set[tuple[str, int]]:
        """(device, round) of the updates that are kept, or about to be, and not taken yet."""
        with self._changed:
            held = {name: box.held for name, box in self._boxes.items() if box.held is not None}
            both = [*self._late.items(), *held.items()]
            return {(name, update.round) for name, update in both} | set(self._keeping.items())

    def take_counts(self) -> dict[str, int]:
        """Replies that came late, twice or unasked since the last call, by what they were."""
        with self._changed:
            counts = {str(kind): n for kind, n in self._counts.items() if kind != Outcome.TAKEN}
            self._counts.clear()
            return counts

    def take_missed(self) -> list[Missed]:
        """What went without a reply since the last call."""
        with self._changed:
            missed, self._missed = self._missed, []
            return missed

    def end_rounds(self) -> None:
        """From now on wait for scores alone: whoever waits for anything else waits no longer."""
        with self._changed:
            self._rounds_over = True
            self._changed.notify_all()

    def end(self, timeout_s: float) -> None:
        """Tell everybody who asks that training is over, and give all who are alive time to ask."""
        with self._changed:
            self._ended = True
            for box in self._boxes.values():
                _wake(box)
            self._changed.wait_for(lambda: not self._alive(), timeout_s)

    # the devices' side

    def hello(self, device: str, said: Hello) -> None:
        """A device is there, for the first time or after a restart."""
        with self._changed:
            box = self._heard(device)
            if box.message is not None and box.fetched and box.reply is None:
                box.declined = "it started anew"
            self._there[device] = said
            self._changed.notify_all()

    def alive(self, device: str) -> None:
        """The device is there, and may be at work."""
        with self._changed:
            if device in self._there:
                self._boxes[device].heard_at = time.monotonic()

    def knows(self, device: str) -> bool:
        """Whether the device has said hello to this trainer."""
        with self._changed:
            return device in self._there

    def told_end(self, device: str) -> None:
        """The device knows that training is over."""
        with self._changed:
            self._there.pop(device, None)
            self._changed.notify_all()

    def fetch(self, device: str, after: str) -> Message | None:
        """The device's message, unless it has it already.

        Args:
            after: id of the last one it dealt with.
        """
        with self._changed:
            box = self._heard(device)
            message = box.message
            if message is None or box.reply is not None or box.declined or message.id == after:
                return None
            box.fetched = True
            return message

    @contextmanager
    def listening(self, device: str, wake: Callable[[], object]) -> Iterator[None]:
        """Have `wake` called, from any thread, when there may be something to fetch."""
        with self._changed:
            box = self._boxes.setdefault(device, _Box())
            box.listeners.append(wake)
        try:
            yield
        finally:
            with self._changed:
                box.listeners.remove(wake)

    def reply(self, device: str, identifier: str, reply: Reply) -> Outcome:
        """Take a device's reply to the message of that id; "" for an update nobody asked for.

        Raises: what `keep` raises; then the update may come again.
        """
        with self._changed:
            # of an update that is not kept yet nobody is told that it is there
            self._changed.wait_for(lambda: device not in self._keeping)
            box = self._heard(device)
            outcome = self._take(device, box, identifier, reply)
        if outcome is Outcome.KEPT and isinstance(reply, Update):
            outcome = self._keep(device, box, reply)
        with self._changed:
            self._counts[outcome] += 1
            if outcome is Outcome.TAKEN:
                self._changed.notify_all()
            else:
                logger.info("device=%s round=%d reply %s", device, reply.round, outcome)
            return outcome

    def decline(self, device: str, identifier: str, reason: str) -> None:
        """The device cannot do what the message asks; nobody is to wait for it."""
        with self._changed:
            box = self._heard(device)
            if box.message is not None and box.message.id == identifier and box.reply is None:
                box.declined = reason
                self._changed.notify_all()

    def _keep(self, device: str, box: _Box, update: Update) -> Outcome:
        """Keep a reserved update; nobody waits for the disk, for the lock is not held."""
        try:
            if self._keep_update is not None:
                self._keep_update(device, update)
        except BaseException:
            with self._changed:
                self._delivered.discard((device, self._keeping.pop(device)))
                self._changed.notify_all()
            raise
        with self._changed:
            del self._keeping[device]
            self._changed.notify_all()
            return self._place(device, box, update)

    # under the lock

    def _present(self) -> list[str]:
        now = time.monotonic()
        boxes = {name: self._boxes[name] for name in self._there}
        return sorted(name for name, box in boxes.items() if not self._away(box, now))

    def _alive(self) -> list[str]:
        """Those present, and those behind that are still at work."""
        now = time.monotonic()
        return [name for name in self._there if not self._silent(self._boxes[name], now)]

    def _away(self, box: _Box, now: float) -> bool:
        return box.behind or self._silent(box, now)

    def _silent(self, box: _Box, now: float) -> bool:
        return now - box.heard_at >= self._silence_s

    def _heard(self, device: str) -> _Box:
        box = self._boxes.setdefault(device, _Box())
        box.heard_at = time.monotonic()
        if box.behind:
            box.behind = False
            self._changed.notify_all()
        return box

    def _put(self, device: str, request: Request, now: float) -> _Box:
        box = self._boxes.setdefault(device, _Box())
        self._begin(device, box, request.round)
        self._issued += 1
        box.message = Message(f"{self._session}-{self._issued}", request)
        box.put_at, box.fetched, box.reply, box.declined = now, False, None, ""
        box.answered[box.message.id] = False
        while len(box.answered) > IDS_REMEMBERED:
            box.answered.popitem(last=False)
        if isinstance(request, EndRound):
            box.ended = request.round
        if box.held is not None and isinstance(request, EndRound):
            box.reply, box.held = box.held, None
        elif box.held is not None and not isinstance(request, Evaluate):
            box.declined = ALONE
        else:
            _wake(box)
        return box

    def _begin(self, device: str, box: _Box, number: int) -> None:
        """What was finished alone before that round is late from now on."""
        over: dict[str, _Box] = {}
        if self._together and number > self._round:
            over = self._boxes
        elif not self._together and number > box.round:
            over = {device: box}
        for name, other in over.items():
            if other.held is not None:
                self._late[name], other.held = other.held, None
        self._round = max(self._round, number)
        box.round = number

    def _awaited(self, box: _Box, now: float) -> bool:
        if box.reply is not None or box.declined:
            return False
        if self._rounds_over and not isinstance(box.message and box.message.request, Evaluate):
            box.declined = OVER
            return False
        if not box.fetched and now - box.put_at >= self._fetch_s:
            box.behind = True
        return not self._away(box, now)

    def _close(self, device: str, box: _Box, deadline_s: float, now: float) -> None:
        message, box.message = box.message, None
        if box.reply is None and message is not None:
            silent = "it is away" if self._away(box, now) else f"no reply within {deadline_s:g} s"
            why = box.declined or silent
            self._missed.append(Missed(device, _named(message.request), why))
            box.behind = not box.declined

    def _take(self, device: str, box: _Box, identifier: str, reply: Reply) -> Outcome:
        message = box.message
        inflated = self._inflated(device, reply)
        if message is not None and box.reply is None:
            if inflated and message.id == identifier:
                box.declined = MORE_SAMPLES
                self._changed.notify_all()
            fits = _answers(message.request, reply) and not inflated
            if message.id == identifier and not fits:
                return Outcome.FOREIGN
            # who finished alone hands its update in unasked, perhaps just as it is asked for it
            if fits and (message.id == identifier or isinstance(reply, Update)):
                box.reply, box.declined = reply, ""
                box.answered[message.id] = True
                if isinstance(reply, Update):
                    self._delivered.add((device, reply.round))
                return Outcome.TAKEN
        if box.answered.get(identifier, False):
            return Outcome.DUPLICATE
        if isinstance(reply, Update):
            return Outcome.FOREIGN if inflated else self._reserve(device, box, reply)
        return Outcome.LATE if identifier in box.answered else Outcome.FOREIGN

    def _inflated(self, device: str, reply: Reply) -> bool:
        """Whether it would weigh more than by what it said when it came."""
        said = self._there.get(device)
        if said is None or not isinstance(reply, Ready | Update):
            return False
        return reply.samples > said.samples

    def _reserve(self, device: str, box: _Box, update: Update) -> Outcome:
        """One update a device and round counts, whoever brings it; this one is to be kept."""
        if not 0 < update.round <= self._round:
            return Outcome.FOREIGN
        if (device, update.round) in self._delivered or box.held is not None:
            return Outcome.DUPLICATE
        self._delivered.add((device, update.round))
        self._keeping[device] = update.round
        return Outcome.KEPT

    def _place(self, device: str, box: _Box, update: Update) -> Outcome:
        """Where an update that is kept belongs by now."""
        message = box.message
        if message is not None and box.reply is None and _answers(message.request, update):
            box.reply, box.declined = update, ""  # asked for as it was written
            box.answered[message.id] = True
            return Outcome.TAKEN
        under_way = self._round if self._together else box.round
        if update.round == under_way and box.ended < under_way:
            box.held = update
            box.declined = ALONE
            self._changed.notify_all()
        else:
            self._late[device] = update
        return Outcome.KEPT


class HttpTransport:
    """Devices that poll: the mailbox as the engine sees it."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        """What came in time, in the order of `requests`."""
        return self._mailbox.exchange(requests, deadline_s)


def _answers(request: Request, reply: Reply) -> bool:
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


def _named(request: Request) -> str:
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


def _wake(box: _Box) -> None:
    for wake in box.listeners:
        wake()
