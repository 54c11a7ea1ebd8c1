"""Downloads that break off, lie about their length, are damaged, or meet a full disk."""

from __future__ import annotations

import contextlib
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from benchmarks.mqtt.certificates import self_signed
from edge_sdk.bundles.download import ServerClient, download
from edge_sdk.bundles.run_update import UpdateOutcome
from edge_sdk.bundles.store import BundleStore, FileRecord
from edge_sdk.bundles.update import update
from edge_sdk.errors import LinkError
from edge_sdk.identity import Identity
from tests.edge.full_disk import read_only

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
    """FAULTS row 17."""
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
    """FAULTS row 17."""
    depot.faults.cuts["exit.onnx"] = [100_000]
    assert update(installed, WIDE).status == "installed"
    pieces = [(s.range, s.sent) for s in depot.served if s.path.endswith("exit.onnx")]
    assert pieces == [(None, 100_000), ("bytes=100000-", wide.stat().st_size - 100_000)]


def test_download_goes_on_from_what_a_killed_update_left(
    depot: Depot, installed: Path, wide: Path
) -> None:
    """FAULTS row 17."""
    left = installed / "slots" / "incoming" / sha256_of(depot, "exit.onnx")
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(wide.read_bytes()[:250_000])
    assert update(installed, WIDE).status == "installed"
    assert depot.sent("exit.onnx") == wide.stat().st_size - 250_000
    assert incoming(installed) == []


def test_piece_damaged_by_a_power_cut_is_fetched_again(
    depot: Depot, installed: Path, wide: Path
) -> None:
    """FAULTS rows 2 and 17."""
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
    """FAULTS row 28."""
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
    """FAULTS row 6."""
    assert update(installed, "tiny/2/d2").status == "installed"  # tiny/1 is now the way back
    with depot.repository.locked():
        metadata = depot.repository.metadata.load()
        metadata.targets.signed.targets[f"bundles/{WIDE}/exit.onnx"].length = 1 << 50
        depot.repository.metadata.release(metadata, targets=True, snapshot=True)

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
    """FAULTS row 6."""

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


def test_read_only_disk_keeps_the_bundle_running(depot: Depot, installed: Path) -> None:
    """FAULTS row 6."""
    with read_only(installed):
        outcome = update(installed, "tiny/2/d2")
        assert outcome.status == "refused"
        assert "check the card" in outcome.reason
        assert running(installed) == "tiny/1/d2"
    assert update(installed, "tiny/2/d2").status == "installed"


@pytest.mark.parametrize("name", ["a", "b", "incoming"])
def test_links_among_the_slots_are_replaced_and_what_they_show_is_left_alone(
    depot: Depot, installed: Path, wide: Path, tmp_path: Path, name: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "letter").write_text("mine")
    shutil.rmtree(installed / "slots" / name, ignore_errors=True)
    (installed / "slots" / name).symlink_to(elsewhere)
    assert update(installed, WIDE).status == "installed"
    assert running(installed) == WIDE
    assert [path.name for path in elsewhere.iterdir()] == ["letter"]


def test_link_in_place_of_a_download_is_not_written_through(
    depot: Depot, installed: Path, wide: Path, tmp_path: Path
) -> None:
    letter = tmp_path / "letter"
    letter.write_text("mine")
    incoming_folder = installed / "slots" / "incoming"
    incoming_folder.mkdir(exist_ok=True)
    (incoming_folder / sha256_of(depot, "exit.onnx")).symlink_to(letter)
    update(installed, WIDE)
    assert letter.read_text() == "mine"
    assert running(installed) in {"tiny/1/d2", WIDE}


@pytest.mark.deadline
def test_server_that_drips_is_given_up(tmp_path: Path) -> None:
    """FAULTS row 17: bytes come again and again, each before the link counts as dead."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        dripping = threading.Thread(target=_drip, args=(listening, ended), daemon=True)
        dripping.start()
        identity = Identity(f"http://127.0.0.1:{port}", "pi-4", "default", "x" * 43, None)
        client = ServerClient(identity, check_dates=True, patience_s=0.2)
        part, began = tmp_path / "part", time.monotonic()
        with pytest.raises(LinkError, match="expected at least 1000 bytes a second"):
            download(client, f"{identity.server}/file", FileRecord("0" * 64, 500_000), part)
        assert time.monotonic() - began < 15
        assert 0 < part.stat().st_size < 5_000  # kept: the next update goes on from there
        ended.set()
    dripping.join(10)


@pytest.mark.deadline
@pytest.mark.parametrize("tls", [False, True])
def test_server_that_drips_the_head_of_its_answer_is_given_up(tmp_path: Path, tls: bool) -> None:
    """FAULTS row 17: the bytes of the head, each of which starts the socket's timeout again."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        url, ca, context = f"http://127.0.0.1:{port}", None, None
        if tls:
            url = f"https://127.0.0.1:{port}"
            ca, key = self_signed(tmp_path)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(ca, key)
        arguments = (listening, ended, context)
        dripping = threading.Thread(target=_drip_head, args=arguments, daemon=True)
        dripping.start()
        identity = Identity(url, "pi-4", "default", "x" * 43, ca)
        client, began = ServerClient(identity, check_dates=True, patience_s=0.3), time.monotonic()
        with pytest.raises(LinkError, match="cannot be reached") as refused:
            client.read(f"{url}/tuf/metadata/timestamp.json", 1_000)
        assert time.monotonic() - began < 8
        own = [one for one in psutil.Process().net_connections("tcp") if one.raddr]
        assert not [one for one in own if one.raddr.port == port], refused  # which holds its frames
        ended.set()
    dripping.join(10)


def _drip_head(
    listening: socket.socket, ended: threading.Event, tls: ssl.SSLContext | None
) -> None:
    """Answer each request with a head that has no end, a byte every 20 ms."""
    listening.settimeout(0.1)
    while not ended.is_set():
        try:
            peer: socket.socket = listening.accept()[0]
        except OSError:  # nobody came
            continue
        with contextlib.suppress(OSError):
            peer.settimeout(5)
            if tls is not None:
                peer = tls.wrap_socket(peer, server_side=True)
            peer.recv(10_000)
            peer.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while not ended.is_set():
                peer.sendall(b"x")
                time.sleep(0.02)
        peer.close()


def _drip(listening: socket.socket, ended: threading.Event) -> None:
    """Answer each request with a promise, and a byte every 20 ms."""
    listening.settimeout(0.1)
    while not ended.is_set():
        try:
            peer, _ = listening.accept()
        except OSError:  # nobody came
            continue
        with peer, contextlib.suppress(OSError):
            asked = peer.recv(10_000).decode()
            start = int(asked.partition("bytes=")[2].partition("-")[0] or 0)
            status = "206 Partial Content" if start else "200 OK"
            peer.sendall(
                f"HTTP/1.1 {status}\r\nContent-Length: {500_000 - start}\r\n"
                f"Content-Range: bytes {start}-499999/500000\r\n\r\n".encode()
            )
            while not ended.is_set():
                peer.sendall(b"x")
                time.sleep(0.02)
