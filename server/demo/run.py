"""The demo: serve, enrol three devices, train with them, deploy, classify, survive an outage."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import orjson

from edge_sdk import api
from edge_sdk.bundles.lifecycle import update
from edge_sdk.bundles.store import BundleStore
from edge_sdk.durable import make_folder
from edge_sdk.errors import ConfigurationError, LinkError, NoBundleError
from edge_sdk.http import HttpClient, Timeout
from edge_sdk.state import Role, StateLock
from edge_sdk.training.data.load import Dataset, load_dataset
from edge_sdk.wire.frames import HTTP_LIMITS, Tensor, decode, encode
from profiles import load_reference
from server.demo.processes import DeviceProcess, ServerProcess
from server.demo.report import DeviceFigures, Outage, device_figures, outage
from server.demo.training import Progress, Shares, Trained, share_out, train
from server.tokens import create_token

DEVICES: Final = ("raspberry-pi-zero-2-w", "raspberry-pi-4", "jetson-orin-nano")
MARKER: Final = "splitedge-demo.json"
# Long enough that every device meets the outage many times, short enough to watch.
AWAY_S: Final = 3.0
BEFORE_S: Final = 1.0
RECOVERY_WAIT_S: Final = 6.0
PUBLISH_WAIT_S: Final = 60.0
SERVER_BATCH: Final = 32
# the server remembers them: every later start, with none of them, is the same
SERVER_OPTIONS: Final = (
    *("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"),
    *("--allocation", "supersfl"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which data, and how much of them; DATASET.toml beside this file says how they are trained.

    train_max, test_max: samples used, so that the demo ends within minutes on a small machine.
    held_out_every: one in so many training samples sets the gate instead. On the digits every
        fifth (288) let everything exit by luck: hybrid up to 0.84 points below the server over
        ten seeds, 0.46 with every third.
    """

    dataset: str
    train_max: int
    test_max: int
    held_out_every: int

    @property
    def recipe(self) -> Path:
        """How the devices train."""
        return Path(__file__).with_name(f"{self.dataset}.toml")


PLANS: Final = {
    "digits": Plan("digits", train_max=2_000, test_max=1_000, held_out_every=3),
    "fashion-mnist": Plan("fashion-mnist", train_max=10_000, test_max=1_000, held_out_every=5),
}


@dataclass(frozen=True, slots=True)
class Report:
    """What `--report` writes."""

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


