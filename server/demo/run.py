"""The demo's steps: serve, enrol three devices, train, deploy, classify, survive an outage."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from edge_sdk import api
from edge_sdk.bundles.lifecycle import update
from edge_sdk.bundles.store import BundleStore
from edge_sdk.durable import make_folder
from edge_sdk.errors import ConfigurationError, LinkError, NoBundleError
from edge_sdk.identity import Identity
from edge_sdk.state import StateLock
from edge_sdk.training.data.load import Dataset, Samples, described, labelled_dataset, open_data
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import Query, new_id
from profiles.reference import load_reference
from server.demo.report import DeviceFigures, Outage, device_figures, outage
from server.demo.training import Progress, Shares, Trained, share_out, train
from server.processes import ChildProcess, ServerProcess
from server.tokens import create_token

DEVICES: Final = ("raspberry-pi-zero-2-w", "raspberry-pi-4", "jetson-orin-nano")
MARKER: Final = "splitedge-demo.json"
# long enough that every device predicts often in the outage, short enough to watch
AWAY_S: Final = 3.0
BEFORE_S: Final = 1.0
RECOVERY_WAIT_S: Final = 6.0
PUBLISH_WAIT_S: Final = 60.0
SERVER_BATCH: Final = 32
SERVER_WAIT_S: Final = 60.0
VERSION: Final = "1"
# the server keeps these, so a later start needs no options
SERVER_OPTIONS: Final = (
    *("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"),
    *("--allocation", "supersfl"),
)


@dataclass(frozen=True, slots=True)
class DemoSetup:
    """Samples' size, and how many are used; DATASET.toml in this folder says how to train on them.

    Attributes:
        dataset: the set that the recipe was made for.
        train_max, test_max: samples used, so that the demo ends within minutes on a small machine.
        held_out: share of the samples that set the gate in place of training. On the digits a fifth
            (288) let everything exit by luck: hybrid up to 0.84 points below the server over ten
            seeds, 0.46 with a third.
    """

    dataset: str
    train_max: int
    test_max: int
    held_out: float

    @property
    def recipe(self) -> Path:
        """Path of the recipe that the devices train by."""
        return Path(__file__).with_name(f"{self.dataset}.toml")


SETUPS: Final = {
    "digits": DemoSetup("digits", train_max=2_000, test_max=1_000, held_out=1 / 3),
    "fashion-mnist": DemoSetup("fashion-mnist", train_max=10_000, test_max=1_000, held_out=1 / 5),
}


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The record that `--report` writes."""

    dataset: str
    backbone: str
    trained_on: int
    tested_on: int
    training: Trained
    devices: tuple[DeviceFigures, ...]
    accuracy_all_on_device: float
    accuracy_all_on_server: float
    accuracy_hybrid: float
    outage: Outage
    seconds: float

    def to_json(self) -> bytes:
        """Readable JSON."""
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


# the smallest pictures for which the network of fashion-mnist is made
LARGE: Final = 28


def setup_for(samples: Samples) -> DemoSetup:
    """The setup for labelled pictures of that size.

    Raises: ConfigurationError where they are no square pictures.
    """
    shape = samples.train.x.shape[1:]
    if len(shape) != 3 or shape[1] != shape[2]:
        raise ConfigurationError(
            f"{samples.name}: expected square pictures (channels, side, side) for the demo, got"
            f" {shape}; --resize 28x28 brings the pictures of a folder to one size"
        )
    return SETUPS["fashion-mnist" if shape[1] >= LARGE else "digits"]


def model_name(samples: Samples) -> str:
    """A name that a model may have, made of that of the samples."""
    words = re.findall("[a-z0-9]+", samples.name.lower())
    return "-".join(words)[:40].strip("-") or "demo"


