"""The client of every method: the same object in a simulation and on a device."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.installation import names_function
from edge_sdk.training.client.client_round import ClientRound
from edge_sdk.training.client.evaluate import evaluate_locally
from edge_sdk.training.client.state import Array, ClientState
from edge_sdk.training.data.class_numbers import class_numbers
from edge_sdk.training.protocol.messages import (
    EndRound,
    Evaluate,
    FinishAlone,
    Outputs,
    Reply,
    Request,
    StartRound,
    Step,
)
from edge_sdk.training.protocol.noise import NO_SCORES, NoiseKey, without_loss
from edge_sdk.training.protocol.plan import with_format
from edge_sdk.training.protocol.update_transfer import encode_for_wire


class TrainingClient(ClientState):
    """One client: its state, and what it answers to the server's messages.

        reply = client.handle(message)

    Args:
        name: unique among the clients; random streams are keyed by it.
        x: (n, ...) raw inputs. y: (n,) labels, whole numbers.
        device: where it trains.
        secret: the seed of the noise that guards its data. None draws a new one; a simulation sets
            one, to be repeatable.
        held_out: inputs and labels for scores, on which it never trains.
        backbone: the only network that it trains, `module:function` or a name; None for any that is
            known by name.
        class_names: of `y`, in label order; empty where labels have no names.
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
        backbone: str | None = None,
        class_names: Sequence[str] = (),
    ) -> None:
        super().__init__(
            name,
            x,
            np.asarray(y, np.int64),
            torch.device(device),
            secrets.randbits(64) if secret is None else secret,
            held_out,
        )
        self._round: ClientRound | None = None
        # starts of each round: a round that starts again must draw other noise
        self._begun: Counter[int] = Counter()
        self._backbone = backbone
        self._class_names = tuple(class_names)
        self._labels = self.y, None if held_out is None else held_out[1]
        self._guarded = False  # whether any plan put noise on its data

    def handle(self, message: Request | FinishAlone) -> Reply:
        """Do what the server asks, or finish the round without it.

        Raises: FrameError for a message of another round than the current one, and for FinishAlone
            if no part of the client learns alone; ConfigurationError for a request to score data
            that are under noise, because a count of right answers is exact.
        """
        if isinstance(message, StartRound | Evaluate):
            self.check_backbone(message.plan.backbone)
            self._guarded |= message.plan.part.noise is not None
        match message:
            case Evaluate():  # scores belong to a past round; the current one goes on
                if self._guarded:
                    raise ConfigurationError(f"client {self.name}: {NO_SCORES}")
                return evaluate_locally(self, message)
            case StartRound():
                current = self._begin(message)
                reply: Reply = current.ready()
            case _:
                current = self._under_way(message.round)
                reply = self._reply(current, message)
        return reply if current.plan.part.noise is None else without_loss(reply)

    def check_backbone(self, backbone: str) -> None:
        """Refuse a network that the operator of this device has not named.

        Raises: ConfigurationError with the option that allows it.
        """
        if self._backbone is None and not names_function(backbone):
            return
        if backbone != self._backbone:
            allowed = "none of its own" if self._backbone is None else self._backbone
            raise ConfigurationError(
                f"client {self.name}: this training is of the network {backbone}, and the operator"
                f" of this device has allowed {allowed}; a plan carries no code. To take part:"
                f" `splitedge agent train --backbone {backbone}`"
            )

    def number_classes(self, trained: Sequence[str]) -> None:
        """Give labels the numbers that the training has for the classes of their names.

        Args:
            trained: names of the training's classes, in label order; may be called again.
        Raises: ConfigurationError naming the classes that the training does not have.
        """
        if not self._class_names:
            return
        numbers = np.array(class_numbers(self._class_names, trained), np.int64)
        y, held_out = self._labels
        self.y = numbers[y]
        if self.held_out is not None and held_out is not None:
            self.held_out = self.held_out[0], numbers[held_out]

    def drop_round(self) -> None:
        """Give up the round under way, which is of a run that is over; nothing of it is kept."""
        self._round = None

    def _begin(self, start: StartRound) -> ClientRound:
        begun = self._begun[start.round]
        self._begun[start.round] += 1
        key = NoiseKey(self.secret, self.name, start.round, begun)
        plan = with_format(start.plan, self.device)
        start = replace(start, plan=plan, weights=self.take_first(plan, start.weights))
        self._round = ClientRound(self, start, key)
        return self._round

    def _under_way(self, number: int) -> ClientRound:
        if self._round is None or self._round.number != number:
            raise FrameError(f"client {self.name}: no round {number} is under way here")
        return self._round

    def _reply(
        self, current: ClientRound, message: Step | Outputs | EndRound | FinishAlone
    ) -> Reply:
        match message:
            case Step():
                return current.step(message)
            case Outputs():
                return current.answer(message)
            case EndRound():
                update = current.end(message)
                self._round = None
            case FinishAlone():
                self._round = None
                update = current.alone()
        return encode_for_wire(update, current.start, self.name, current.noise_key)
