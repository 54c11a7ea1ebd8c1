"""The client half of every method: the same object in a simulation and on a device."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.training.client.adaptation import MetaHalf
from edge_sdk.training.client.auxiliary import DistillingHalf
from edge_sdk.training.client.client_round import Half
from edge_sdk.training.client.evaluate import judge
from edge_sdk.training.client.inversion_guard import GuardedHalf
from edge_sdk.training.client.personal_head import PersonalHalf
from edge_sdk.training.protocol.messages import (
    EndRound,
    Evaluate,
    NoReply,
    Outputs,
    Reply,
    Request,
    StartRound,
    Step,
    Update,
    Weights,
)
from edge_sdk.training.protocol.noise import NO_SCORES, Key, noise_key, without_loss
from edge_sdk.training.protocol.update_transfer import coded

Array = NDArray[Any]

# halves of methods whose clients do more, by the part of the plan that asks for it
HALVES: Final[Mapping[str, type[Half]]] = {
    "back": PersonalHalf,
    "distil": DistillingHalf,
    "inversion": GuardedHalf,
    "meta": MetaHalf,
}


class TrainingClient:
    """One client's data and what it keeps to itself between rounds.

        reply = client.handle(message)

    Args:
        name: unique among the clients; random streams are keyed by it.
        x: (n, ...) raw inputs. y: (n,) labels, whole numbers.
        device: where it trains.
        secret: what noise that guards its data is drawn from, in place of the plan's seed, which
            the server knows. None for one of its own; a simulation gives one, to be repeatable.
        held_out: inputs and labels that it never trains on, to be asked how good it is.
    """

    def __init__(
        self,
        name: str,
        x: Array,
        y: NDArray[np.int64],
        device: torch.device | str = "cpu",
        secret: int | None = None,
        *,
        held_out: tuple[Array, NDArray[np.int64]] | None = None,
    ) -> None:
        self.name = name
        self.secret = secrets.randbits(64) if secret is None else secret
        self.device = torch.device(device)
        self.x = x
        self.y = np.asarray(y, np.int64)
        self.held_out = held_out
        # exit heads by depth and, for personal methods, the last weights of all this client trains
        self.personal: Weights = {}
        self._round: Half | None = None
        self._start: StartRound | None = None
        # by round: noise is never drawn twice alike for what may differ
        self._begun: Counter[int] = Counter()
        self._noise_key: Key = ()
        self._guarded = False  # whether its data were ever promised noise

    def handle(self, message: Request | NoReply) -> Reply:
        """Do what the server asks, or go on without it.

        Raises: FrameError for a message that does not belong to the round under way, and for
            NoReply where there is no exit head to learn by; ConfigurationError when it is to say
            how good it is on data that are under noise: what it counts would be exact.
        """
        if isinstance(message, StartRound | Evaluate) and message.plan.part.noise is not None:
            self._guarded = True
        start = message if isinstance(message, StartRound) else self._start
        reply = self._reply(message)
        guarded = start is not None and start.plan.part.noise is not None
        return without_loss(reply) if guarded else reply

    def _reply(self, message: Request | NoReply) -> Reply:
        if isinstance(message, Evaluate):  # of a round that is over; one under way goes on
            if self._guarded:
                raise ConfigurationError(f"client {self.name}: {NO_SCORES}")
            return judge(self, message)
        if isinstance(message, StartRound):
            key = noise_key(self.secret, self.name, message.round, self._begun[message.round])
            self._begun[message.round] += 1
            self._round, self._start = _half(self, message), message
            self._round.noise_key = self._noise_key = key
            return self._round.ready()
        if self._round is None or self._round.number != message.round:
            raise FrameError(f"client {self.name}: no round {message.round} is under way here")
        match message:
            case Step():
                return self._round.step(message)
            case Outputs():
                return self._round.answer(message)
            case EndRound():
                update = self._round.end(message)
                return self._hand_over(update)
            case NoReply():
                current, self._round = self._round, None
                return self._hand_over(current.alone())

    def _hand_over(self, update: Update) -> Update:
        """End the round with an update as it travels."""
        assert self._start is not None, "an update ends a round that was started"
        start, self._start, self._round = self._start, None, None
        return coded(update, start, self.name, self._noise_key)

    @property
    def samples(self) -> int:
        """n_k."""
        return len(self.y)


def _half(client: TrainingClient, start: StartRound) -> Half:
    for name, kind in HALVES.items():
        if getattr(start.plan.part, name) is not None:
            return kind(client, start)
    return Half(client, start)