def run_demo(
    data: str, state: Path, progress: Progress, *, train_max: int | None = None
) -> DemoReport:
    """Run the demo; every process and every message is real.

    Args:
        data: labelled pictures, by a word of the grammar (docs/data.md).
        train_max: most samples to train on and to set the gate with.
        state: folder that keeps `server`, `devices/NAME` and the trained weights for further use.
        progress: opens a step by its title and gives a function for lines about it.
    Raises: ConfigurationError, LinkError and others of the tree, saying what to do.
    """
    start = time.monotonic()
    with progress(f"reading {data}") as say:
        samples = open_data(data)
        setup, name = setup_for(samples), model_name(samples)
        dataset = labelled_dataset(samples, held_out=setup.held_out)
        total = min(setup.train_max, train_max or setup.train_max)
        most = round(setup.held_out * total)
        dataset = dataset.head(total - most, setup.test_max, most)
        say(described(samples, dataset.sizes))
    _prepare(state)
    inputs = state / "samples.npy"
    np.save(inputs, dataset.x_test)
    shares = share_out(dataset, len(DEVICES))
    server = ServerProcess(state / "server")
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        with progress("starting the server and its broker"):
            server.start(SERVER_OPTIONS)
        with progress("enrolling three devices") as say:
            states = _enrol(server.http, state, say)
        trained = train(setup.recipe, shares, states, state, progress)
        _export(setup.recipe, trained, shares, state / "server" / "models" / name, progress)
        with progress("the devices fetch their bundles") as say:
            for folder in states:
                _fetch(folder)
                say(f"{folder.name} has its own")
        with progress("starting the devices, each a process") as say:
            devices = []
            for folder in states:
                devices.append(DeviceProcess(folder, inputs))
                stack.callback(devices[-1].close)
                say(f"{folder.name}: {devices[-1].depth} stages on the device")
        with progress(f"each device classifies {len(dataset.y_test)} samples"):
            figures = _measure(devices, dataset)
        with progress("the server classifies all of them by itself"):
            on_server = _server_accuracy(states[0], name, dataset)
        with progress("stopping the server under the devices, and starting it again"):
            away = _outage(server, devices)
    return DemoReport(
        dataset=name,
        backbone=trained.backbone,
        trained_on=sum(map(len, shares.devices)),
        tested_on=len(dataset.y_test),
        training=trained,
        devices=tuple(figures),
        accuracy_all_on_device=float(np.mean([f.accuracy_on_device for f in figures])),
        accuracy_all_on_server=on_server,
        accuracy_hybrid=float(np.mean([f.accuracy for f in figures])),
        outage=away,
        seconds=round(time.monotonic() - start, 1),
    )


def _prepare(state: Path) -> None:
    """Make an empty folder: the one of an earlier demo is cleared, any other is refused.

    Raises: ConfigurationError; StateInUseError naming the process that uses it.
    """
    if state.exists() and (not state.is_dir() or any(state.iterdir())):
        if not (state / MARKER).is_file():
            raise ConfigurationError(
                f"{state}: not empty and not made by a demo; give another --state, or empty it"
            )
        # an earlier demo is there to be used, and may be in use now
        StateLock(state / "server", "server").release()
        for folder in (state / "devices").glob("*"):
            StateLock(folder, "agent").release()
        shutil.rmtree(state)
    make_folder(state)
    (state / MARKER).write_bytes(orjson.dumps({"made_by": "splitedge demo"}))


