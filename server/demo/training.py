"""The demo's training: SuperSFL rounds with the enrolled devices, each on its own samples.

STATE/NAME.toml, NAME.npz       the recipe, and the data that the trainer has
STATE/devices/DEVICE.npz        a device's own share
STATE/server/training/NAME      what `splitedge train` leaves
"""

from __future__ import annotations

import contextlib
import shutil
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from edge_sdk.durable import make_folder
from edge_sdk.errors import LinkError
from edge_sdk.training.data.load import Array, Dataset
from server.demo.processes import MemberProcess, TrainerProcess

Progress = Callable[[str], contextlib.AbstractContextManager[Callable[[str], None]]]


@dataclass(frozen=True, slots=True)
class Shares:
    """Who holds which training samples of a data set, by row.

    Attributes:
        held_out: to set the gate on, neither trained nor tested on; the server's.
        devices: a part of the others for each device.
    """

    dataset: Dataset
    held_out: Array
    devices: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """What the rounds came to.

    Attributes:
        accuracy: of the whole network on the test samples.
        depths: stages each device trained, by name.
        bytes_up, bytes_down: of all rounds.
        weights: of the whole network, with the exit heads of those depths.
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


def share_out(dataset: Dataset, held_out_every: int, devices: int) -> Shares:
    """One training sample in so many held out, the others dealt to the devices in turn."""
    rows = np.arange(len(dataset.y_train))
    held_out = rows % held_out_every == 0
    left = rows[~held_out]
    parts = tuple(left[place::devices] for place in range(devices))
    return Shares(dataset, rows[held_out], parts)


def train(
    recipe: Path, shares: Shares, devices: Sequence[Path], state: Path, progress: Progress
) -> Trained:
    """Train by the recipe with enrolled devices, over MQTT and HTTP.

    Args:
        devices: their state folders. state: the demo's.
    Raises: LinkError naming the process that failed, what it said and where it said it.
    """
    folder = state / "training"
    make_folder(folder)
    recipe = Path(shutil.copy(recipe, folder))
    text = tomllib.loads(recipe.read_text())
    rounds = text["train"]["rounds"]
    _save(folder / text["data"]["name"], shares.dataset, shares.held_out)
    with contextlib.ExitStack() as stack:
        with progress("starting the devices' training, each a process with its own samples"):
            members = []
            for device, rows in zip(devices, shares.devices, strict=True):
                data = folder / f"{device.name}.npz"
                _save(data, shares.dataset, rows)
                members.append(MemberProcess(device, data))
                stack.callback(members[-1].stop)
            for member in members:
                member.wait_ready()
        samples = sum(map(len, shares.devices))
        title = f"training {text['train']['backbone']} on their {samples} samples, {rounds} rounds"
        with progress(title) as say:
            trainer = TrainerProcess(recipe, state / "server")
            stack.callback(trainer.stop)
            try:
                for line in trainer.rounds():
                    say(line)
            except LinkError:
                for member in members:
                    member.check_running()
                raise
            for member in members:
                member.wait_end()
    return _read_report(state / "server" / "training" / recipe.stem / "report.json")


def _save(path: Path, dataset: Dataset, rows: Array) -> None:
    """A data set that has only these training samples."""
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
