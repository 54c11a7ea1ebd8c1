"""A device that takes part in a training, from its data to the end: `splitedge agent train`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from edge_sdk.identity import Identity
from edge_sdk.state import StateLock
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.datasets import Dataset, load_dataset
from edge_sdk.training.driver import Driver, Tally
from edge_sdk.training.invitation import wait_for_invitation
from edge_sdk.training.link import TrainerLink, Welcome
from edge_sdk.training.messages import Weights
from edge_sdk.training.personal import load_personal, save_personal


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
            folder: a broker knows a device once.
        say: told where this device trains, and on how much.
    Raises: SplitedgeError saying what to change.
    """
    torch.set_num_threads(threads)
    identity = Identity.load(state)
    dataset = open_data(data)
    client = TrainingClient(identity.device, dataset.x_train, dataset.y_train)
    with ExitStack() as stack:
        stack.enter_context(StateLock(state, "training"))
        if trainer is None:
            with StateLock(state, "agent"):
                say(f"splitedge agent: {identity.device} waits to be invited")
                trainer = wait_for_invitation(identity, state)
        link = stack.enter_context(closing(TrainerLink(identity, trainer)))
        names: list[str] = []

        def welcomed(welcome: Welcome) -> None:
            if names[-1:] == [welcome.training]:
                return
            names.append(welcome.training)
            client.personal = load_personal(state, welcome.training)
            say(f"splitedge agent: {identity.device} trains {welcome.training} at {trainer}")

        def keep(weights: Weights) -> None:
            save_personal(state, names[-1], weights)

        driver = Driver(client, link, keep=keep, welcomed=welcomed)
        driver.run()
        return driver.tally


def open_data(data: str) -> Dataset:
    """The data set that a command's word means.

    Args:
        data: a name that `load_dataset` knows, a folder with `train/` and `test/` in it or with
            IDX files, or a file NAME.npz.
    """
    path = Path(data)
    if path.is_dir():
        images = (path / "train").is_dir()
        return load_dataset("images" if images else "fashion-mnist", path)
    if path.suffix == ".npz":
        return load_dataset(path.name, path.parent)
    return load_dataset(data)