def _export(
    recipe: Path, trained: Trained, shares: Shares, model: Path, progress: Progress
) -> None:
    """Publish the depths with trained exit heads.

    Args:
        model: folder of the model, in the server's folder of models.
    """
    with progress("loading torch"):
        import torch  # noqa: PLC0415 - takes seconds, so it gets a title

        from exporters.graphs import shared_exit  # noqa: PLC0415
        from exporters.model import export_model  # noqa: PLC0415
        from exporters.weights import load_weights, read_origin  # noqa: PLC0415
        from server.training.recipe.recipe import load_recipe  # noqa: PLC0415
        from server.training.run.build import build_network  # noqa: PLC0415
    torch.set_num_threads(1)  # the server and its broker need the other cores
    dataset = shares.dataset
    net = build_network(load_recipe(recipe), dataset)
    depths = load_weights(net, Path(trained.weights))
    origin = read_origin(Path(trained.weights))
    with progress("exporting bundles and segments to ONNX, checking each against torch") as say:
        export_model(
            net,
            dataset.x_held_out,
            dataset.y_held_out,
            model.parent,
            name=model.name,
            version=int(VERSION),
            class_names=dataset.class_names,
            depths=depths,
            device=partial(shared_exit, gate=origin.gate, run=origin.run),
            progress=say,
        )


def _fetch(folder: Path) -> None:
    """Let a device fetch its bundle, as soon as the server has published it.

    Raises: NoBundleError if that takes too long; LinkError or another saying why it failed.
    """
    give_up = time.monotonic() + PUBLISH_WAIT_S
    while True:
        update(folder)
        try:
            BundleStore(folder).active()
        except NoBundleError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.2)
        else:
            return


def _enrol(http: str, state: Path, say: Callable[[str], None]) -> list[Path]:
    states = []
    for name in DEVICES:
        folder = state / "devices" / name
        token = create_token(state / "server", note="demo")
        api.enroll(http, token, folder, profile=load_reference(name), name=name)
        say(f"{name} is enrolled")
        states.append(folder)
    return states


class DeviceProcess(ChildProcess):
    """`python -m server.demo.device` on a state folder: takes orders, and answers in JSON.

    Attributes:
        depth: stages that it runs.
    """

    def __init__(self, folder: Path, samples: Path) -> None:
        command = [sys.executable, "-P", "-m", "server.demo.device"]
        super().__init__(folder.name, [*command, "--state", str(folder), "--samples", str(samples)])
        self.depth: int = self.answer()["depth"]

    def ask(self, order: str) -> dict[str, Any]:
        """Give an order and wait for the answer.

        Raises: LinkError if the process ended.
        """
        self.write_line(order)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next answer.

        Raises: LinkError if the process ended.
        """
        answer: dict[str, Any] = orjson.loads(self.expect("{", "ended early"))
        return answer


def _measure(devices: Sequence[DeviceProcess], dataset: Dataset) -> list[DeviceFigures]:
    figures = []
    for name, device in zip(DEVICES, devices, strict=True):
        local = device.ask("local")
        gated = device.ask("gated")  # one after another: together they would time each other
        figures.append(device_figures(name, device.depth, dataset.y_test, gated, local["labels"]))
    return figures


def _server_accuracy(device: Path, model: str, dataset: Dataset) -> float:
    """Accuracy of the whole network, which a device asks for over HTTP in batches."""
    identity, right = Identity.load(device), 0
    for at in range(0, len(dataset.y_test), SERVER_BATCH):
        x, y = dataset.x_test[at : at + SERVER_BATCH], dataset.y_test[at : at + SERVER_BATCH]
        query = Query(new_id(), model, VERSION, Tensor("x", x))
        reply = api.infer(identity, query, time.monotonic() + SERVER_WAIT_S)
        if reply.problem is not None:
            raise LinkError(f"the server answers {reply.problem.value}: {reply.detail}")
        right += int((reply.tensors["label"] == y).sum())
    return right / len(dataset.y_test)


def _outage(server: ServerProcess, devices: Sequence[DeviceProcess]) -> Outage:
    for device in devices:
        device.ask("stream")
    time.sleep(BEFORE_S)
    stopped_at = time.monotonic()
    server.stop()
    time.sleep(AWAY_S)
    back_at = server.start()
    time.sleep(RECOVERY_WAIT_S)
    for device in devices:
        device.write_line("stop")
    return outage([device.answer() for device in devices], stopped_at, back_at)