def run_demo(plan: Plan, data: Path | None, state: Path, progress: Progress) -> Report:
    """Run the whole of it; every process and every hop is real.

    Args:
        state: `state/server`, `state/devices/NAME` and the trained weights are left behind, to be
            used on.
        progress: opens a step by its title and gives a function for lines about it.
    Raises: ConfigurationError, LinkError and others of the tree, saying what to do.
    """
    start = time.monotonic()
    with progress(f"reading {plan.dataset}"):
        dataset = load_dataset(plan.dataset, data).head(plan.train_max, plan.test_max)
    _prepare(state)
    samples = state / "samples.npy"
    np.save(samples, dataset.x_test)
    shares = share_out(dataset, plan.held_out_every, len(DEVICES))
    server = ServerProcess(state / "server")
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        with progress("starting the server and its broker"):
            server.start(SERVER_OPTIONS)
        with progress("enrolling three devices") as say:
            states = _enrol(server.http, state, say)
        trained = train(plan.recipe, shares, states, state, progress)
        _export(plan, trained, shares, state, progress)
        with progress("the devices fetch their bundles") as say:
            for folder in states:
                _fetch(folder)
                say(f"{folder.name} has its own")
        with progress("starting the devices, each a process") as say:
            devices = [stack.enter_context(_device(folder, samples)) for folder in states]
            for name, device in zip(DEVICES, devices, strict=True):
                say(f"{name}: {device.ready['depth']} stages on the device")
        with progress(f"each device classifies {len(dataset.y_test)} samples"):
            figures = _measure(devices, dataset)
        with progress("the server classifies all of them by itself"):
            on_server = _server_accuracy(server.http, plan.dataset, dataset)
        with progress("stopping the server under the devices, and starting it again"):
            away = _outage(server, devices)
    return Report(
        dataset=plan.dataset,
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
    """An empty folder; one that an earlier demo left is cleared, any other is left alone."""
    if state.exists() and (not state.is_dir() or any(state.iterdir())):
        if not (state / MARKER).is_file():
            raise ConfigurationError(
                f"{state}: not empty and not a demo's; give another --state, or empty it"
            )
        _refuse_running(state)
        shutil.rmtree(state)
    make_folder(state)
    (state / MARKER).write_bytes(orjson.dumps({"made_by": "splitedge demo"}))


def _refuse_running(state: Path) -> None:
    """An earlier demo is there to be used on, and may be in use now.

    Raises: StateInUseError naming the process.
    """
    parts: list[tuple[Path, Role]] = [(state / "server", "server")]
    parts += [(folder, "agent") for folder in (state / "devices").glob("*")]
    for folder, role in parts:
        StateLock(folder, role).release()


def _export(plan: Plan, trained: Trained, shares: Shares, state: Path, progress: Progress) -> None:
    """Publish the depths whose exit heads were trained."""
    with progress("loading torch"):
        import torch  # noqa: PLC0415 - seconds, so with a title

        from exporters.graphs import shared_exit  # noqa: PLC0415
        from exporters.model import export_model  # noqa: PLC0415
        from exporters.weights import load_weights, origin  # noqa: PLC0415
        from server.training.recipe.recipe import load_recipe  # noqa: PLC0415
        from server.training.run.build import build_network  # noqa: PLC0415
    torch.set_num_threads(1)  # the server and its broker run beside it
    dataset = shares.dataset
    net = build_network(load_recipe(plan.recipe), dataset)
    depths = load_weights(net, Path(trained.weights))
    said = origin(Path(trained.weights))
    with progress("exporting bundles and segments to ONNX, checking each against torch") as say:
        export_model(
            net,
            dataset.x_train[shares.held_out],
            dataset.y_train[shares.held_out],
            state / "server" / "models",
            name=plan.dataset,
            version=1,
            class_names=dataset.class_names,
            depths=depths,
            device=partial(shared_exit, gate=said.gate, run=said.run),
            progress=say,
        )


def _fetch(folder: Path) -> None:
    """Have a device fetch its bundle, once the server has found and signed it.

    Raises: NoBundleError if it does not in time; LinkError or another saying why it failed.
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


@contextlib.contextmanager
def _device(folder: Path, samples: Path) -> Iterator[DeviceProcess]:
    device = DeviceProcess(folder, samples)
    try:
        yield device
    finally:
        device.stop()


def _measure(devices: Sequence[DeviceProcess], dataset: Dataset) -> list[DeviceFigures]:
    figures = []
    for name, device in zip(DEVICES, devices, strict=True):
        device.order("local")
        local = device.answer()
        device.order("gated")  # one after another: on one machine they would time each other
        gated = device.answer()
        figures.append(
            device_figures(name, device.ready["depth"], dataset.y_test, gated, local["labels"])
        )
    return figures


def _server_accuracy(http: str, model: str, dataset: Dataset) -> float:
    """Accuracy of the whole network behind the public v2 API."""
    right = 0
    with HttpClient(retries=3) as client:
        for at in range(0, len(dataset.y_test), SERVER_BATCH):
            x, y = dataset.x_test[at : at + SERVER_BATCH], dataset.y_test[at : at + SERVER_BATCH]
            parameters = {"binary_data_output": True}
            text, parts = encode({"parameters": parameters}, [Tensor("x", x)], key="inputs")
            response = client.request(
                "POST",
                f"{http}/v2/models/{model}/infer",
                headers={api.HEADER_LENGTH: str(len(text))},
                body=b"".join((text, *parts)),
                timeout=Timeout(),
                at_most=HTTP_LIMITS.frame_bytes,
            )
            if response.status != 200:
                raise LinkError(f"{http}: inference answered {response.status}: {response.body!r}")
            length = int(response.headers[api.HEADER_LENGTH])
            answer = decode(response.body, length, HTTP_LIMITS)
            right += int((answer.tensor("label").array == y).sum())
    return right / len(dataset.y_test)


def _outage(server: ServerProcess, devices: Sequence[DeviceProcess]) -> Outage:
    for device in devices:
        device.order("stream")
        device.answer()
    time.sleep(BEFORE_S)
    stopped_at = time.monotonic()
    server.stop()
    time.sleep(AWAY_S)
    back_at = server.start()
    time.sleep(RECOVERY_WAIT_S)
    for device in devices:
        device.order("stop")
    return outage([device.answer() for device in devices], stopped_at, back_at)
