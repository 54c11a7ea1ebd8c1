"""kill -9 at any moment of an update leaves the old bundle or the new one, whole, never none."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import pytest

from edge_sdk.bundle import BundleStore
from edge_sdk.golden import check_golden
from edge_sdk.update import update

if TYPE_CHECKING:
    from tests.edge.conftest import Depot, Export

# Imports the updater once and forks for each order, so that a kill costs no second of imports:
#   at N STATE BUNDLE       killed just before the N-th thing it does to a file of STATE
#   after S STATE BUNDLE    killed S seconds after it began
# and answers with the wait status: 9 killed, 0 done.
NURSERY = """
import os, signal, sys, time
from pathlib import Path
from edge_sdk.update import update

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

for line in sys.stdin:
    how, amount, state, bundle = line.split()
    child = os.fork()
    if child == 0:
        if how == "at":
            kill_at(int(amount), state)
        outcome = update(Path(state), bundle)
        os._exit(0 if outcome.status in ("installed", "unchanged") else 1)
    if how == "after":
        time.sleep(float(amount))
        os.kill(child, signal.SIGKILL)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Nursery:
    """Updates to be killed."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-c", NURSERY]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def update(self, how: str, amount: float, state: Path, bundle: str) -> int:
        """The wait status of an update that was killed, or ran to its end."""
        orders = cast("IO[str]", self._process.stdin)
        orders.write(f"{how} {amount} {state} {bundle}\n")
        orders.flush()
        return int(cast("IO[str]", self._process.stdout).readline())

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def loadable(state: Path) -> str:
    """The active bundle's name, after its graphs have run and given the golden answers."""
    active = BundleStore(state).active()
    assert active.fallback is None
    check_golden(active.folder)
    return active.manifest.bundle


def test_update_killed_at_any_touch_of_a_file_leaves_a_whole_bundle(
    depot: Depot, installed: Path, tmp_path: Path, nursery: Nursery, *, thorough: bool
) -> None:
    """From the same start each time, killed before its first, second, third ... file operation."""
    seen = set()
    number = 1
    while True:
        state = tmp_path / "state"
        shutil.copytree(installed, state, symlinks=True)
        status = nursery.update("at", number, state, "tiny/2/d2")
        assert status in (0, 9), number
        seen.add(loadable(state))
        # and the next update picks up what is there, however it was left
        if status == 9 and number % 4 == 0:
            assert update(state, "tiny/2/d2").status in ("installed", "unchanged")
            assert loadable(state) == "tiny/2/d2"
        shutil.rmtree(state)
        if status == 0:
            break
        number += 1 if thorough else 5
    assert number > 60  # it is known to touch far more: the hook saw them
    assert seen == {"tiny/1/d2", "tiny/2/d2"}


@pytest.mark.timeout(900)  # the thousand of `make faults` take five minutes
def test_updates_killed_at_random_moments_always_leave_a_whole_bundle(
    depot: Depot, export: Export, installed: Path, nursery: Nursery, *, thorough: bool
) -> None:
    """One device through kill after kill, each on top of what the one before left."""
    for version in (3, 4):
        depot.repository.publish_bundles(export.write(version, width=10_000))
    depot.faults.chunk_delay_s = 0.002  # 280 KB in 8 KB pieces: about 70 ms
    rng = random.Random(0)
    killed = 0
    for number in range(1000 if thorough else 20):
        bundle = f"tiny/{3 + number // 3 % 2}/d2"  # three tries each, then the other way
        before = loadable(installed)
        if nursery.update("after", rng.uniform(0.0, 0.5), installed, bundle) == 9:
            killed += 1
        assert loadable(installed) in (before, bundle)
    assert killed >= 5
    assert update(installed, "tiny/2/d2").status == "installed"
    assert loadable(installed) == "tiny/2/d2"
