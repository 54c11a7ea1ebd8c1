"""Shared by every test folder: the real data if present, a free port, hypothesis profiles.

--hypothesis-profile=faults     ten times as many generated examples, for `make faults-training`
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

END_WITHIN_S = 60.0
ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "tests" / "fixtures" / "fashion-mnist"

# a shared or busy machine is no failure
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("splitedge", PATIENT, max_examples=100)
settings.register_profile("faults", PATIENT, max_examples=1000)
settings.load_profile("splitedge")


def pytest_report_header() -> str:
    """Say which images the tests run on."""
    found = _full_data() is not None
    used = "the full data" if found else f"the fixture of 2,000 images ({_shared()}/data has none)"
    return f"fashion-mnist: {used}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a failed test once more if it carries the marker `deadline`: a real fault fails twice."""
    for item in items:
        if item.get_closest_marker("deadline"):
            item.add_marker(pytest.mark.flaky(reruns=1))


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
