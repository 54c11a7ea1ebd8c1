"""What a report says of noise on real devices, whose rounds a kill may interrupt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_sdk.identity import Identity
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.driver import Driver
from edge_sdk.training.link import TrainerLink
from edge_sdk.training.noise import NO_SCORES
from server.registry.database import open_registry
from server.registry.operator import load_or_create_operator_secret
from server.settings import Address
from server.training import remote
from server.training.recipe import read_recipe
from server.training.world import load_data

NAMES = ("pi-0", "pi-1")
PROFILE: dict[str, Any] = {
    "name": "pi",
    "arch": "aarch64",
    "cores": 4,
    "memory_total_bytes": 4 * 2**30,
    "memory_available_bytes": 3_000_000_000,
    "accelerator": None,
    "compute_score_gflops": 2.5,
    "link_latency_ms": None,
    "link_bandwidth_mbps": None,
}
RECIPE = read_recipe(
    {
        "method": "splitfed-v1",
        "data": {"name": "digits", "clients": 2},
        "train": {
            "backbone": "tiny",
            "rounds": 2,
            "batch": 16,
            "learning_rate": 0.05,
            "depth": 1,
            "epochs": 2,
        },
        "privacy": {
            "update_clip": 1.0,
            "update_sigma": 8.0,
            "feature_clip": 1.0,
            "feature_sigma": 40.0,
        },
    }
)
SAMPLES = 20


@pytest.fixture
def training(tmp_path: Path, free_port: int) -> Iterator[Any]:
    """Trains with two devices that hold samples out: `training(resume=...)`, as often as wanted."""
    load_or_create_operator_secret(tmp_path)
    data = load_data(RECIPE)
    held_out = data.x_test[:10], data.y_test[:10]
    drivers, threads = [], []
    with_devices = open_registry(tmp_path)
    for at, name in enumerate(NAMES):
        mine = slice(at * SAMPLES, (at + 1) * SAMPLES)
        client = TrainingClient(name, data.x_train[mine], data.y_train[mine], held_out=held_out)
        device, secret = with_devices.redeem_token(with_devices.create_token(), name, PROFILE)
        identity = Identity("http://127.0.0.1:1", device.id, device.fleet, secret)
        drivers.append(Driver(client, TrainerLink(identity, f"http://127.0.0.1:{free_port}")))
        threads.append(threading.Thread(target=drivers[-1].run, daemon=True))
        threads[-1].start()
    with_devices.close()

    def run(*, resume: bool = False) -> dict[str, Any]:
        address = Address("127.0.0.1", free_port)
        settings = remote.TrainerSettings(tmp_path, "run", address, join_s=30, resume=resume)
        return remote.train(RECIPE, settings, say=print, on_round=print)

    yield run
    for driver, thread in zip(drivers, threads, strict=True):
        driver.stop()
        thread.join(10)


def test_devices_under_noise_are_not_scored_and_the_report_says_why(training: Any) -> None:
    report = training()
    assert report["each_client"] == []
    assert report["not_scored"] == {
        name: [{"what": "evaluate", "why": NO_SCORES}] for name in NAMES
    }
    assert report["evaluation"]["bytes_down"] == 0
    privacy = report["privacy"]
    assert privacy["against"] == "a server that follows the plan"
    assert privacy["mechanisms"] == [
        {"of": "updates", "noise_multiplier": 4.0, "releases": 2},
        {"of": "features", "noise_multiplier": 20.0, "releases": 2 * 2 * SAMPLES},
    ]
