"""The demo's training: SuperSFL rounds with the enrolled devices, each on its own samples.

STATE/training/NAME.toml, NAME.npz    the recipe, and the samples of the trainer
STATE/training/DEVICE.npz             the samples of one device
STATE/server/training/NAME            what `splitedge train` leaves
"""

from __future__ import annotations

import contextlib
import shutil
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from edge_sdk.durable import make_folder
from edge_sdk.errors import LinkError
from edge_sdk.training.data.load import Array, Dataset
from server.processes import ChildProcess

Progress = Callable[[str], contextlib.AbstractContextManager[Callable[[str], None]]]

ROUND_TIMEOUT_S: Final = 600.0
READY: Final = "waits to be invited"  # in the line of `agent train` before it trains


@dataclass(frozen=True, slots=True)
class Shares:
    """The training part of a data set, dealt out by row.

    Attributes:
        devices: rows of each device.
    """

    dataset: Dataset
    devices: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """The outcome of the rounds.

    Attributes:
        accuracy: of the whole network on the test samples.
        depths: stages that each device trained, by name.
        bytes_up, bytes_down: sums over all rounds.
        weights: file of the whole network, with the exit heads of those depths.
    """

    method: str
    backbone: str
    rounds: int
    accuracy: float
    depths: dict[str, int]
    bytes_up: int
    bytes_down: int
    seconds: float
    weights: str


def share_out(dataset: Dataset, devices: int) -> Shares:
    """Deal the training samples to the devices in turn."""
    rows = np.arange(len(dataset.y_train))
    return Shares(dataset, tuple(rows[place::devices] for place in range(devices)))


def train(
    recipe: Path, shares: Shares, devices: Sequence[Path], state: Path, progress: Progress
) -> Trained:
    """Train by the recipe with enrolled devices, over MQTT and HTTP.

    Args:
        devices: their state folders. state: the demo's.
    Raises: LinkError naming the process that failed, its last line and its log.
    """
    folder = state / "training"
    make_folder(folder)
    recipe = Path(shutil.copy(recipe, folder))
    text = tomllib.loads(recipe.read_text())
    rounds = text["train"]["rounds"]
    held_out = replace(
        shares.dataset, x_train=shares.dataset.x_held_out, y_train=shares.dataset.y_held_out
    )
    _save(folder / text["data"]["name"], held_out, np.arange(len(held_out.y_train)))
    with contextlib.ExitStack() as stack:
        with progress("starting the devices' training, each a process with its own samples"):
            members = []
            for device, rows in zip(devices, shares.devices, strict=True):
                data = folder / f"{device.name}.npz"
                _save(data, shares.dataset, rows)
                members.append(start_member(device, data))
                stack.callback(members[-1].stop)
            for member in members:
                member.expect(READY, "does not train")
        samples = sum(map(len, shares.devices))
        title = f"training {text['train']['backbone']} on their {samples} samples, {rounds} rounds"
        with progress(title) as say:
            trainer = start_trainer(recipe, state / "server")
            stack.callback(trainer.stop)
            try:
                for line in round_lines(trainer):
                    say(line)
            except LinkError:
                for member in members:
                    member.check_running()
                raise
            for member in members:
                member.wait_end("did not end with the training")
    return _read_report(state / "server" / "training" / recipe.stem / "report.json")


def start_member(state: Path, data: Path) -> ChildProcess:
    """`splitedge agent train` on a device's state folder, with its samples in `data`."""
    # what is held out of the training has been taken out already
    words = ["agent", "train", "--state", str(state), "--data", str(data), "--held-out", "0"]
    return ChildProcess.splitedge(state.name, words, data.with_suffix(".log"))


def start_trainer(recipe: Path, server: Path) -> ChildProcess:
    """`splitedge train` by a recipe, with the devices of a server's state folder.

    It runs in the recipe's folder, where the files that the recipe names are.
    """
    words = ["train", recipe.name, "--state", str(server.resolve()), "--http", "127.0.0.1:0"]
    words += ["--join-minutes", "1"]
    log = recipe.with_suffix(".log")
    return ChildProcess.splitedge("the training", words, log, recipe.parent)


def round_lines(trainer: ChildProcess) -> Iterator[str]:
    """A trainer's line about each round, as it comes, until the training has ended.

    Raises: LinkError if it does not end well.
    """
    while line := trainer.read_line(ROUND_TIMEOUT_S):
        if line.startswith("round "):
            yield line.strip()
    trainer.wait_end("failed")


def _save(path: Path, dataset: Dataset, rows: Array) -> None:
    """Write a data set that has only these training samples."""
    np.savez(
        path,
        x_train=dataset.x_train[rows],
        y_train=dataset.y_train[rows],
        x_test=dataset.x_test,
        y_test=dataset.y_test,
        class_names=np.array(dataset.class_names),
    )


def _read_report(path: Path) -> Trained:
    report: dict[str, Any] = orjson.loads(path.read_bytes())
    rows = report["rounds"]
    return Trained(
        method=report["method"],
        backbone=report["recipe"]["train"]["backbone"],
        rounds=len(rows),
        accuracy=report["final"]["accuracy"],
        depths=report["depths"],
        bytes_up=sum(row["bytes_up"] for row in rows),
        bytes_down=sum(row["bytes_down"] for row in rows),
        seconds=round(sum(row["seconds"] for row in rows), 1),
        weights=report["weights"],
    )
