"""A device's session with a trainer: fetch a message, let the client work, hand in its reply.

The device has its own timer. When no message comes within `no_reply_s` of sending features, the
client finishes the round by its exit head (SuperSFL, Alg. 3). The update is handed in when the
trainer is back, which decides whether it still counts.

Differs: SuperSFL gives the server 5 s for a gradient. Here the server waits for all of a step's
features, so its welcome says how long: its own step deadline and 5 s.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol

from edge_sdk.errors import ConfigurationError, LinkError, SplitedgeError
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.device.heartbeat import Heartbeat
from edge_sdk.training.device.trainer_client import (
    ANSWER_S,
    NotJoinedError,
    RefusedReplyError,
    TrainingEndedError,
)
from edge_sdk.training.device.warmup import warm_up
from edge_sdk.training.device.work_meter import WorkMeter
from edge_sdk.training.protocol.http import POLL_S, Welcome
from edge_sdk.training.protocol.messages import (
    Features,
    FinishAlone,
    OutputGradient,
    Reply,
    Request,
    Scores,
    Update,
    Weights,
)
from profiles.energy import EnergyMeter

logger = logging.getLogger(__name__)

RETRY_FIRST_S: Final = 0.1
RETRY_LAST_S: Final = 2.0
# all that a trainer learns of the labels of a device that takes no part
STRANGE_CLASSES: Final = "its data have classes that the training does not have; its log names them"


class Trainer(Protocol):
    """The calls of a `TrainerClient` that a session uses."""

    def join(self, samples: int, input_shape: tuple[int, ...]) -> Welcome:
        """Tell the trainer that this device is there."""

    def alive(self) -> None:
        """Send a sign of life; called in a thread of its own."""

    def fetch(self, after: str, wait_s: float) -> tuple[str, Request] | None:
        """The next message and its id."""

    def reply(self, identifier: str, reply: Reply, timeout_s: float = ANSWER_S) -> str:
        """Hand over a reply."""

    def decline(self, identifier: str, reason: str) -> None:
        """Tell the trainer that a message, or "" the whole training, cannot be done."""


class SessionStore:
    """Store of a device between sessions; this one keeps nothing."""

    def open(self, welcome: Welcome) -> bool:
        """Turn to the welcome's run; True if it is another one than before."""
        del welcome
        return False

    def personal(self) -> Weights:
        """The personal weights that were saved in this run; empty where there are none."""
        return {}

    def save_personal(self, weights: Weights) -> None:
        """Keep the personal weights, in place of those before."""

    def update(self) -> Update | None:
        """The update that was saved in this run and not handed in yet; None where there is none."""

    def save_update(self, update: Update) -> None:
        """Keep an update that the trainer does not have yet, until it is handed in."""

    def drop_update(self) -> None:
        """Forget the update: it is handed in, or training is over."""


@dataclass(slots=True)
class SessionCounts:
    """Counts of a session: updates made, and those made without the server."""

    updates: int = 0
    alone: int = 0


