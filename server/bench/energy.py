"""Energy of one answer on this device: an exit, and an offload against it.

The agent prices its answers itself (edge_sdk.answers.price): by sensors of this machine once they
are calibrated, else at 1 W a busy core. A figure in mJ is then one in milliseconds of CPU time;
multiply it by the watts of your board's core. The ratio does not depend on the watts.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Final

import numpy as np

from edge_sdk.answers.prediction import DEVICE, SERVER, Prediction
from edge_sdk.session import Array
from edge_sdk.settings import Power
from server.bench.measure import Row, figure
from server.bench.models import export_random
from server.bench.offload import NEVER, BenchAgent, open_agent

ALWAYS: Final = 1e9
CALLS: Final = 100
# Sensors are calibrated by windows of 2 s with and without load.
CALIBRATION_S: Final = 60.0
PAUSE_S: Final = 2.0
BURST_S: Final = 2.0


def run(work: Path, *, quick: bool) -> list[Row]:
    """Millijoules of an exit and of an offload, and their ratio. They have no goal."""
    state = work / "server"
    export_random("cnn6", (1, 28, 28), (2,), state / "models")
    x = np.random.default_rng(1).normal(size=(1, 28, 28)).astype(np.float32)
    power = Power(idle_w=0.0, busy_w=float(os.cpu_count() or 1))
    with open_agent(work, state, "embedded:127.0.0.1:0", power=power) as agent:
        _calibrate(agent, x)
        exits, offloads = _alternate(agent, x, rounds=5 if quick else 15)
        energy = agent.status().energy
    assert energy is not None
    source = "at 1 W a core" if energy.source == "declared" else f"by {energy.source}"
    exit_mj, offload_mj = (statistics.median(found) * 1e3 for found in (exits, offloads))
    name = f"energy of an answer, cnn6 depth 2, {source}"
    return [
        figure(f"{name}: exit", exit_mj, "mJ", None),
        figure(f"{name}: offload", offload_mj, "mJ", None),
        figure(f"{name}: offload against exit", offload_mj / exit_mj, "x", exit_mj),
    ]


def _calibrate(agent: BenchAgent, x: Array) -> None:
    """Vary the load until the sensors are calibrated; without sensors there is nothing to do."""
    energy = agent.status().energy
    if energy is None or energy.machine_joules is None:
        return
    end = time.monotonic() + CALIBRATION_S
    while time.monotonic() < end:
        energy = agent.status().energy
        if energy is None or energy.source in {"rapl", "ina"}:
            return
        burst = time.monotonic() + BURST_S
        while time.monotonic() < burst:
            agent.predict(x, threshold=ALWAYS)
        time.sleep(PAUSE_S)


def _alternate(agent: BenchAgent, x: Array, *, rounds: int) -> tuple[list[float], list[float]]:
    """Mean joules of exits and of offloads, by round; they take turns, as in `take_turns`."""
    exits: list[float] = []
    offloads: list[float] = []
    for _ in range(rounds):
        for found, threshold, source in ((exits, ALWAYS, DEVICE), (offloads, NEVER, SERVER)):
            answers = [agent.predict(x, threshold=threshold, deadline_s=5.0) for _ in range(CALLS)]
            found.append(statistics.fmean(_joules(answer, source) for answer in answers))
    return exits, offloads


def _joules(answer: Prediction, source: str) -> float:
    if answer.source != source or answer.joules is None:
        raise RuntimeError(f"energy benchmark: {answer.source} in place of {source}")
    return answer.joules
