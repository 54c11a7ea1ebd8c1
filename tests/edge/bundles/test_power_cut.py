"""A power cut at any moment of an update or a roll back: the old bundle or the new one, whole."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import pytest

from edge_sdk.bundles.golden import check_golden
from edge_sdk.bundles.store import BundleStore
from edge_sdk.bundles.update import update
from edge_sdk.errors import SplitedgeError
from tests.edge.bundles import crash_states
from tests.edge.bundles.harsh_disk import HarshDisk

if TYPE_CHECKING:
    from tests.edge.bundles.depot import Depot

OLD, NEW = "tiny/1/d2", "tiny/2/d2"
ROLL_BACK = "roll-back"
STOPPED, DONE = 0x137F, 0  # wait statuses

# Forks for each order and stops the child there, so that the disk is looked at:
#   at N STATE WHAT SYNC        just before the N-th thing it does to a file of STATE
#   after S STATE WHAT SYNC     S seconds after it began
# where WHAT is a bundle to update to or `roll-back`, and SYNC 0 leaves every fsync out. Answers
# with the wait status: stopped, or 0 when it came to its end; `kill` ends a child that is stopped.
FORK_SERVER = """
import os, signal, sys
from pathlib import Path
from edge_sdk.bundles.store import BundleStore
from edge_sdk.bundles.update import update

TOUCHES = {"open", "os.mkdir", "os.remove", "os.rename", "os.link"}
real_fsync = os.fsync

def stop_at(number, state):
    seen = 0
    def count():
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGSTOP)
    def fsync(handle):
        count()
        real_fsync(handle)
    def hook(event, arguments):
        if event in TOUCHES and state in str(arguments[:2]):
            count()
    os.fsync = fsync
    sys.addaudithook(hook)

def act(what, state):
    if what == "roll-back":
        BundleStore(state).roll_back("test")
    elif update(state, what).status != "installed":
        os._exit(1)
    os._exit(0)

def stop_child(*_):
    try:
        os.killpg(child, signal.SIGSTOP)
    except ProcessLookupError:
        pass  # it was done just before

signal.signal(signal.SIGALRM, stop_child)
for line in sys.stdin:
    if line == "kill\\n":
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print("0", flush=True)
        continue
    how, amount, state, what, sync = line.split()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # with the trial that it starts
        if how == "at":
            stop_at(int(amount), state)
        if sync == "0":
            os.fsync = lambda handle: None
        act(what, Path(state))
    if how == "after":
        signal.setitimer(signal.ITIMER_REAL, max(float(amount), 1e-3))
    status = os.waitpid(child, os.WUNTRACED)[1]
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(status, flush=True)
"""


def active(state: Path) -> str:
    """The bundle that a device finds after the cut; `none` where there is none."""
    try:
        found = BundleStore(state).active()
        check_golden(found.folder)
    except SplitedgeError:
        return "none"
    return found.manifest.bundle


class Checker:
    """Writes states into a folder and says which bundle a device finds there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[int, str] = {}

    def bundle(self, state: dict[str, bytes | None]) -> str:
        """The bundle of that state; the folder holds it until the next call."""
        key = hash(frozenset(state.items()))
        if key not in self._known:
            self.write(state)
            self._known[key] = active(self._folder)
        return self._known[key]

    def write(self, state: dict[str, bytes | None]) -> Path:
        """The folder, with that state in it."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        crash_states.write(state, self._folder)
        return self._folder


class ForkServer:
    """Forks processes that are stopped, and then killed."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-c", FORK_SERVER]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, how: str, amount: float, state: Path, what: str, *, sync: bool = True) -> int:
        """STOPPED, or DONE where it ended before."""
        return self._order(f"{how} {amount} {state} {what} {int(sync)}")

    def kill(self) -> None:
        """Kill the process that is stopped."""
        self._order("kill")

    def close(self) -> None:
        self._process.communicate()

    def _order(self, line: str) -> int:
        orders = cast("IO[str]", self._process.stdin)
        orders.write(f"{line}\n")
        orders.flush()
        return int(cast("IO[str]", self._process.stdout).readline())


