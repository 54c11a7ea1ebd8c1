"""The rules of all boxes: what counts once, which device is awaited, what is late.

Nothing waits or locks here. Time comes in as an argument, so tests need no threads.

- A device has a box with at most one message. Messages have ids; of the replies to one id the first
  complete one counts. Replies that come later, twice or unasked are counted and dropped.
- A device that missed a deadline is not waited for until it asks or answers again. Nor is one that
  is silent: a device that is well sends signs of life, whatever it works at.
- One update of a device and round counts, whether it was asked for or comes unasked.
- An update of a round that is over is late: the next round may still merge it. In lockstep a round
  is over for all devices when any of them is asked for a later one; else each has its own rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from edge_sdk.training.protocol.http import Join, ReplyOutcome
from edge_sdk.training.protocol.messages import Evaluate, Ready, Reply, Update
from server.training.fleet.box import (
    FINISHED_ALONE,
    RESTARTED,
    Box,
    BoxState,
    Message,
    Missed,
)

MORE_SAMPLES: Final = "it reported more samples than when it joined"
ROUNDS_OVER: Final = "the rounds are over"


class Boxes:
    """The rules of `Mailbox`; one thread at a time.

    Args:
        delivered: (device, round) of the updates that count already, after a restart.
        late: updates of past rounds that were kept before it.
        lockstep: whether the devices' rounds begin together; else each may be at another one.
        fetch_s: seconds that a device may leave its message before it counts as away.
        silence_s: seconds that one may be silent altogether, whatever it was asked.
    """

    def __init__(
        self,
        delivered: Iterable[tuple[str, int]],
        late: Mapping[str, Update],
        *,
        lockstep: bool,
        fetch_s: float,
        silence_s: float,
    ) -> None:
        self._boxes: dict[str, Box] = {}
        self._joined: dict[str, Join] = {}
        self._late = dict(late)
        self._delivered = set(delivered) | {(name, u.round) for name, u in late.items()}
        self._being_kept: dict[str, int] = {}  # round of the update that is written, by device
        self._lockstep = lockstep
        self._missed: list[Missed] = []
        self._fetch_s = fetch_s
        self._silence_s = silence_s
        self._round = max((number for _, number in self._delivered), default=0)
        self._rounds_over = False
        self._counts: Counter[ReplyOutcome] = Counter()

    # the trainer's side

    def put(self, device: str, message: Message, now: float) -> bool:
        """Put a message into a device's box; True if there is something to fetch."""
        box = self._box(device)
        self._begin_round(device, box, message.request.round)
        box.put(message, now)
        return box.state is BoxState.WAITING

    def awaited(self, devices: Iterable[str], now: float) -> list[str]:
        """Devices from which a reply may still come."""
        return [device for device in devices if self._is_awaited(self._box(device), now)]

    def next_change(self, devices: Iterable[str]) -> float:
        """When the first of the devices is no longer awaited, if nothing is heard till then."""
        moments = []
        for box in map(self._box, devices):
            moments.append(box.heard_at + self._silence_s)
            if box.state is BoxState.WAITING:
                moments.append(box.put_at + self._fetch_s)
        return min(moments)

    def close(self, devices: Iterable[str], deadline_s: float, now: float) -> dict[str, Reply]:
        """Empty the boxes: the replies by device; what was missed is remembered."""
        replies: dict[str, Reply] = {}
        for device in devices:
            box = self._box(device)
            found = box.close(device, deadline_s, away=self._is_away(box, now))
            if isinstance(found, Missed):
                self._missed.append(found)
            elif found is not None:
                replies[device] = found
        return replies

    def end_rounds(self) -> None:
        """Await nothing but scores from now on."""
        self._rounds_over = True

    def present(self, now: float) -> list[str]:
        """Devices that joined, missed no deadline and are not silent, by name."""
        boxes = {name: self._box(name) for name in self._joined}
        return sorted(name for name, box in boxes.items() if not self._is_away(box, now))

    def alive(self, now: float) -> list[str]:
        """Devices that joined and are not silent."""
        return [name for name in self._joined if not self._is_silent(self._box(name), now)]

    def samples(self) -> dict[str, int]:
        """Number of samples that each joined device reported."""
        return {name: join.samples for name, join in self._joined.items()}

    def take_late(self) -> dict[str, Update]:
        """Updates of past rounds that came since the last call, one a device, by name."""
        late, self._late = dict(sorted(self._late.items())), {}
        return late

    def put_back_late(self, late: Mapping[str, Update]) -> None:
        """Keep updates that were taken and did not count; a later one of a device comes first."""
        self._late = {**late, **self._late}

    def kept(self) -> set[tuple[str, int]]:
        """(device, round) of the updates that are kept, or about to be, and not taken yet."""
        early = {
            name: box.early_update
            for name, box in self._boxes.items()
            if box.early_update is not None
        }
        both = [*self._late.items(), *early.items()]
        return {(name, update.round) for name, update in both} | set(self._being_kept.items())

    def take_counts(self) -> dict[str, int]:
        """Numbers of replies that were not taken since the last call, by outcome."""
        counts = {str(k): n for k, n in self._counts.items() if k != ReplyOutcome.TAKEN}
        self._counts.clear()
        return counts

    def take_missed(self) -> list[Missed]:
        """Requests without a reply since the last call."""
        missed, self._missed = self._missed, []
        return missed

    # the devices' side

    def join(self, device: str, join: Join) -> None:
        """A device is there, for the first time or after a restart."""
        box = self._box(device)
        if box.state is BoxState.FETCHED:
            box.decline(RESTARTED)
        self._joined[device] = join

    def leave(self, device: str) -> None:
        """The device is not there any more."""
        self._joined.pop(device, None)

    def knows(self, device: str) -> bool:
        """Whether the device joined."""
        return device in self._joined

    def hear(self, device: str, now: float) -> bool:
        """The device asks or answers; True if it had missed a deadline, and counts again."""
        return self._box(device).hear(now)

    def beat(self, device: str, now: float) -> None:
        """The device is alive, and may be at work on what it missed."""
        if device in self._joined:
            self._box(device).heard_at = now

    def fetch(self, device: str, after: str) -> Message | None:
        """The device's message, unless it is the one that it dealt with last."""
        return self._box(device).fetch(after)

    def decline(self, device: str, identifier: str, reason: str) -> None:
        """The device cannot do what that message asks."""
        box = self._box(device)
        if box.open and box.message is not None and box.message.id == identifier:
            box.decline(reason)

    def withdraw(self, device: str, reason: str) -> None:
        """The device takes no part in this training, whatever it was asked."""
        box = self._box(device)
        if box.open:
            box.decline(reason)
        self.leave(device)

    def take(self, device: str, identifier: str, reply: Reply) -> ReplyOutcome:
        """Take a reply to the message of that id; "" for an update that was not asked for.

        Returns: KEPT where the update is to be kept: `place` or `release` it then.
        """
        box = self._box(device)
        inflated = self._is_inflated(device, reply)
        if box.open and box.message is not None:
            asked = box.message.id == identifier
            if asked and inflated:
                box.decline(MORE_SAMPLES)
            fits = box.answers(reply) and not inflated
            if asked and not fits:
                return ReplyOutcome.UNEXPECTED
            # an update finished alone comes unasked, perhaps just when it is asked for
            if fits and (asked or isinstance(reply, Update)):
                box.answer(reply)
                if isinstance(reply, Update):
                    self._delivered.add((device, reply.round))
                return ReplyOutcome.TAKEN
        if box.answered.get(identifier, False):
            return ReplyOutcome.DUPLICATE
        if isinstance(reply, Update):
            return ReplyOutcome.UNEXPECTED if inflated else self._reserve(device, box, reply)
        return ReplyOutcome.LATE if identifier in box.answered else ReplyOutcome.UNEXPECTED

    def is_being_kept(self, device: str) -> bool:
        """Whether an update of the device is reserved, and neither placed nor released yet."""
        return device in self._being_kept

    def place(self, device: str, update: Update) -> ReplyOutcome:
        """Put a reserved update, kept by now, where it belongs by now."""
        del self._being_kept[device]
        box = self._box(device)
        if box.answers(update):  # asked for while it was written
            box.answer(update)
            return ReplyOutcome.TAKEN
        under_way = self._round if self._lockstep else box.round
        if update.round == under_way and box.ended_round < under_way:
            box.early_update = update
            if box.open:
                box.decline(FINISHED_ALONE)
        else:
            self._late[device] = update
        return ReplyOutcome.KEPT

    def release(self, device: str) -> None:
        """Give up a reserved update that could not be kept; it may come again."""
        self._delivered.discard((device, self._being_kept.pop(device)))

    def count(self, outcome: ReplyOutcome) -> None:
        """Count a reply by its outcome."""
        self._counts[outcome] += 1

    def _box(self, device: str) -> Box:
        return self._boxes.setdefault(device, Box())

    def _is_awaited(self, box: Box, now: float) -> bool:
        if not box.pending or box.message is None:
            return False
        if self._rounds_over and not isinstance(box.message.request, Evaluate):
            box.decline(ROUNDS_OVER)
            return False
        if box.state is BoxState.WAITING and now - box.put_at >= self._fetch_s:
            box.missed_deadline = True
        return not self._is_away(box, now)

    def _is_away(self, box: Box, now: float) -> bool:
        return box.missed_deadline or self._is_silent(box, now)

    def _is_silent(self, box: Box, now: float) -> bool:
        return now - box.heard_at >= self._silence_s

    def _begin_round(self, device: str, box: Box, number: int) -> None:
        """Count updates of rounds before that one as late."""
        over: dict[str, Box] = {}
        if self._lockstep and number > self._round:
            over = self._boxes
        elif not self._lockstep and number > box.round:
            over = {device: box}
        for name, other in over.items():
            if other.early_update is not None:
                self._late[name], other.early_update = other.early_update, None
        self._round = max(self._round, number)
        box.round = number

    def _is_inflated(self, device: str, reply: Reply) -> bool:
        """Whether the reply claims more samples than the device joined with."""
        join = self._joined.get(device)
        if join is None or not isinstance(reply, Ready | Update):
            return False
        return reply.samples > join.samples

    def _reserve(self, device: str, box: Box, update: Update) -> ReplyOutcome:
        if not 0 < update.round <= self._round:
            return ReplyOutcome.UNEXPECTED
        if (device, update.round) in self._delivered or box.early_update is not None:
            return ReplyOutcome.DUPLICATE
        self._delivered.add((device, update.round))
        self._being_kept[device] = update.round
        return ReplyOutcome.KEPT
