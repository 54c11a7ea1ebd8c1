"""Packs: offloads that are ready together cross the wire as the rows of one query.

A message costs the device, the broker and the server much more than a row in it. A row leaves at
once while no pack waits for its reply. Otherwise rows gather. They leave together when the reply
comes, when a pack is full, or after HOLD_S.

A pack without a reply is sent once more when half of its time is gone.

Every row has its own deadline and its own outcome. If the server refuses a pack because of what is
in it, or fails at it, each row is sent alone: one bad row fails alone, and a server of before packs
answers all the same.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from edge_sdk.offload.pending import CLOSED, NoReply, Outcome, Pending, Target
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import Problem, Reply, new_id
from edge_sdk.wire.rows import alike, stack

ROWS_MOST: Final = 16
# Packs under way at which rows gather. With two, packs had five rows in place of nine, and a query
# took 15 to 25 % more of the processors (digits, int8, embedded broker).
UNDER_WAY_MOST: Final = 1
HOLD_S: Final = 0.005
# One pack is no longer than this, so that a slow link does not hold up its first row for long.
PACK_BYTES: Final = 65_536
# of a message, for its header
HEADER_BYTES: Final = 1_024
# Deadlines in a pack differ by no more: the server is told the earliest.
DEADLINES_APART_S: Final = 0.05
# After a pack that had to be sent row by row, so long every row is sent alone.
ALONE_S: Final = 60.0
# Problems that may lie in one row, or in the pack's form.
OF_CONTENT: Final = frozenset({Problem.MALFORMED, Problem.BAD_REQUEST, Problem.FAILED})


@dataclass(frozen=True, slots=True)
class Row:
    """One offload, ready to be sent."""

    pending: Pending
    target: Target
    tensor: Tensor

    def fits(self, other: Row) -> bool:
        """Whether both can be rows of one pack."""
        apart_s = abs(self.pending.deadline - other.pending.deadline)
        return (
            apart_s <= DEADLINES_APART_S
            and self.target == other.target
            and alike(self.tensor, other.tensor)
        )


class Pack(Pending):
    """A query of several rows, under way.

    It has an id of its own, because each row may be sent again alone. A single row is sent as if it
    were in no pack, and keeps its id.

    Args:
        rows: at least one; all fit each other.
        ended: called with the pack, with its outcome, when it has one.
    """

    __slots__ = ("_ended", "rows", "waiting")

    def __init__(self, rows: Sequence[Row], ended: Callable[[Pack, Outcome], None]) -> None:
        identifier = rows[0].pending.id if len(rows) == 1 else new_id()
        super().__init__(identifier, min(row.pending.deadline for row in rows))
        self.rows = rows
        self.waiting = len(rows)  # that nobody has given up
        self._ended = ended

    def complete(self, outcome: Outcome) -> bool:
        """Give each row its part of the outcome, once."""
        first = super().complete(outcome)
        if first:
            self._ended(self, outcome)
        return first

    def count_sent(self, size_bytes: int) -> None:
        """Count a share of the bytes for each row."""
        for row, share in zip(self.rows, _shares(size_bytes, len(self.rows)), strict=True):
            row.pending.count_sent(share)

    def count_unsent(self, size_bytes: int) -> None:
        """Take back the count of a message: the link did not take it."""
        for row, share in zip(self.rows, _shares(size_bytes, len(self.rows)), strict=True):
            row.pending.count_unsent(share)

    def count_received(self, size_bytes: int) -> None:
        """Count a share of the bytes for each row."""
        for row, share in zip(self.rows, _shares(size_bytes, len(self.rows)), strict=True):
            row.pending.count_received(share)

    def reply_of(self, index: int, reply: Reply) -> Reply:
        """The reply of one row: its part of every tensor, or the problem of all."""
        identifier = self.rows[index].pending.id
        many = len(self.rows)
        tensors = {
            # a tensor of another length is left whole: the row's reader says what is wrong
            name: array[index : index + 1] if array.shape[:1] == (many,) else array
            for name, array in reply.tensors.items()
        }
        return Reply(identifier, tensors, reply.problem, reply.detail, reply.retry_after_s)


class Packs:
    """Gathers rows, and sends them together; safe from any thread.

    Args:
        send: sends a tensor and waits for no reply; it completes a query that it cannot send.
        dropped: told of a pack of which no row waits any more.
        send_again: sends a pack once more, if it still has no reply and may be.
        message_bytes: most bytes of a message.
    """

    def __init__(
        self,
        send: Callable[[Pending, Target, Tensor], None],
        dropped: Callable[[Pack], None],
        send_again: Callable[[Pack], None],
        message_bytes: int,
    ) -> None:
        self._send = send
        self._dropped = dropped
        self._send_again = send_again
        self.room_bytes = min(PACK_BYTES, message_bytes - HEADER_BYTES)
        self._state = threading.Condition()
        self._rows: list[Row] = []
        self._bytes = 0
        self._due = math.inf  # time at which the rows that gather leave
        self._wakes_at = math.inf  # of the thread
        # by each row that waits, not by its id: a late answer is asked for by the same id
        self._packs: dict[Pending, Pack] = {}
        self._under_way: set[Pack] = set()
        self._alone_until = 0.0
        self._closed = False
        self._thread: threading.Thread | None = None

    def takes(self, tensor: Tensor) -> bool:
        """Whether the tensor is small enough to leave together with others."""
        alone = time.monotonic() < self._alone_until
        return not alone and len(tensor.array) == 1 and 2 * tensor.array.nbytes <= self.room_bytes

    def add(self, row: Row) -> None:
        """Send a row, now or soon."""
        leaving: list[Pack] = []
        with self._state:
            if self._closed:
                row.pending.complete(NoReply(CLOSED))
                return
            size = row.tensor.array.nbytes
            if self._rows and (self._bytes + size > self.room_bytes or not row.fits(self._rows[0])):
                leaving.append(self._take())
            self._rows.append(row)
            self._bytes += size
            if len(self._under_way) < UNDER_WAY_MOST or len(self._rows) >= ROWS_MOST:
                leaving.append(self._take())
            elif len(self._rows) == 1:
                self._hold()
        self._leave(leaving)

    def flush(self) -> None:
        """Send the rows that gathered: nothing more is ready at the moment."""
        with self._state:
            leaving = [self._take()] if self._rows else []
        self._leave(leaving)

    def forget(self, pending: Pending) -> None:
        """Give up a row, which may be in no pack, or not sent yet."""
        with self._state:
            pack = self._packs.pop(pending, None)
            if pack is None:
                if any(row.pending is pending for row in self._rows):
                    self._rows = [row for row in self._rows if row.pending is not pending]
                    self._bytes = sum(row.tensor.array.nbytes for row in self._rows)
                return
            pack.waiting -= 1
            over = pack.waiting == 0
        if over:
            self._dropped(pack)
            self._next(pack)

    def close(self) -> None:
        """Send nothing more, and end the thread."""
        with self._state:
            self._closed = True
            left, self._rows = self._rows, []
            self._state.notify_all()
        for row in left:
            row.pending.complete(NoReply(CLOSED))
        if self._thread is not None:
            self._thread.join()

    def _take(self) -> Pack:
        """The rows that gathered, as a pack that is under way from now on."""
        pack = Pack(self._rows, self._ended)
        self._rows, self._bytes, self._due = [], 0, math.inf
        self._under_way.add(pack)
        self._packs.update((row.pending, pack) for row in pack.rows)
        return pack

    def _leave(self, packs: Sequence[Pack]) -> None:
        # without the lock: the link has locks of its own
        for pack in packs:
            self._send(pack, pack.rows[0].target, stack([row.tensor for row in pack.rows]))
            if not pack.waiting:  # given up just now, before it counted as sent
                self._dropped(pack)
            again = pack.again
            if again is not None:
                with self._state:
                    self._wake_at(again.at)

    def _ended(self, pack: Pack, outcome: Outcome) -> None:
        if isinstance(outcome, NoReply):
            for row in pack.rows:
                row.pending.complete(outcome)
        elif outcome.problem in OF_CONTENT and len(pack.rows) > 1:
            self._alone_until = time.monotonic() + ALONE_S
            for row in pack.rows:
                if not row.pending.done:
                    self._send(row.pending, row.target, row.tensor)
        else:
            for index, row in enumerate(pack.rows):
                row.pending.complete(pack.reply_of(index, outcome))
        self._next(pack)

    def _next(self, pack: Pack) -> None:
        """Send what gathered while a pack was under way, which is not any more."""
        leaving: list[Pack] = []
        with self._state:
            self._under_way.discard(pack)
            if self._rows and len(self._under_way) < UNDER_WAY_MOST:
                leaving.append(self._take())
        self._leave(leaving)

    def _hold(self) -> None:
        """Rows that gather are sent after HOLD_S at the latest."""
        self._due = time.monotonic() + HOLD_S
        self._wake_at(self._due)

    def _wake_at(self, at: float) -> None:
        """Let the thread look at that time; the lock is held."""
        if self._closed or at >= self._wakes_at:
            return
        self._wakes_at = at
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="splitedge-packs", daemon=True)
            self._thread.start()
        self._state.notify_all()

    def _look(self, now: float) -> tuple[list[Pack], list[Pack]]:
        """The packs that leave now, and those to send once more; sets when to look again."""
        leaving = [self._take()] if self._rows and self._due <= now else []
        if not self._rows:
            self._due = math.inf
        # read once: a reply sets it to None
        found = [(pack, pack.again) for pack in self._under_way]
        times = {pack: again.at for pack, again in found if again is not None}
        lost = [pack for pack, at in times.items() if at <= now]
        self._wakes_at = min([self._due, *(at for at in times.values() if at > now)])
        return leaving, lost

    def _work(self) -> None:
        while True:
            with self._state:
                while not self._closed and (left_s := self._wakes_at - time.monotonic()) > 0:
                    self._state.wait(None if left_s == math.inf else left_s)
                if self._closed:
                    return
                leaving, lost = self._look(time.monotonic())
            self._leave(leaving)
            for pack in lost:
                self._send_again(pack)


def _shares(size_bytes: int, many: int) -> list[int]:
    """Whole numbers that add up to `size_bytes`, as equal as can be."""
    each, rest = divmod(size_bytes, many)
    return [each + (index < rest) for index in range(many)]
