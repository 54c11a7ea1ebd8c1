"""The report's account of noise on real devices, in rounds that a kill may interrupt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_sdk.errors import StorageError
from edge_sdk.identity import Identity
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.device.session import TrainingSession
from edge_sdk.training.device.trainer_client import TrainerClient
from edge_sdk.training.protocol.noise import NO_SCORES
from edge_sdk.wire.address import Address
from server.registry.database import open_registry
from server.registry.operator import load_or_create_operator_secret
from server.training.fleet import trainer
from server.training.fleet.settings import TrainerSettings
from server.training.fleet.started_rounds import RoundJournal
from server.training.recipe.recipe import read_recipe
from server.training.run.build import load_data
from server.training.run.checkpoint import save_checkpoint
from tests.training import worlds

NAMES = ("pi-0", "pi-1")
PROFILE = worlds.PROFILE | {"memory_total_bytes": 4 * 2**30}
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


class KilledError(Exception):
    """The trainer ends here."""


@pytest.fixture
def training(tmp_path: Path, free_port: int) -> Iterator[Any]:
    """Trains with two devices that hold samples out: `training(resume=...)`, as often as wanted."""
    load_or_create_operator_secret(tmp_path)
    data = load_data(RECIPE)
    held_out = data.x_test[:10], data.y_test[:10]
    sessions, threads = [], []
    with_devices = open_registry(tmp_path)
    for at, name in enumerate(NAMES):
        mine = slice(at * SAMPLES, (at + 1) * SAMPLES)
        client = TrainingClient(name, data.x_train[mine], data.y_train[mine], held_out=held_out)
        device, secret = with_devices.redeem_token(with_devices.create_token(), name, PROFILE)
        identity = Identity("http://127.0.0.1:1", device.id, device.fleet, secret)
        sessions.append(
            TrainingSession(client, TrainerClient(identity, f"http://127.0.0.1:{free_port}"))
        )
        threads.append(threading.Thread(target=sessions[-1].run, daemon=True))
        threads[-1].start()
    with_devices.close()

    def run(*, resume: bool = False) -> dict[str, Any]:
        address = Address("127.0.0.1", free_port)
        settings = TrainerSettings(tmp_path, "run", address, join_s=30, resume=resume)
        return trainer.train(RECIPE, settings, say=print, on_round=print)

    yield run
    for session, thread in zip(sessions, threads, strict=True):
        session.stop()
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


def test_what_a_killed_round_gave_away_counts(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill after round 2's updates have come, and before anything of it is on the disk."""

    def killed(folder: Path, world: Any, rows: list[Any]) -> Path:
        if rows[-1]["round"] == 2:
            raise KilledError
        return save_checkpoint(folder, world, rows)

    with monkeypatch.context() as patch:
        patch.setattr("server.training.run.record.save_checkpoint", killed)
        with pytest.raises(KilledError):
            training()
    with (tmp_path / "training" / "run" / "begun.jsonl").open("ab") as file:
        file.write(b'{"round": 2, "sam')  # another kill, as the record was written
    privacy = training(resume=True)["privacy"]
    assert privacy["interrupted_rounds"] == 1
    assert privacy["mechanisms"] == [
        {"of": "updates", "noise_multiplier": 4.0, "releases": 3},
        {"of": "features", "noise_multiplier": 20.0, "releases": 3 * 2 * SAMPLES},
    ]


def test_rounds_in_no_row_are_those_interrupted(tmp_path: Path) -> None:
    first = RoundJournal(tmp_path, resume=False)
    first.begin(1, ["a", "b"], {"a": 3, "b": 4})
    first.begin(2, ["a", "b"], {"a": 3, "b": 4})
    again = RoundJournal(tmp_path, resume=True)
    again.begin(2, ["a", "b"], {"a": 5})  # b is away, and may come back meanwhile
    again.begin(3, ["a"], {"a": 5})
    rows = [{"round": number} for number in (1, 2)]
    assert again.interrupted(rows) == [{"a": 3, "b": 4}, {"a": 5}]
    assert RoundJournal(tmp_path, resume=True).interrupted(rows) == again.interrupted(rows)
    assert RoundJournal(tmp_path, resume=False).interrupted(rows) == []
    (tmp_path / "begun.jsonl").write_bytes(b"{}\n")
    with pytest.raises(StorageError, match="not known any more"):
        RoundJournal(tmp_path, resume=True)
