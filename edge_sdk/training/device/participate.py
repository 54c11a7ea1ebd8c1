"""One device's part in a training, from its data to the end: `splitedge agent train`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from edge_sdk.errors import StateInUseError
from edge_sdk.membership.rotation import current_identity
from edge_sdk.nets import use_network
from edge_sdk.state import StateLock
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.data.load import (
    HELD_OUT_SHARE,
    described,
    labelled_dataset,
    open_data,
)
from edge_sdk.training.device.invitation import wait_for_invitation
from edge_sdk.training.device.kept_weights import (
    drop_update,
    load_personal,
    load_update,
    save_personal,
    save_update,
)
from edge_sdk.training.device.session import SessionCounts, SessionStore, TrainingSession
from edge_sdk.training.device.trainer_client import TrainerClient
from edge_sdk.training.protocol.http import Welcome
from edge_sdk.training.protocol.messages import Update, Weights


def participate(
    state: Path,
    data: str,
    *,
    held_out: float = HELD_OUT_SHARE,
    trainer: str | None = None,
    threads: int = 1,
    backbone: str | None = None,
    give_up_s: float | None = None,
    say: Callable[[str], None],
    note: Callable[[str], None] = lambda _: None,
) -> SessionCounts:
    """Train on this device's samples until the trainer says that it is over.

    Args:
        data: a word that `open_data` knows; the samples have labels.
        held_out: share of the samples, apart from the test part, that are not trained on.
        trainer: its URL; None waits for an invitation. Then no agent may run on the same state
            folder, for a broker knows a device once; a running agent takes invitations itself
            (edge_sdk.training.device.background).
        backbone: the only network to train: a name, or a `module:function` of this machine, whose
            module is searched in the current folder too. None trains any network that splitedge
            has.
        give_up_s: seconds without a trainer after which this device ends; None for never.
        say: called with a line for the user: where this device trains.
        note: called with a line about the samples that were read.
    Raises: SplitedgeError saying what to change.
    """
    torch.set_num_threads(threads)
    identity = current_identity(state)
    if backbone is not None:
        use_network(backbone)
    samples = open_data(data)
    dataset = labelled_dataset(samples, held_out=held_out)
    read = described(samples, dataset.sizes)
    client = TrainingClient(
        identity.device,
        dataset.x_train,
        dataset.y_train,
        held_out=(dataset.x_test, dataset.y_test),
        backbone=backbone,
        class_names=dataset.class_names,
    )
    with ExitStack() as stack:
        stack.enter_context(StateLock(state, "training"))
        if trainer is None:
            with _sole_agent(state):
                note(read)
                say(f"splitedge agent: {identity.device} waits to be invited")
                trainer = wait_for_invitation(identity, state)
        else:
            note(read)
        trainer_client = stack.enter_context(
            closing(TrainerClient(identity, trainer, lambda: current_identity(state)))
        )

        def joined(welcome: Welcome) -> None:
            say(f"splitedge agent: {identity.device} trains {welcome.training} at {trainer}")

        store = _LocalStore(state, joined)
        session = TrainingSession(client, trainer_client, store=store, give_up_s=give_up_s)
        session.run()
        return session.counts


def _sole_agent(state: Path) -> StateLock:
    try:
        return StateLock(state, "agent")
    except StateInUseError as err:
        raise StateInUseError(
            f"{err}; or have it train when invited: `splitedge agent run --train DATA`"
        ) from err


class _LocalStore(SessionStore):
    """Files of the run that this device takes part in, in its state folder.

    Args:
        joined: told of each run that the device turns to.
    """

    def __init__(self, state: Path, joined: Callable[[Welcome], None]) -> None:
        self._state = state
        self._joined = joined
        self._training = self._run = ""

    def open(self, welcome: Welcome) -> bool:
        before = self._training, self._run
        self._training, self._run = welcome.training, welcome.run
        if before == (self._training, self._run):
            return False
        self._joined(welcome)
        return True

    def personal(self) -> Weights:
        return load_personal(self._state, self._training, self._run)

    def save_personal(self, weights: Weights) -> None:
        save_personal(self._state, self._training, weights, self._run)

    def update(self) -> Update | None:
        return load_update(self._state, self._training, self._run)

    def save_update(self, update: Update) -> None:
        save_update(self._state, self._training, self._run, update)

    def drop_update(self) -> None:
        if self._training:  # else training was over before this device joined
            drop_update(self._state, self._training)
