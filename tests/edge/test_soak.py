"""A server, its broker and agents at work for long: memory and descriptors stay flat."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fleet import Fleet

pytestmark = pytest.mark.deadline

SHORT_S = 4.0
SAMPLES = 60
SETTLING = 0.4  # share of the time in which caches and pools fill
AGENTS = ("soak-0", "soak-1")

# Every second input is offloaded; a line for each hundred answers says how many came from where.
AGENT = """
import collections, sys, time
from pathlib import Path
import numpy as np
from edge_sdk import AgentSettings, EdgeAgent

state, samples = Path(sys.argv[1]), np.load(sys.argv[2])
sources = collections.Counter()
with EdgeAgent.open(state, AgentSettings(deadline_s=2.0, late_answers=True)) as agent:
    thresholds = (-1.0, 100.0)
    at = 0
    while True:
        x = samples[at % len(samples)]
        sources[agent.predict(x, threshold=thresholds[at % 2]).source] += 1
        for late in agent.late_answers():
            agent.acknowledge(late.id)
        at += 1
        if at % 100 == 0:
            print(sources["device"], sources["server"], sources["fallback"], flush=True)
        time.sleep(0.02)
"""


def processes(fleet: Fleet, agents: list[subprocess.Popen[str]]) -> dict[str, psutil.Process]:
    """All processes of the fleet, by name."""
    server = psutil.Process(fleet.pid)
    found = {"server": server}
    found |= {f"broker {number}": child for number, child in enumerate(server.children())}
    return found | {
        name: psutil.Process(agent.pid) for name, agent in zip(AGENTS, agents, strict=True)
    }


def megabytes_an_hour(times_s: list[float], sizes_mb: list[float]) -> float:
    """The slope of the line that fits best."""
    return 3600 * float(np.polyfit(times_s, sizes_mb, 1)[0])


def test_memory_and_descriptors_stay_flat(
    fleet: Fleet,
    digits: Digits,
    tmp_path: Path,
    *,
    thorough: bool,
    soak_s: float,
    reached: Callable[..., None],
) -> None:
    """FAULTS row 22: nothing grows while devices exit, offload and are answered."""
    lasting_s = soak_s if thorough else SHORT_S
    samples = tmp_path / "x.npy"
    np.save(samples, digits.x)
    agents = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", AGENT, str(fleet.device(name)), str(samples)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in AGENTS
    ]
    try:
        for agent in agents:
            assert agent.stdout is not None
            device, server, fallback = map(int, agent.stdout.readline().split())
            assert device == 50
            assert server > 40, f"{fallback} fallbacks"
        watched = processes(fleet, agents)
        times: list[float] = []
        sizes: dict[str, list[float]] = {name: [] for name in watched}
        handles: dict[str, list[int]] = {name: [] for name in watched}
        began = time.monotonic()
        while (now := time.monotonic() - began) < lasting_s:
            if now >= SETTLING * lasting_s:
                times.append(now)
                for name, process in watched.items():
                    sizes[name].append(process.memory_info().rss / 1e6)
                    handles[name].append(process.num_fds())
            time.sleep(lasting_s / SAMPLES)
        assert all(agent.poll() is None for agent in agents)
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    growth = {name: megabytes_an_hour(times, sizes[name]) for name in watched}
    worst = max(growth, key=lambda name: growth[name])
    descriptors = {name: max(found[-3:]) - max(found[:3]) for name, found in handles.items()}
    reached(
        "soak",
        f"{lasting_s / 60:.0f} minutes, the last {100 * (1 - SETTLING):.0f} % measured: "
        + ", ".join(f"{name} {growth[name]:+.1f} MB/h" for name in watched)
        + f"; descriptors {max(descriptors.values()):+d} at most",
        minutes=lasting_s / 60,
        worst_mb_an_hour=growth[worst],
        descriptors=max(descriptors.values()),
    )
    assert max(descriptors.values()) <= 2  # a request of the moment, no growth
    if thorough:  # in seconds there is no slope to speak of
        assert growth[worst] < 1, worst
