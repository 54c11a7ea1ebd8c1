"""Downloads that break off, lie about their length, are damaged, or meet a full disk."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from edge_sdk.bundles.run_update import UpdateOutcome
from edge_sdk.bundles.store import BundleStore
from edge_sdk.bundles.update import update

if TYPE_CHECKING:
    from tests.edge.bundles.depot import Depot, Export

WIDE = "tiny/3/d2"


@pytest.fixture
def wide(depot: Depot, export: Export, installed: Path) -> Path:
    """exit.onnx of a third version, about 280 KB: enough pieces to break off between."""
    folder = export.write(3, width=10_000)
    depot.repository.publish_bundles(folder)
    return folder / "bundles" / "d2" / "exit.onnx"


def running(state: Path) -> str:
    return BundleStore(state).active().manifest.bundle


def incoming(state: Path) -> list[Path]:
    return list((state / "slots" / "incoming").iterdir())


def sha256_of(depot: Depot, ending: str) -> str:
    (path,) = depot.repository.targets_folder.rglob(f"*/3/d2/*{ending}")
    return path.name.split(".", 1)[0]


def test_one_flipped_byte_of_a_file_is_refused_and_the_old_bundle_kept(
    depot: Depot, installed: Path, wide: Path
) -> None:
    raw = bytearray(wide.read_bytes())
    raw[150_000] ^= 1
    depot.faults.replace["exit.onnx"] = bytes(raw)

    outcome = update(installed, WIDE)

    assert outcome.status == "refused"
    assert "SHA-256" in outcome.reason
    assert running(installed) == "tiny/1/d2"
    assert incoming(installed) == []
    # the mirror lied, not the bundle: the true one is welcome
    depot.faults.replace.clear()
    assert update(installed, WIDE).status == "installed"


def test_download_cut_in_the_middle_goes_on_where_it_broke_off(
    depot: Depot, installed: Path, wide: Path
) -> None:
    depot.faults.cuts["exit.onnx"] = [100_000]
    assert update(installed, WIDE).status == "installed"
    pieces = [(s.range, s.sent) for s in depot.served if s.path.endswith("exit.onnx")]
    assert pieces == [(None, 100_000), ("bytes=100000-", wide.stat().st_size - 100_000)]


def test_download_goes_on_from_what_a_killed_update_left(
    depot: Depot, installed: Path, wide: Path
) -> None:
    left = installed / "slots" / "incoming" / sha256_of(depot, "exit.onnx")
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(wide.read_bytes()[:250_000])
    assert update(installed, WIDE).status == "installed"
    assert depot.sent("exit.onnx") == wide.stat().st_size - 250_000
    assert incoming(installed) == []


def test_piece_damaged_by_a_power_cut_is_fetched_again(
    depot: Depot, installed: Path, wide: Path
) -> None:
    left = installed / "slots" / "incoming" / sha256_of(depot, "exit.onnx")
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(bytes(200_000))  # what ext4 leaves of unsynced data: the length, and zeros
    assert update(installed, WIDE).status == "installed"
    assert running(installed) == WIDE


def test_server_without_ranges_sends_it_all_again(
    depot: Depot, installed: Path, wide: Path
) -> None:
    depot.faults.cuts["exit.onnx"] = [100_000]
    depot.faults.no_ranges = True
    assert update(installed, WIDE).status == "installed"
    assert depot.sent("exit.onnx") == 100_000 + wide.stat().st_size


def test_link_that_brings_nothing_more_is_unreachable_and_the_piece_is_kept(
    depot: Depot, installed: Path, wide: Path
) -> None:
    depot.faults.cuts["exit.onnx"] = [100_000, 0]
    outcome = update(installed, WIDE)
    assert outcome.status == "unreachable"
    assert running(installed) == "tiny/1/d2"
    depot.served.clear()
    assert update(installed, WIDE).status == "installed"
    assert depot.sent("exit.onnx") == wide.stat().st_size - 100_000


@pytest.mark.parametrize("how", ["endless", "longer"])
def test_target_longer_than_declared_is_refused_at_the_declared_size(
    depot: Depot, installed: Path, wide: Path, how: str
) -> None:
    size = wide.stat().st_size
    if how == "endless":
        depot.faults.endless.add("exit.onnx")
    else:
        depot.faults.replace["exit.onnx"] = wide.read_bytes() + bytes(5_000_000)

    outcome = update(installed, WIDE)

    assert outcome.status == "refused"
    assert str(size) in outcome.reason
    assert running(installed) == "tiny/1/d2"
    assert incoming(installed) == []
    on_disk = sum(p.stat().st_size for p in (installed / "slots" / "b").iterdir())
    assert on_disk < size  # the small files of the bundle at most


def test_bundle_larger_than_the_disk_is_refused_before_anything_is_thrown_away(
    depot: Depot, export: Export, installed: Path, wide: Path
) -> None:
    assert update(installed, "tiny/2/d2").status == "installed"  # tiny/1 is now the way back
    with depot.repository._locked():
        metadata = depot.repository._load()
        metadata.targets.signed.targets[f"bundles/{WIDE}/exit.onnx"].length = 1 << 50
        depot.repository._release(metadata, targets=True, snapshot=True)

    outcome = update(installed, WIDE)

    assert outcome.status == "no_space"
    assert outcome.needed_bytes is not None
    assert outcome.needed_bytes >= 1 << 50
    assert outcome.available_bytes == pytest.approx(shutil.disk_usage(installed).free, rel=0.5)
    assert "needs 1.13e+09 MB, has" in outcome.reason  # 2^50 bytes
    assert depot.sent("3/d2/exit.onnx") == 0
    assert BundleStore(installed).roll_back("test").manifest.bundle == "tiny/1/d2"


@dataclass
class ShortDisk:
    """A device on a disk that fills up while a bundle is being fetched."""

    state: Path
    update: Callable[[str], UpdateOutcome]
    fill: Callable[[], None]
    relieve: Callable[[], None]


@pytest.fixture(params=["tmpfs", "rlimit"])
def short_disk(
    request: pytest.FixtureRequest, installed: Path, tmp_path: Path
) -> Iterator[ShortDisk]:
    """A real one of 1 MB where mounting is allowed, else the kernel's limit on a file's size."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "splitedge-test", str(disk)]
    if request.param == "rlimit" or subprocess.run(command, check=False).returncode != 0:
        yield _limited(installed)
        return
    try:
        state = disk / "device"
        shutil.copytree(installed, state, symlinks=True)
        ballast = disk / "ballast"
        yield ShortDisk(
            state, lambda bundle: update(state, bundle), lambda: _fill(ballast), ballast.unlink
        )
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _limited(state: Path) -> ShortDisk:
    limits = {"size": resource.RLIM_INFINITY}

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits["size"], limits["size"]))

    def run(bundle: str) -> UpdateOutcome:
        command = [sys.executable, "-P", "-m", "edge_sdk.bundles.update", "--state", str(state)]
        done = subprocess.run(
            [*command, "--bundle", bundle],
            capture_output=True,
            check=True,
            preexec_fn=limit,
        )
        return UpdateOutcome.from_json(done.stdout)

    def fill() -> None:
        limits["size"] = 100_000

    def relieve() -> None:
        limits["size"] = resource.RLIM_INFINITY

    return ShortDisk(state, run, fill, relieve)


