"""The trainer's side of the network, without HTTP: waiting, around the rules of boxes.py."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from edge_sdk.training.protocol.http import Join, ReplyOutcome
from edge_sdk.training.protocol.messages import Reply, Request, Update
from server.training.fleet.box import Message, Missed
from server.training.fleet.boxes import Boxes

logger = logging.getLogger(__name__)

# An idle device polls all the time, so one that does not fetch its message is away.
FETCH_S: Final = 5.0
# A device sends four heartbeats in this time; a Pi that swaps misses some of them.
SILENCE_S: Final = 15.0


class Mailbox:
    """The boxes of all devices, a transport of rounds; every call is safe from any thread.

    Args:
        delivered: (device, round) of the updates that count already, after a restart.
        late: updates of past rounds that were kept before it.
        keep: called with each update that is kept for a later round, before the device is told.
        lockstep: whether the devices' rounds begin together; else each may be at another one.
        fetch_s: seconds that a device may leave its message before it counts as away.
        silence_s: seconds that one may be silent altogether, whatever it was asked.
    """

    def __init__(
        self,
        delivered: Iterable[tuple[str, int]] = (),
        *,
        late: Mapping[str, Update] | None = None,
        keep: Callable[[str, Update], None] | None = None,
        lockstep: bool = True,
        fetch_s: float = FETCH_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._boxes = Boxes(
            delivered, late or {}, lockstep=lockstep, fetch_s=fetch_s, silence_s=silence_s
        )
        self._changed = threading.Condition()
        self._keep_update = keep
        self._listeners: defaultdict[str, list[Callable[[], object]]] = defaultdict(list)
        self._session = secrets.token_hex(4)
        self._issued = 0
        self._ended = False

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
            for device, request in requests.items():
                self._issued += 1
                message = Message(f"{self._session}-{self._issued}", request)
                if self._boxes.put(device, message, now):
                    self._wake(device)
            while True:
                now = time.monotonic()
                awaited = self._boxes.awaited(requests, now)
                if not awaited or now >= end:
                    break
                self._changed.wait(min(end, self._boxes.next_change(awaited)) - now)
            return self._boxes.close(requests, deadline_s, now)

    def wait_for_devices(self, count: int, timeout_s: float) -> list[str]:
        """Names of the devices that are there, as soon as there are `count`, or time is over.

        A device that missed a deadline or is silent is not there.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._present()) >= count, timeout_s)
            return self._present()

    def samples(self) -> dict[str, int]:
        """Number of samples that each joined device reported."""
        with self._changed:
            return self._boxes.samples()

    def take_late(self) -> dict[str, Update]:
        """Updates of past rounds that came since the last call, one a device, by name."""
        with self._changed:
            return self._boxes.take_late()

    def put_back_late(self, late: Mapping[str, Update]) -> None:
        """Keep updates that were taken for a round which did not merge them, for the next one."""
        with self._changed:
            self._boxes.put_back_late(late)

    def kept(self) -> set[tuple[str, int]]:
        """(device, round) of the updates that are kept, or about to be, and not taken yet."""
        with self._changed:
            return self._boxes.kept()

    def take_counts(self) -> dict[str, int]:
        """Numbers of replies that were not taken since the last call, by outcome."""
        with self._changed:
            return self._boxes.take_counts()

    def take_missed(self) -> list[Missed]:
        """Requests without a reply since the last call."""
        with self._changed:
            return self._boxes.take_missed()

    def end_rounds(self) -> None:
        """Stop waiting for anything but scores; wake all other waiters."""
        with self._changed:
            self._boxes.end_rounds()
            self._changed.notify_all()

    def end(self, timeout_s: float) -> None:
        """Tell every device that asks that training is over, and give those alive time to ask."""
        with self._changed:
            self._ended = True
            for device in list(self._listeners):
                self._wake(device)
            self._changed.wait_for(lambda: not self._boxes.alive(time.monotonic()), timeout_s)

    # the devices' side

    def join(self, device: str, join: Join) -> None:
        """A device is there, for the first time or after a restart."""
        with self._changed:
            self._boxes.hear(device, time.monotonic())
            self._boxes.join(device, join)
            self._changed.notify_all()

    def alive(self, device: str) -> None:
        """The device is there, and may be at work."""
        with self._changed:
            self._boxes.beat(device, time.monotonic())

    def knows(self, device: str) -> bool:
        """Whether the device joined this trainer."""
        with self._changed:
            return self._boxes.knows(device)

    def leave(self, device: str) -> None:
        """The device knows that training is over."""
        with self._changed:
            self._boxes.leave(device)
            self._changed.notify_all()

    def fetch(self, device: str, after: str) -> Message | None:
        """The device's message, unless it has it already.

        Args:
            after: id of the last one it dealt with.
        """
        with self._changed:
            self._hear(device)
            return self._boxes.fetch(device, after)

    @contextmanager
    def listening(self, device: str, wake: Callable[[], object]) -> Iterator[None]:
        """Call `wake`, from any thread, when there may be something to fetch."""
        with self._changed:
            self._listeners[device].append(wake)
        try:
            yield
        finally:
            with self._changed:
                self._listeners[device].remove(wake)

    def reply(self, device: str, identifier: str, reply: Reply) -> ReplyOutcome:
        """Take a device's reply to the message of that id; "" for an update that was not asked for.

        Raises: what `keep` raises; then the update may come again.
        """
        with self._changed:
            # a second copy is not answered before the first one is on the disk
            self._changed.wait_for(lambda: not self._boxes.is_being_kept(device))
            self._hear(device)
            outcome = self._boxes.take(device, identifier, reply)
        if outcome is ReplyOutcome.KEPT and isinstance(reply, Update):
            outcome = self._keep(device, reply)
        with self._changed:
            self._boxes.count(outcome)
            self._changed.notify_all()
        if outcome is not ReplyOutcome.TAKEN:
            logger.info("device=%s round=%d reply %s", device, reply.round, outcome)
        return outcome

    def decline(self, device: str, identifier: str, reason: str) -> None:
        """The device cannot do what the message asks; stop waiting for it."""
        with self._changed:
            self._hear(device)
            self._boxes.decline(device, identifier, reason)
            self._changed.notify_all()

    def withdraw(self, device: str, reason: str) -> None:
        """The device takes no part in this training; stop waiting for it."""
        with self._changed:
            self._boxes.withdraw(device, reason)
            self._changed.notify_all()

    def _keep(self, device: str, update: Update) -> ReplyOutcome:
        """Keep a reserved update; the lock is not held, so that nothing waits for the disk."""
        try:
            if self._keep_update is not None:
                self._keep_update(device, update)
        except BaseException:
            with self._changed:
                self._boxes.release(device)
                self._changed.notify_all()
            raise
        with self._changed:
            return self._boxes.place(device, update)

    # under the lock

    def _present(self) -> list[str]:
        return self._boxes.present(time.monotonic())

    def _hear(self, device: str) -> None:
        if self._boxes.hear(device, time.monotonic()):
            self._changed.notify_all()

    def _wake(self, device: str) -> None:
        for wake in self._listeners[device]:
            wake()
