"""kill -9 at any moment of an update leaves the old bundle or the new one, whole, never none."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import pytest

from edge_sdk.bundles.golden import check_golden
from edge_sdk.bundles.store import BundleStore
from edge_sdk.bundles.update import update

if TYPE_CHECKING:
    from tests.edge.bundles.depot import Depot, Export

# Imports the updater once and forks for each order, so that a kill costs no second of imports:
#   at N STATE WHAT         killed just before the N-th thing it does to a file of STATE
#   after S STATE WHAT      killed S seconds after it began
# where WHAT is the bundle to update to, or `commit` of the inactive slot as it is, or `roll-back`;
# and answers with the wait status: 9 killed, 0 done.
FORK_SERVER = """
import os, signal, sys
from pathlib import Path
from edge_sdk.bundles.store import BundleStore
from edge_sdk.bundles.update import update

TOUCHES = {"open", "os.mkdir", "os.remove", "os.rename", "os.symlink", "fcntl.flock"}

def kill_at(number, state):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        if event in TOUCHES and (event == "fcntl.flock" or state in str(arguments[:2])):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def act(what, state):
    store = BundleStore(state)
    if what == "commit":
        slot = store.inactive_slot()
        store.commit(slot, store.record(slot))
    elif what == "roll-back":
        store.roll_back("test")
    elif update(state, what).status not in ("installed", "unchanged"):
        os._exit(1)
    os._exit(0)

def kill_child(*_):
    try:
        os.kill(child, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it was done just before

signal.signal(signal.SIGALRM, kill_child)
for line in sys.stdin:
    how, amount, state, what = line.split()
    child = os.fork()
    if child == 0:
        if how == "at":
            kill_at(int(amount), state)
        act(what, Path(state))
    if how == "after":
        signal.setitimer(signal.ITIMER_REAL, max(float(amount), 1e-3))
    status = os.waitpid(child, 0)[1]
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(status, flush=True)
"""


# An agent as it starts after the kill; it ends at once, so that nothing of it is in the way.
FIRST_ANSWER = """
import os, sys
from pathlib import Path
import numpy as np
from edge_sdk import AgentSettings, EdgeAgent

agent = EdgeAgent.open(Path(sys.argv[1]), AgentSettings(offload=False, threshold=1e9))
spec = agent.manifest.input
agent.predict(np.zeros(spec.shape, spec.dtype))
agent.close()
os._exit(0)
"""


class ForkServer:
    """Forks processes that are killed."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-c", FORK_SERVER]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, how: str, amount: float, state: Path, what: str) -> int:
        """The wait status of a process that was killed, or ran to its end."""
        orders = cast("IO[str]", self._process.stdin)
        orders.write(f"{how} {amount} {state} {what}\n")
        orders.flush()
        return int(cast("IO[str]", self._process.stdout).readline())

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    fork_server = ForkServer()
    yield fork_server
    fork_server.close()


def loadable(state: Path) -> str:
    """The active bundle's name, after its graphs have run and given the golden answers."""
    active = BundleStore(state).active()
    check_golden(active.folder)
    return active.manifest.bundle


def first_answer_s(state: Path) -> float:
    """Seconds from the start of a process to its agent's first answer."""
    command = [sys.executable, "-P", "-c", FIRST_ANSWER, str(state)]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return time.monotonic() - began


@pytest.mark.parametrize("what", ["commit", "roll-back"])
def test_swap_killed_at_any_touch_of_a_file_leaves_a_whole_bundle(
    depot: Depot, installed: Path, tmp_path: Path, fork_server: ForkServer, what: str
) -> None:
    """FAULTS row 2: every point of the two moments that decide; both slots hold a bundle."""
    assert update(installed, "tiny/2/d2").status == "installed"
    seen = set()
    number = status = 0
    while status == 9 or number == 0:
        number += 1
        state = tmp_path / "state"
        shutil.copytree(installed, state, symlinks=True)
        status = fork_server.run("at", number, state, what)
        assert status in (0, 9)
        seen.add(loadable(state))
        shutil.rmtree(state)
    assert number > 8
    assert seen == {"tiny/1/d2", "tiny/2/d2"}


def test_update_killed_at_any_touch_of_a_file_leaves_a_whole_bundle(
    depot: Depot, installed: Path, tmp_path: Path, fork_server: ForkServer, *, thorough: bool
) -> None:
    """FAULTS row 2: from the same start, killed before its first, second, third ... operation."""
    seen = set()
    number = 1
    while True:
        state = tmp_path / "state"
        shutil.copytree(installed, state, symlinks=True)
        status = fork_server.run("at", number, state, "tiny/2/d2")
        assert status in (0, 9), number
        seen.add(loadable(state))
        # and the next update goes on from there
        if status == 9 and number % 4 == 0:
            assert update(state, "tiny/2/d2").status in ("installed", "unchanged")
            assert loadable(state) == "tiny/2/d2"
        shutil.rmtree(state)
        if status == 0:
            break
        number += 1 if thorough else 5
    assert number > 60  # it is known to touch far more: the hook saw them
    assert seen == {"tiny/1/d2", "tiny/2/d2"}


@pytest.mark.timeout(3600)  # the thousand kills of `make faults` take some ten minutes
def test_updates_killed_at_random_moments_always_leave_a_whole_bundle(
    depot: Depot,
    export: Export,
    installed: Path,
    fork_server: ForkServer,
    *,
    thorough: bool,
    reached: Callable[..., None],
) -> None:
    """FAULTS row 2: one device through kill after kill, each on top of what the one before left."""
    for version in (3, 4):
        depot.repository.publish_bundles(export.write(version, width=10_000))
    depot.faults.chunk_delay_s = 0.002  # 280 KB in 8 KB pieces: about 70 ms
    began = time.monotonic()
    assert fork_server.run("after", 60, installed, "tiny/3/d2") == 0
    whole_s = time.monotonic() - began
    rng = random.Random(0)
    wanted_kills = 1000 if thorough else 20
    killed = 0
    restarts_s: list[float] = []
    while killed < wanted_kills:
        before = loadable(installed)
        wanted = "tiny/4/d2" if before == "tiny/3/d2" else "tiny/3/d2"
        if fork_server.run("after", rng.uniform(0.0, whole_s), installed, wanted) == 9:
            killed += 1
            if killed % (50 if thorough else 10) == 0:
                restarts_s.append(first_answer_s(installed))
        assert loadable(installed) in (before, wanted)
    reached(
        "update-kill",
        f"{killed:,} kills, 0 corrupt, 0 without a bundle; the slowest first answer of"
        f" {len(restarts_s)} restarts after {max(restarts_s):.2f} s",
        kills=killed,
        slowest_restart_s=max(restarts_s),
    )
    # a machine that runs all tests may hold one of two up, not both
    assert (max if thorough else min)(restarts_s) < 2
    assert update(installed, "tiny/2/d2").status == "installed"
    assert loadable(installed) == "tiny/2/d2"