def _fill(ballast: Path) -> None:
    """Leave less than the bundle needs, but something."""
    if not ballast.exists():
        free = shutil.disk_usage(ballast.parent).free
        ballast.write_bytes(bytes(free - 100_000))


def test_disk_that_fills_up_during_the_download_keeps_the_bundle_and_recovers(
    depot: Depot, wide: Path, short_disk: ShortDisk
) -> None:
    def fill_up() -> None:
        depot.faults.before_target = None
        short_disk.fill()

    if short_disk.state.parent.name == "disk":
        depot.faults.before_target = fill_up  # space was there when it was looked for
    else:
        short_disk.fill()

    outcome = short_disk.update(WIDE)

    assert outcome.status == "no_space"
    assert outcome.needed_bytes == wide.stat().st_size
    assert "needs 0.28" in outcome.reason
    assert running(short_disk.state) == "tiny/1/d2"
    assert incoming(short_disk.state) == []  # what was taken is given back
    short_disk.relieve()
    assert short_disk.update(WIDE).status == "installed"
    assert running(short_disk.state) == WIDE


def test_disk_that_is_full_already_is_told_apart_from_a_bad_bundle(
    depot: Depot, wide: Path, short_disk: ShortDisk
) -> None:
    short_disk.fill()
    outcome = short_disk.update(WIDE)
    assert outcome.status == "no_space"
    assert running(short_disk.state) == "tiny/1/d2"
    store = BundleStore(short_disk.state)
    assert not (short_disk.state / "quarantine.json").exists()
    assert store.active().fallback is None


def test_read_only_disk_keeps_the_bundle_running(
    depot: Depot, installed: Path, tmp_path: Path
) -> None:
    with _read_only(installed, tmp_path):
        outcome = update(installed, "tiny/2/d2")
        assert outcome.status == "refused"
        assert "check the card" in outcome.reason
        assert running(installed) == "tiny/1/d2"
    assert update(installed, "tiny/2/d2").status == "installed"


class _read_only:  # noqa: N801 (reads as the statement it is)
    """Root ignores modes, so it gets a read-only mount; anyone else gets modes."""

    def __init__(self, state: Path, tmp_path: Path) -> None:
        self.state = state
        self.mounted = False

    def __enter__(self) -> None:
        if os.geteuid() != 0:
            self._chmod(0o500)
            return
        for options in (["--bind"], ["-o", "remount,ro,bind"]):
            subprocess.run(["mount", *options, str(self.state), str(self.state)], check=True)
            self.mounted = True

    def __exit__(self, *_: object) -> None:
        if self.mounted:
            subprocess.run(["umount", str(self.state)], check=True)
        else:
            self._chmod(0o700)

    def _chmod(self, mode: int) -> None:
        for folder in (self.state, *(p for p in self.state.rglob("*") if p.is_dir())):
            folder.chmod(mode)
