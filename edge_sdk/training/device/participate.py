"""A device that takes part in a training, from its data to the end: `splitedge agent train`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from edge_sdk.errors import StateInUseError
from edge_sdk.identity import Identity
from edge_sdk.state import StateLock
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.data.arrays import npz
from edge_sdk.training.data.load import Dataset, load_dataset
from edge_sdk.training.device.invitation import wait_for_invitation
from edge_sdk.training.device.kept_weights import (
    drop_update,
    load_personal,
    load_update,
    save_personal,
    save_update,
)
from edge_sdk.training.device.session import Driver, Tally
from edge_sdk.training.device.trainer_client import TrainerLink, Welcome
from edge_sdk.training.protocol.messages import Update, Weights


def take_part(
    state: Path,
    data: str,
    *,
    trainer: str | None = None,
    threads: int = 1,
    say: Callable[[str], None],
) -> Tally:
    """Train on this device's samples until the trainer says that it is over.

    Args:
        data: as `open_data` takes it.
        trainer: its URL; None waits to be invited, for which no agent may run on the same state
            folder: a broker knows a device once. A running agent takes invitations itself
            (edge_sdk.training.device.background).
        say: told where this device trains, and on how much.
    Raises: SplitedgeError saying what to change.
    """
    torch.set_num_threads(threads)
    identity = Identity.load(state)
    dataset = open_data(data)
    client = TrainingClient(
        identity.device,
        dataset.x_train,
        dataset.y_train,
        held_out=(dataset.x_test, dataset.y_test),
    )
    with ExitStack() as stack:
        stack.enter_context(StateLock(state, "training"))
        if trainer is None:
            with _sole_agent(state):
                say(f"splitedge agent: {identity.device} waits to be invited")
                trainer = wait_for_invitation(identity, state)
        link = stack.enter_context(closing(TrainerLink(identity, trainer)))
        kept = _Kept(state)

        def welcomed(welcome: Welcome) -> Update | None:
            if kept.welcome(welcome):
                client.personal = kept.personal()
                say(f"splitedge agent: {identity.device} trains {welcome.training} at {trainer}")
            return kept.update()

        driver = Driver(client, link, keep=kept.keep, welcomed=welcomed, owe=kept.owe)
        driver.run()
        return driver.tally


def _sole_agent(state: Path) -> StateLock:
    try:
        return StateLock(state, "agent")
    except StateInUseError as err:
        raise StateInUseError(
            f"{err}; or have it train when invited: `splitedge agent run --train DATA`"
        ) from err


class _Kept:
    """What this device keeps of the run it takes part in."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._training = self._run = ""

    def welcome(self, welcome: Welcome) -> bool:
        """Turn to the run of a welcome; whether it is another one."""
        before = self._training, self._run
        self._training, self._run = welcome.training, welcome.run
        return before != (self._training, self._run)

    def personal(self) -> Weights:
        return load_personal(self._state, self._training, self._run)

    def keep(self, weights: Weights) -> None:
        save_personal(self._state, self._training, weights, self._run)

    def update(self) -> Update | None:
        return load_update(self._state, self._training, self._run)

    def owe(self, update: Update | None) -> None:
        if update is None:
            drop_update(self._state, self._training)
        else:
            save_update(self._state, self._training, self._run, update)


def open_data(data: str) -> Dataset:
    """The data set that a command's word means.

    Args:
        data: a name that `load_dataset` knows, a folder with `train/` and `test/` in it or with
            IDX files, or a file NAME.npz, which needs no test part: a device without is not
            scored.
    """
    path = Path(data)
    if path.is_dir():
        images = (path / "train").is_dir()
        return load_dataset("images" if images else "fashion-mnist", path)
    if path.suffix == ".npz":
        return npz(path, test=False)
    return load_dataset(data)
