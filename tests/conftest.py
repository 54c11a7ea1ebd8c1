"""Shared by every test folder: the real data if present, a free port, full figures under faults.

--fault-figures=FILE    the tests of `make faults` in their full form, which report to FILE
--soak-minutes=MINUTES  how long a soak lasts there
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, settings

from benchmarks.faults.figures import FIGURES
from edge_sdk.cli.main import main
from tests.attempts import Attempts, attempt_of
from tests.commands import Called, Splitedge

END_WITHIN_S = 60.0
ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "tests" / "fixtures" / "fashion-mnist"

# a shared or busy machine is no failure
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("splitedge", PATIENT, max_examples=100)
settings.register_profile("faults", PATIENT, max_examples=1000)
settings.load_profile("splitedge")

Reached = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of `make faults`."""
    parser.addoption(
        "--fault-figures",
        metavar="FILE",
        help="run tests in the full form of `make faults`, and append what they reach to FILE",
    )
    parser.addoption(
        "--soak-minutes", metavar="MINUTES", type=float, default=10.0, help="length of a soak"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Second attempts from the start; ten times as many generated examples for full figures."""
    config.pluginmanager.register(Attempts())
    if config.getoption("--fault-figures"):
        settings.load_profile("faults")


def pytest_report_header() -> str:
    """Say which images the tests run on."""
    found = _full_data() is not None
    used = "the full data" if found else f"the fixture of 2,000 images ({_shared()}/data has none)"
    return f"fashion-mnist: {used}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run a failed test once more if it carries the marker `deadline`: a real fault fails twice.

    What carries the marker `fault_figures` belongs to `make faults` alone. Files that carry the
    marker `long` come first, so that no process is left alone with one of them at the end.
    """
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if config.getoption("--fault-figures"):
        return  # minutes each: a figure is reached or it is not
    left = [item for item in items if item.get_closest_marker("fault_figures")]
    items[:] = [item for item in items if not item.get_closest_marker("fault_figures")]
    if left:
        config.hook.pytest_deselected(items=left)
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return  # `-p no:rerunfailures`, which shows what a first attempt comes to
    for item in items:
        if item.get_closest_marker("deadline"):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """Take back the log levels that a command sets for its process, which here has other tests."""
    yield
    for package in ("edge_sdk", "server"):
        logging.getLogger(package).setLevel(logging.NOTSET)


@pytest.fixture
def splitedge(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Splitedge:
    """Runs the command line in this process: `splitedge("agent", "status", "--json")`."""

    def call(*words: object) -> Called:
        monkeypatch.setattr(sys, "argv", ["splitedge", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        code = left.value.code
        return Called(code if isinstance(code, int) else 0, *capsys.readouterr())

    return call


@pytest.fixture
def attempt(request: pytest.FixtureRequest) -> int:
    """1, or 2 where a test that carries the marker `deadline` is run again.

    A test names by it what it leaves in a folder that other tests of its module use too.
    """
    return attempt_of(request.node)


@pytest.fixture(scope="session")
def thorough(pytestconfig: pytest.Config) -> bool:
    """Whether this run makes full figures (`make faults`), and so leaves nothing out."""
    return pytestconfig.getoption("--fault-figures") is not None


@pytest.fixture(scope="session")
def soak_s(pytestconfig: pytest.Config) -> float:
    """How long a soak of `make faults` lasts, in seconds."""
    return 60.0 * float(pytestconfig.getoption("--soak-minutes"))


@pytest.fixture(scope="session")
def reached(pytestconfig: pytest.Config) -> Reached:
    """Reports what a figure came to: `reached("black-hole", "1,000 answered", first_s=0.51)`.

    Call it before the assertions, so that a figure that is missed is told as well.
    """
    file = pytestconfig.getoption("--fault-figures")

    def report(figure: str, text: str, **numbers: float) -> None:
        assert figure in FIGURES, f"benchmarks/faults/figures.py has no figure {figure!r}"
        if file is not None:
            line = {"figure": figure, "reached": text, "numbers": numbers}
            with Path(file).open("ab") as out:
                out.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    return report


@pytest.fixture(scope="session")
def shared_data() -> Path | None:
    """Folder of the full data sets, if it exists.

    It is `data/` under SPLITEDGE_SHARED, by default the folder `../shared` next to the repository.
    """
    return _full_data()


@pytest.fixture(scope="session")
def fashion_mnist_fixture() -> Path:
    """Folder of the 2,000 images that are committed with the tests."""
    return FIXTURE


@pytest.fixture(scope="session")
def fashion_mnist_folder(shared_data: Path | None) -> Path:
    """Fashion-MNIST in IDX form: the full set if present, else the committed 2,000 images."""
    return shared_data or FIXTURE


@pytest.fixture(scope="session")
def train_centrally() -> Callable[..., None]:
    """Function that trains a network in place, all exits at once and in seconds, for an export.

    `train_centrally(net, x, y, epochs=..., learning_rate=...)`, with Adam and a one-cycle rate.
    """
    import torch  # seconds, which most tests do not need

    def train(net: Any, x: Any, y: Any, *, epochs: int, learning_rate: float) -> None:
        inputs, labels = torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y)
        generator = torch.Generator().manual_seed(0)
        optimiser = torch.optim.Adam(net.parameters(), lr=learning_rate)
        steps = epochs * -(-len(labels) // 64)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, learning_rate, total_steps=steps)
        cross_entropy = torch.nn.functional.cross_entropy
        net.train()
        for _ in range(epochs):
            for rows in torch.split(torch.randperm(len(labels), generator=generator), 64):
                optimiser.zero_grad()
                exits, final = net.forward_exits(inputs[rows])
                own = [cross_entropy(logits, labels[rows]) for logits in exits.values()]
                loss = cross_entropy(final, labels[rows]) + torch.stack(own).mean()
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                optimiser.step()
                schedule.step()
        net.eval()

    return train


@pytest.fixture
def free_port() -> int:
    """A TCP port of the loopback interface that no program listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _shared() -> Path:
    return Path(os.environ.get("SPLITEDGE_SHARED", ROOT.parent / "shared"))


def _full_data() -> Path | None:
    folder = _shared() / "data"
    return folder if (folder / "train-images-idx3-ubyte.gz").is_file() else None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """End the run although a failed test left a thread behind, and name that thread.

    A process of pytest-xdist that has no more tests waits for the others, which may take minutes.
    The process that started it ends it.
    """
    if hasattr(session.config, "workerinput"):
        return

    def leave() -> None:
        time.sleep(END_WITHIN_S)
        left = [t.name for t in threading.enumerate() if not t.daemon and t.is_alive()]
        sys.stderr.write(f"still running {END_WITHIN_S:g} s after the last test: {left}\n")
        sys.stderr.flush()
        os._exit(int(exitstatus))

    threading.Thread(target=leave, daemon=True).start()