class TrainingSession:
    """Runs one client against one trainer, in one thread; a second one sends signs of life.

    Args:
        store: what is kept on disk; None keeps nothing.
        meter: tells what the work costs; None for a meter of this machine.
        give_up_s: seconds for which the trainer may not be reached; None for any time. A round that
            waits for it is finished alone first.
    """

    def __init__(
        self,
        client: TrainingClient,
        trainer: Trainer,
        *,
        store: SessionStore | None = None,
        meter: EnergyMeter | None = None,
        give_up_s: float | None = None,
    ) -> None:
        self._client = client
        self._trainer = trainer
        self._store = SessionStore() if store is None else store
        self._energy = EnergyMeter() if meter is None else meter
        self._work_meter = WorkMeter(self._energy)
        self._heartbeat = Heartbeat(trainer.alive)
        self._stopping = threading.Event()
        self._no_reply_s = 0.0
        self._joined = False
        self._last_id = ""
        # a reply that is not handed in yet, and the id of its message; "" for an update made alone,
        # or kept from the session before
        self._outbox: tuple[str, Reply] | None = None
        # the round of features that wait for feedback, and since when
        self._waiting: tuple[int, float] | None = None
        self._failures = 0
        self._give_up_s = math.inf if give_up_s is None else give_up_s
        self._lost_at: float | None = None  # since when the trainer is not reached
        self.counts = SessionCounts()

    def run(self) -> None:
        """Train until the trainer says that it is over, or `stop`.

        Raises: RefusedReplyError if the trainer does not take this device or its data;
            ConfigurationError if the training is of a network that this device does not train, or
            does not have the classes of its data; LinkError if the trainer is not reached for
            `give_up_s`; StorageError if what has to be kept cannot be written.
        """
        warm_up()
        with self._heartbeat, self._energy:
            self._run()

    def stop(self) -> None:
        """Make `run` return; may be called from any thread."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
                self._failures = 0
            except TrainingEndedError:
                self._store.drop_update()
                return
            except NotJoinedError:
                self._joined, self._lost_at = False, None
            except LinkError as err:
                logger.debug("client=%s %s", self._client.name, err)
                self._check_lost(err)
                self._pause()
            if self._patience_s() <= 0:
                self._finish_alone()

    def _turn(self) -> None:
        if not self._joined:
            self._join()
        if self._outbox is not None:
            self._hand_in(*self._outbox)
        found = self._trainer.fetch(self._last_id, max(0.0, min(POLL_S, self._patience_s())))
        self._lost_at = None  # the work that a message asks for may take longer than `give_up_s`
        if found is not None:
            self._waiting = None
            self._last_id = found[0]
            self._answer(*found)

    def _join(self) -> None:
        client = self._client
        welcome = self._trainer.join(client.samples, client.x.shape[1:])
        self._lost_at = None
        self._fit(welcome)
        self._no_reply_s = welcome.no_reply_s
        client.fine_tuning = welcome.fine_tuning
        self._heartbeat.pace(welcome.alive_s)
        if self._store.open(welcome):
            # what the run before has left under way is of no use to this one
            self._outbox = self._waiting = None
            client.drop_round()
            client.personal = self._store.personal()
        update = self._store.update()
        if update is not None:
            self._outbox = "", update
        self._joined = True

    def _fit(self, welcome: Welcome) -> None:
        """Refuse a network that is not allowed here, and classes that the data do not fit."""
        try:
            if welcome.backbone:
                self._client.check_backbone(welcome.backbone)
        except ConfigurationError as err:
            self._withdraw(str(err))
            raise
        try:
            self._client.number_classes(welcome.class_names)
        except ConfigurationError:
            self._withdraw(STRANGE_CLASSES)
            raise

    def _withdraw(self, why: str) -> None:
        """Tell the trainer that this device takes no part."""
        with suppress(SplitedgeError):  # the trainer may be gone; the reason is raised anyway
            self._trainer.decline("", why)

    def _answer(self, identifier: str, message: Request) -> None:
        try:
            reply = self._work(message)
        except SplitedgeError as err:
            logger.warning("%s", err)
            self._trainer.decline(identifier, str(err))
            return
        self._outbox = identifier, reply
        if isinstance(reply, Features | OutputGradient):
            self._waiting = message.round, time.monotonic()
        self._count(reply)
        self._hand_in(identifier, reply)

    def _hand_in(self, identifier: str, reply: Reply) -> None:
        try:
            # a silent trainer must not hold the device for longer than it may be silent; a join
            # may just have taken all of that time
            left_s = max(0.0, self._patience_s())
            outcome = self._trainer.reply(identifier, reply, min(ANSWER_S, left_s + 0.1))
        except RefusedReplyError as err:
            logger.warning("client=%s round=%d %s", self._client.name, reply.round, err)
        else:
            logger.debug("client=%s round=%d %s", self._client.name, reply.round, outcome)
        self._outbox = self._lost_at = None
        if not identifier:
            self._store.drop_update()

    def _patience_s(self) -> float:
        """Seconds that the trainer may still be silent."""
        if self._waiting is None:
            return ANSWER_S
        return self._waiting[1] + self._no_reply_s - time.monotonic()

    def _finish_alone(self) -> None:
        assert self._waiting is not None
        number, self._waiting, self._outbox = self._waiting[0], None, None
        logger.warning(
            "client=%s round=%d no reply: finishing the round alone", self._client.name, number
        )
        try:
            update = self._work(FinishAlone(number))
        except SplitedgeError as err:
            logger.warning("%s", err)
            return
        self.counts.alone += 1
        if isinstance(update, Update):
            self._store.save_update(update)
        self._count(update)
        self._outbox = "", update

    def _work(self, message: Request | FinishAlone) -> Reply:
        """The client's reply to a message; scores get what all the work has cost so far."""
        meter = self._work_meter
        with meter.working():
            reply = self._client.handle(message)
        if not isinstance(reply, Scores):
            return reply
        return replace(
            reply,
            seconds=meter.seconds,
            cpu_s=meter.cpu_s,
            energy_j=meter.joules,
            energy_source=meter.source,
        )

    def _count(self, reply: Reply) -> None:
        """Count an update, and save the personal weights that came with it or with scores."""
        if isinstance(reply, Update):
            self.counts.updates += 1
        if isinstance(reply, Update | Scores):
            self._store.save_personal(self._client.personal)

    def _check_lost(self, err: LinkError) -> None:
        """Give up a trainer that is not reached for too long, unless a round waits for it.

        Raises: LinkError; StorageError if an update that was not handed in cannot be kept.
        """
        now = time.monotonic()
        self._lost_at = now if self._lost_at is None else self._lost_at
        if self._waiting is not None or now - self._lost_at < self._give_up_s:
            return
        if self._outbox is not None and isinstance(self._outbox[1], Update):
            self._store.save_update(self._outbox[1])
        raise LinkError(
            f"{err}; no trainer was reached for {self._give_up_s / 60:g} min. What this device"
            " finished is kept: train again once a trainer runs"
        ) from err

    def _pause(self) -> None:
        bound = min(RETRY_LAST_S, RETRY_FIRST_S * 2**self._failures)
        self._failures = min(self._failures + 1, 16)
        wait_s = random.uniform(bound / 2, bound)  # noqa: S311 - spreads retries, keeps no secret
        self._stopping.wait(max(0.0, min(wait_s, self._patience_s())))
