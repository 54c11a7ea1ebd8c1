"""A device in training: fetch, let the client work, hand in, and go on alone when nobody answers.

The timer is the device's own. When no message comes within `no_reply_s` of features that were sent,
the client finishes the round by its exit head (SuperSFL, Alg. 3), and the update is handed in when
the trainer is back, which decides whether it still counts.

Differs: SuperSFL gives the server 5 s for a gradient. Here the server waits for all of a step's
features, so it says at hello how long: its own step deadline and 5 s.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from edge_sdk.errors import LinkError, SplitedgeError
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.device.heartbeat import Heartbeat
from edge_sdk.training.device.trainer_client import (
    ANSWER_S,
    NotThereError,
    RefusedReplyError,
    TrainingEndedError,
    Welcome,
)
from edge_sdk.training.device.warmup import warm_up
from edge_sdk.training.device.work_meter import Spent
from edge_sdk.training.protocol.messages import (
    Features,
    NoReply,
    OutputGradient,
    Reply,
    Request,
    Scores,
    Update,
    Weights,
)
from profiles.energy import EnergyMeter

logger = logging.getLogger(__name__)

POLL_S: Final = 20.0
RETRY_FIRST_S: Final = 0.1
RETRY_LAST_S: Final = 2.0


class Link(Protocol):
    """What the driver asks of a `TrainerLink`."""

    def hello(self, samples: int, input_shape: tuple[int, ...]) -> Welcome:
        """Say that this device is there."""

    def alive(self) -> None:
        """Say so again; called in a thread of its own."""

    def fetch(self, after: str, wait_s: float) -> tuple[str, Request] | None:
        """The next message and its id."""

    def reply(self, identifier: str, reply: Reply, timeout_s: float = ANSWER_S) -> str:
        """Hand over a reply."""

    def decline(self, identifier: str, reason: str) -> None:
        """Say that a message cannot be done."""


@dataclass(slots=True)
class Tally:
    """What a device did: updates made, and those made alone."""

    updates: int = 0
    alone: int = 0


class Driver:
    """Runs one client against one trainer, in one thread; a second one gives signs of life.

    Args:
        keep: called with the client's personal weights after each round.
        welcomed: called with each welcome, before the first message; may load what was kept, and
            gives the update that an earlier process made and did not hand in.
        meter: tells what the work costs; None for one of this machine.
        owe: called with an update that was made alone, and with None once it is handed in or
            nobody wants it any more.
    """

    def __init__(
        self,
        client: TrainingClient,
        link: Link,
        *,
        keep: Callable[[Weights], None] | None = None,
        welcomed: Callable[[Welcome], Update | None] | None = None,
        owe: Callable[[Update | None], None] | None = None,
        meter: EnergyMeter | None = None,
    ) -> None:
        self._client = client
        self._link = link
        self._keep = keep
        self._welcomed = welcomed
        self._owe = owe
        self._meter = EnergyMeter() if meter is None else meter
        self._spent = Spent(self._meter)
        self._heartbeat = Heartbeat(link.alive)
        self._stopping = threading.Event()
        self._no_reply_s = 0.0
        self._there = False
        self._last = ""
        self._outbox: tuple[str, Reply] | None = None
        self._waiting: tuple[int, float] | None = None  # round of sent features, since when
        self._failures = 0
        self.tally = Tally()

    def run(self) -> None:
        """Train until the trainer says that it is over, or `stop`.

        Raises: RefusedReplyError if the trainer does not take this device or its data.
        """
        warm_up()
        with self._heartbeat, self._meter:
            self._run()

    def stop(self) -> None:
        """Have `run` return; from any thread."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
                self._failures = 0
            except TrainingEndedError:
                self._settle()
                return
            except NotThereError:
                self._there = False
            except LinkError as err:
                logger.debug("client=%s %s", self._client.name, err)
                self._pause()
            if self._silent_s() <= 0:
                self._go_on_alone()

    def _turn(self) -> None:
        if not self._there:
            self._say_hello()
        if self._outbox is not None:
            self._hand_in(*self._outbox)
        found = self._link.fetch(self._last, max(0.0, min(POLL_S, self._silent_s())))
        if found is not None:
            self._waiting = None
            self._last = found[0]
            self._answer(*found)

    def _say_hello(self) -> None:
        client = self._client
        welcome = self._link.hello(client.samples, client.x.shape[1:])
        self._no_reply_s = welcome.no_reply_s
        self._heartbeat.pace(welcome.alive_s)
        owed = None if self._welcomed is None else self._welcomed(welcome)
        if owed is not None:
            self._outbox = "", owed
        self._there = True

    def _answer(self, identifier: str, message: Request) -> None:
        try:
            reply = self._work(message)
        except SplitedgeError as err:
            logger.warning("%s", err)
            self._link.decline(identifier, str(err))
            return
        self._outbox = identifier, reply
        if isinstance(reply, Features | OutputGradient):
            self._waiting = message.round, time.monotonic()
        self._made(reply)
        self._hand_in(identifier, reply)

    def _hand_in(self, identifier: str, reply: Reply) -> None:
        try:
            # a silent trainer must not hold the device longer than the silence it is allowed
            outcome = self._link.reply(identifier, reply, min(ANSWER_S, self._silent_s() + 0.1))
        except RefusedReplyError as err:
            logger.warning("client=%s round=%d %s", self._client.name, reply.round, err)
        else:
            logger.debug("client=%s round=%d %s", self._client.name, reply.round, outcome)
        self._outbox = None
        if not identifier:
            self._settle()

    def _settle(self) -> None:
        """Nothing is owed any more."""
        if self._owe is not None:
            self._owe(None)

    def _silent_s(self) -> float:
        """How much longer the trainer may be silent."""
        if self._waiting is None:
            return ANSWER_S
        return self._waiting[1] + self._no_reply_s - time.monotonic()

    def _go_on_alone(self) -> None:
        assert self._waiting is not None
        number, self._waiting, self._outbox = self._waiting[0], None, None
        logger.warning("client=%s round=%d no reply: going on alone", self._client.name, number)
        try:
            update = self._work(NoReply(number))
        except SplitedgeError as err:
            logger.warning("%s", err)
            return
        self.tally.alone += 1
        if self._owe is not None and isinstance(update, Update):
            self._owe(update)
        self._made(update)
        self._outbox = "", update

    def _work(self, message: Request | NoReply) -> Reply:
        """What the client makes of a message; a score says what it all has cost."""
        with self._spent.working():
            reply = self._client.handle(message)
        if not isinstance(reply, Scores):
            return reply
        spent = self._spent
        return replace(
            reply,
            seconds=spent.seconds,
            cpu_s=spent.cpu_s,
            energy_j=spent.joules,
            energy_source=spent.source,
        )

    def _made(self, reply: Reply) -> None:
        if isinstance(reply, Update):
            self.tally.updates += 1
            if self._keep is not None:
                self._keep(self._client.personal)

    def _pause(self) -> None:
        bound = min(RETRY_LAST_S, RETRY_FIRST_S * 2**self._failures)
        self._failures = min(self._failures + 1, 16)
        wait_s = random.uniform(bound / 2, bound)  # noqa: S311 - spreads retries, keeps no secret
        self._stopping.wait(max(0.0, min(wait_s, self._silent_s())))
