"""kill -9 of the trainer and of devices while they exchange, again and again: training ends.

make faults ARGS=training-kill     many more points, drawn at random
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file

from edge_sdk.identity import Identity
from edge_sdk.training.data.load import load_dataset
from server.registry.database import open_registry
from server.registry.operator import load_or_create_operator_secret

pytestmark = pytest.mark.deadline

NAMES: Final = ("pi-0", "pi-1")
ROUNDS: Final = 3
RECIPE: Final = f"""
method = "supersfl"
[data]
name = "digits"
clients = 2
[train]
backbone = "tiny"
rounds = {ROUNDS}
batch = 32
learning_rate = 0.05
depth = 2
[round]
quorum = 0.5
step_deadline_s = 2.0
round_deadline_s = 8.0
staleness_max = 2
"""
# 96 samples in batches of 32: a round is Ready, three Features and Update of each device
CALLS_A_ROUND: Final = 5
Kill = tuple[str, int]


def enrol(state: Path, folder: Path, port: int) -> None:
    """Two devices with samples of their own, and the server's state."""
    load_or_create_operator_secret(state)
    (folder / "run.toml").write_text(RECIPE)
    data = load_dataset("digits")
    registry = open_registry(state)
    profile = {
        "name": "pi",
        "arch": "aarch64",
        "cores": 4,
        "memory_total_bytes": 4 * 2**30,
        "memory_available_bytes": 3 * 2**30,
        "accelerator": None,
        "compute_score_gflops": 2.5,
        "link_latency_ms": None,
        "link_bandwidth_mbps": None,
    }
    for place, name in enumerate(NAMES):
        device, secret = registry.redeem_token(registry.create_token(), name, profile)
        identity = Identity(f"http://127.0.0.1:{port}", device.id, device.fleet, secret)
        identity.save(folder / name)
        np.savez(
            folder / f"{name}.npz",
            x_train=data.x_train[place:192:2],
            y_train=data.y_train[place:192:2],
            x_test=data.x_test[:10],
            y_test=data.y_test[:10],
        )
    registry.close()


class Run:
    """A training whose processes are killed, and started again by a watcher.

    Args:
        kills: by process, in turn: the call before which it is killed, and which one of that name.
    """

    def __init__(self, kills: Mapping[str, list[Kill]], fork_server: Any, folder: Path, port: int):
        self._kills = {process: list(kills.get(process, [])) for process in ("trainer", *NAMES)}
        self._fork_server = fork_server
        self._folder = folder
        self._port = port
        self.killed = 0
        enrol(folder / "server", folder, port)

    def finish(self) -> dict[str, Any]:
        """Train to the end; the report."""
        running = {process: self._start(process) for process in self._kills}
        while running["trainer"].poll() != 0:
            for process, child in running.items():
                status = child.poll()
                assert status in (None, 0, 9), child.log.read_text()[-3000:]
                if status == 9:
                    self.killed += 1
                    running[process] = self._start(process)
            time.sleep(0.02)
        raw = (self._folder / "server" / "training" / "run" / "report.json").read_bytes()
        report: dict[str, Any] = orjson.loads(raw)
        return report

    def _start(self, process: str) -> Any:
        kill = self._kills[process].pop(0) if self._kills[process] else None
        if process == "trainer":
            words = {"state": str(self._folder / "server"), "port": self._port}
            words |= {"recipe": str(self._folder / "run.toml"), "resume": True}
            return self._fork_server.start("trainer", kill=kill, join_s=60, silence_s=2, **words)
        own = {"state": str(self._folder / process), "data": str(self._folder / f"{process}.npz")}
        return self._fork_server.start(
            "device", kill=kill, trainer=f"http://127.0.0.1:{self._port}", **own
        )


def check(report: dict[str, Any], folder: Path) -> None:
    """Check a training that ended: whole rounds, each update once, finite weights."""
    rows = report["rounds"]
    assert [row["round"] for row in rows] == list(range(1, ROUNDS + 1))
    counted = [
        (name, row["round"] - row["stale"].get(name, 0))
        for row in rows
        for name in row["participants"]
    ]
    assert len(counted) == len(set(counted))
    weights = load_file(report["weights"])
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    training = folder / "server" / "training" / "run"
    log = (training / "log.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line) for line in log] == rows
    assert not list((training / "late").glob("*"))


def test_training_ends_though_everybody_is_killed_in_the_middle(
    fork_server: Any, tmp_path: Path, free_port: int
) -> None:
    """FAULTS row 20: in the first messages, between steps, with updates in hand, before a save."""
    kills: dict[str, list[Kill]] = {
        "trainer": [("reply", 2), ("reply", 6), ("save", 1), ("reply", 10)],
        "pi-0": [("handle", 3), ("hand_in", 4)],
        "pi-1": [("handle", CALLS_A_ROUND)],
    }
    run = Run(kills, fork_server, tmp_path, free_port)
    report = run.finish()
    assert run.killed == sum(map(len, kills.values()))
    check(report, tmp_path)
    assert report["rounds"][-1]["merged"]


def test_training_ends_wherever_its_processes_are_killed(
    fork_server: Any,
    tmp_path: Path,
    free_port: int,
    thorough: bool,
    reached: Callable[..., None],
) -> None:
    """FAULTS row 20: trainer and devices are killed before calls drawn at random."""
    trainings, killed = (25 if thorough else 1), 0
    seed = random.randrange(2**32) if thorough else 7
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(trainings):
        kills: dict[str, list[Kill]] = {
            process: [
                (draw.choice(calls), draw.randint(1, 2 * CALLS_A_ROUND)) for _ in range(times)
            ]
            for process, calls, times in (
                ("trainer", ("reply", "reply", "save"), 3 if thorough else 1),
                ("pi-0", ("handle", "hand_in"), 2 if thorough else 1),
                ("pi-1", ("handle", "hand_in"), 2 if thorough else 0),
            )
        }
        print(kills)
        folder = tmp_path / str(number)
        folder.mkdir()
        run = Run(kills, fork_server, folder, free_port)
        report = run.finish()
        assert run.killed > 0, "no process came to the point it was to be killed at"
        check(report, folder)
        fork_server.end_all()
        killed += run.killed
    reached(
        "training-kill",
        f"{trainings} of {trainings} trainings through {killed} kills, seed {seed}",
        trainings=trainings,
        kills=killed,
    )