class Cuts:
    """Power cuts of a device whose state is on a harsh disk; counts what is found afterwards."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._at_the_start: dict[str, Path] = {}
        self._fork_server = ForkServer()
        self.found: Counter[str] = Counter()

    def begin_with(self, name: str, state: Path) -> None:
        """Have a disk that holds this state, of that name."""
        image = self._folder / f"{name}.img"
        with HarshDisk.made(image, self._folder / "made").mounted() as made:
            shutil.copytree(state, made / "device", symlinks=True)
            os.sync()
        self._at_the_start[name] = image

    @contextmanager
    def stopped(
        self, start: str, how: str, amount: float, what: str, *, sync: bool = True
    ) -> Iterator[tuple[HarshDisk, int]]:
        """The disk under a process that does its work and is stopped; and its wait status."""
        image = self._folder / "live.img"
        shutil.copyfile(self._at_the_start[start], image)
        disk = HarshDisk(image, self._folder / "live")
        with disk.mounted() as folder:
            status = self._fork_server.run(how, amount, folder / "device", what, sync=sync)
            assert status in (STOPPED, DONE)
            try:
                yield disk, status
            finally:
                if status == STOPPED:
                    self._fork_server.kill()

    def look(self, disk: HarshDisk) -> str:
        """The bundle that a device finds which loses power now."""
        image = self._folder / "cut.img"
        disk.copy(image)
        with HarshDisk(image, self._folder / "cut").mounted() as cut:
            found = active(cut / "device")
        self.found[found] += 1
        return found

    def close(self) -> None:
        self._fork_server.close()


@pytest.fixture
def cuts(tmp_path: Path) -> Iterator[Cuts]:
    """Cuts of a device with the old bundle, and of one with the new."""
    folder = tmp_path / "cuts"
    folder.mkdir()
    cuts = Cuts(folder)
    yield cuts
    cuts.close()


@pytest.mark.fault_figures
def test_images_of_a_power_cut_hold_a_whole_bundle(
    depot: Depot,
    installed: Path,
    tmp_path: Path,
    cuts: Cuts,
    reached: Callable[..., None],
) -> None:
    """FAULTS row 2: what the disk holds at each operation of a real ext4, and without fsync.

    Two images a point: of the moment itself, and after another program's fsync, which has the
    journal write the names.
    """
    wanted, controls = 500, 50
    cuts.begin_with("old", installed)
    both = tmp_path / "both"
    shutil.copytree(installed, both, symlinks=True)
    assert update(both, NEW).status == "installed"
    cuts.begin_with("new", both)

    began = time.monotonic()
    works = (("old", NEW), ("new", ROLL_BACK))
    points = 0
    for start, what in works:
        number, status = 0, STOPPED
        while status == STOPPED:
            number += 1
            with cuts.stopped(start, "at", number, what) as (disk, status):
                cuts.look(disk)
                disk.commit_names()
                cuts.look(disk)
        points += number
    update_s = (time.monotonic() - began) / points
    draw = random.Random(4)
    while cuts.found.total() < wanted:
        with cuts.stopped("old", "after", draw.uniform(0, 2 * update_s), NEW) as (disk, _):
            cuts.look(disk)
            disk.commit_names()
            cuts.look(disk)
    seen = Counter(cuts.found)

    cuts.found.clear()
    for _ in range(controls):
        with cuts.stopped("old", "at", 0, NEW, sync=False) as (disk, status):
            assert status == DONE
            disk.commit_names()
            cuts.look(disk)
    corrupt = cuts.found["none"] / controls
    reached(
        "power-cut",
        f"{seen['none']} of {seen.total()} images corrupt, at {points} operations and at random"
        f" moments; without fsync {corrupt:.0%} of {controls}",
        images=seen.total(),
        corrupt=seen["none"],
        control_corrupt=corrupt,
    )
    assert seen["none"] == 0
    assert min(seen[OLD], seen[NEW]) > 20
    assert corrupt >= 0.9


def test_no_state_that_a_power_cut_may_leave_is_without_a_bundle(
    depot: Depot,
    installed: Path,
    tmp_path: Path,
    *,
    thorough: bool,
    reached: Callable[..., None],
) -> None:
    """FAULTS row 2: an update and a roll back, cut off at each operation; and without fsync."""
    before = crash_states.tree_of(installed)
    moments = crash_states.record(installed, NEW, ROLL_BACK)
    assert len(moments) > 80  # it is known to do far more: the record is whole
    done = [moment.path for moment in moments if moment.kind == "done"]
    assert done == [NEW, ROLL_BACK]
    checker, draw = Checker(tmp_path / "cut"), random.Random(2)
    drawn_each = 40 if thorough else 3
    seen: dict[str, int] = {OLD: 0, NEW: 0, "none": 0}
    for moment, disk in zip(moments, crash_states.disks(before, moments), strict=True):
        states = [crash_states.least(disk), crash_states.renamed_without_bytes(disk)]
        states += [crash_states.drawn(disk, draw) for _ in range(drawn_each)]
        found = [checker.bundle(state) for state in states]
        for bundle in found:
            seen[bundle] += 1
        if moment.kind == "done":  # what was reported as done outlasts the cut
            assert set(found) == {NEW if moment.path == NEW else OLD}
    control = [
        checker.bundle(crash_states.renamed_without_bytes(disk)) == "none"
        for moment, disk in zip(
            moments, crash_states.disks(before, moments, synced=False), strict=True
        )
        if moment.kind == "done"
    ]
    reached(
        "power-cut-states",
        f"{seen['none']} of {sum(seen.values()):,} states without a bundle; without fsync"
        f" {sum(control)} of {len(control)}",
        states=sum(seen.values()),
        corrupt=seen["none"],
    )
    assert seen["none"] == 0
    assert min(seen[OLD], seen[NEW]) > 20  # both sides of the swap were there
    assert all(control)


def test_an_update_after_a_power_cut_goes_on(depot: Depot, installed: Path, tmp_path: Path) -> None:
    """FAULTS row 2: whatever a cut left of downloads and metadata, the next update installs."""
    before = crash_states.tree_of(installed)
    moments = crash_states.record(installed, NEW)
    checker, draw = Checker(tmp_path / "cut"), random.Random(3)
    everything = list(crash_states.disks(before, moments))
    for disk in draw.sample(everything, 4):
        state = checker.write(crash_states.drawn(disk, draw))
        assert update(state, NEW).status in ("installed", "unchanged")
        assert active(state) == NEW


def test_a_new_file_is_empty_until_it_is_synced_and_nameless_until_its_folder_is() -> None:
    """FAULTS row 2: the model itself, on the record of one file made, written and renamed."""
    tree = {"d": (1, None)}
    moments = [
        crash_states.Moment("step", "", tree),
        crash_states.Moment("step", "", {**tree, "d/t": (2, b"new")}),
        crash_states.Moment("sync", "d/t", {**tree, "d/t": (2, b"new")}),
        crash_states.Moment("step", "", {**tree, "d/f": (2, b"new")}),
        crash_states.Moment("sync", "d", {**tree, "d/f": (2, b"new")}),
    ]
    seen = list(crash_states.disks(tree, moments))
    empty = {"d": None}
    assert [crash_states.least(disk) for disk in seen] == [empty] * 4 + [{**empty, "d/f": b"new"}]
    named = [crash_states.renamed_without_bytes(disk) for disk in seen]
    assert named[1:] == [{**empty, "d/t": b""}, {**empty, "d/t": b"new"}, {**empty, "d/f": b"new"},
                         {**empty, "d/f": b"new"}]  # fmt: skip
    draw = random.Random(0)
    states = [crash_states.drawn(seen[1], draw) for _ in range(200)]
    assert {state.get("d/t") for state in states} == {None, b"", b"n", b"ne", b"new", bytes(3)}
