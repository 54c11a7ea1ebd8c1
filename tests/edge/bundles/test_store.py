"""Two slots and a way back: flash damage, roll back, quarantine, a second agent."""

from __future__ import annotations

import fcntl
import hashlib
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from edge_sdk.bundles.store import MAX_UNPROVEN_STARTS, BundleRecord, BundleStore, FileRecord
from edge_sdk.durable import write_atomic
from edge_sdk.errors import (
    BundleError,
    ConfigurationError,
    EnrolmentError,
    NoBundleError,
    StateInUseError,
)
from edge_sdk.identity import Identity
from edge_sdk.state import LOOK_S, StateLock

if TYPE_CHECKING:
    from tests.edge.bundles.depot import Export


def record_of(folder: Path) -> BundleRecord:
    files = {}
    for path in folder.iterdir():
        raw = path.read_bytes()
        files[path.name] = FileRecord(hashlib.sha256(raw).hexdigest(), len(raw))
    return BundleRecord(f"tiny/{folder.parents[1].name}/d2", files)


def install(store: BundleStore, export: Export, version: int) -> BundleRecord:
    """What the updater does once the files are here."""
    folder = export.write(version) / "bundles" / "d2"
    record = record_of(folder)
    slot = store.inactive_slot()
    store.clear(slot)
    for path in folder.iterdir():
        (store.folder(slot) / path.name).write_bytes(path.read_bytes())
    store.commit(slot, record)
    return record


@pytest.fixture
def store(tmp_path: Path) -> BundleStore:
    return BundleStore(tmp_path / "device")


def flip(path: Path, at: int = 20) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def name(store: BundleStore) -> str:
    return store.active().manifest.bundle


def test_device_without_a_bundle_is_told_what_to_do(store: BundleStore) -> None:
    with pytest.raises(NoBundleError, match="splitedge agent update"):
        store.active()


def test_bundles_take_turns_in_the_two_slots(store: BundleStore, export: Export) -> None:
    slots = []
    for version in (1, 2, 3):
        install(store, export, version)
        assert name(store) == f"tiny/{version}/d2"
        slots.append(store.active().slot)
    assert slots == ["a", "b", "a"]


@pytest.mark.parametrize("file", ["exit.onnx", "golden.bin", "manifest.json"])
def test_flash_damage_is_found_at_start_and_the_other_slot_used(
    store: BundleStore, export: Export, file: str
) -> None:
    """FAULTS row 32."""
    install(store, export, 1)
    install(store, export, 2)
    flip(store.active().folder / file)

    active = store.active()

    assert active.manifest.bundle == "tiny/1/d2"
    assert active.fallback is not None
    assert file in active.fallback
    assert store.active().fallback is None  # noted: from now on this is the active one
    assert not store.is_quarantined(record_of(export.root / "tiny/2/bundles/d2").digest)


def test_missing_short_and_linked_files_count_as_damage(
    store: BundleStore, export: Export, tmp_path: Path
) -> None:
    """FAULTS row 32."""
    install(store, export, 1)
    path = store.active().folder / "exit.onnx"
    whole = path.read_bytes()
    (tmp_path / "elsewhere").write_bytes(whole)
    path.unlink()
    with pytest.raises(NoBundleError, match="No such file"):
        store.active()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NoBundleError, match="symbolic links"):
        store.active()
    path.unlink()
    path.write_bytes(whole[:-1])
    with pytest.raises(NoBundleError, match=f"expected {len(whole)} bytes"):
        store.active()
    path.write_bytes(whole)
    assert name(store) == "tiny/1/d2"


def test_damage_in_both_slots_names_both(store: BundleStore, export: Export) -> None:
    """FAULTS row 32."""
    install(store, export, 1)
    install(store, export, 2)
    for slot in ("a", "b"):
        flip(store.state / "slots" / slot / "exit.onnx")
    with pytest.raises(NoBundleError, match=r"slot b, tiny/2/d2: exit.*slot a, tiny/1/d2: exit"):
        store.active()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"active": "c"}', bytes(300)])
def test_damaged_active_json_is_no_bundle_rather_than_a_crash(
    store: BundleStore, export: Export, content: bytes
) -> None:
    install(store, export, 1)
    (store.state / "active.json").write_bytes(content)
    with pytest.raises(NoBundleError):
        store.active()
    install(store, export, 2)
    assert name(store) == "tiny/2/d2"


def test_commit_refuses_files_that_are_not_what_was_signed(
    store: BundleStore, export: Export
) -> None:
    install(store, export, 1)
    record = install(store, export, 2)
    flip(store.folder("a") / "exit.onnx")
    with pytest.raises(BundleError, match="expected SHA-256"):
        store.commit("a", BundleRecord("tiny/1/d2", record.files))
    assert name(store) == "tiny/2/d2"


def test_active_slot_is_neither_cleared_nor_committed_over(
    store: BundleStore, export: Export
) -> None:
    record = install(store, export, 1)
    with pytest.raises(BundleError, match="active"):
        store.clear("a")
    with pytest.raises(BundleError, match="active"):
        store.commit("a", record)
    assert name(store) == "tiny/1/d2"


def test_cleared_slot_is_no_way_back(store: BundleStore, export: Export) -> None:
    """While its files are being replaced it would be found damaged, or worse, half of each."""
    install(store, export, 1)
    install(store, export, 2)
    store.clear("a")
    with pytest.raises(NoBundleError, match="quarantined"):
        store.roll_back("slow")


def test_roll_back_quarantines_the_bundle_by_content(store: BundleStore, export: Export) -> None:
    """FAULTS row 5."""
    install(store, export, 1)
    bad = install(store, export, 2)

    active = store.roll_back("answers drift")

    assert active.manifest.bundle == "tiny/1/d2"
    assert active.fallback is not None
    assert "answers drift" in active.fallback
    assert store.is_quarantined(bad.digest)
    assert store.why_quarantined(bad.digest) == "answers drift"
    assert name(store) == "tiny/1/d2"
    # the same content under another name is the same content
    assert store.is_quarantined(BundleRecord("tiny/7/d2", bad.files).digest)
    with pytest.raises(NoBundleError):  # and it is not gone back to either
        store.roll_back("this one too")


def test_only_the_bundle_that_failed_is_left(store: BundleStore, export: Export) -> None:
    failed = install(store, export, 1)
    install(store, export, 2)  # as an update does between the failure and the way back
    assert store.roll_back("out of memory", digest=failed.digest).manifest.bundle == "tiny/2/d2"
    assert not store.is_quarantined(failed.digest)
    assert name(store) == "tiny/2/d2"


def test_quarantine_with_an_end_ends_and_is_better_than_no_bundle(
    store: BundleStore, export: Export
) -> None:
    install(store, export, 1)
    held = install(store, export, 2)
    assert store.roll_back("out of memory", hold_s=3600).manifest.bundle == "tiny/1/d2"
    assert store.why_quarantined(held.digest) == "out of memory"
    # the other one fails for good: the one that is held may have its memory again
    assert store.roll_back("answers drift").manifest.bundle == "tiny/2/d2"
    assert name(store) == "tiny/2/d2"
    store.quarantine(held, "out of memory", hold_s=-1)
    assert not store.is_quarantined(held.digest)


def test_bundle_that_never_lives_through_its_health_window_is_left(
    store: BundleStore, export: Export
) -> None:
    """FAULTS row 5."""
    store.confirm(install(store, export, 1).digest)
    install(store, export, 2)
    for _ in range(MAX_UNPROVEN_STARTS):  # each start ends in a crash
        store.count_start()
        assert name(store) == "tiny/2/d2"
    store.count_start()
    assert name(store) == "tiny/1/d2"


def test_unproven_bundle_with_no_way_back_is_better_than_none(
    store: BundleStore, export: Export
) -> None:
    install(store, export, 1)
    for _ in range(3 * MAX_UNPROVEN_STARTS):
        store.count_start()
    assert name(store) == "tiny/1/d2"


def test_confirmed_bundle_may_be_started_for_ever(store: BundleStore, export: Export) -> None:
    store.confirm(install(store, export, 1).digest)
    for _ in range(3 * MAX_UNPROVEN_STARTS):
        store.count_start()
    assert name(store) == "tiny/1/d2"


def test_a_bundle_that_an_update_made_active_is_not_proven_by_the_one_that_runs(
    store: BundleStore, export: Export
) -> None:
    """FAULTS row 5: the agent runs the first one until it has loaded the second."""
    first = install(store, export, 1)
    install(store, export, 2)
    store.confirm(first.digest)
    for _ in range(MAX_UNPROVEN_STARTS + 1):
        store.count_start()
    assert name(store) == "tiny/1/d2"


def test_start_that_ended_well_is_taken_back(store: BundleStore, export: Export) -> None:
    install(store, export, 1)
    install(store, export, 2)
    store.forget_start()  # of none: nothing to take back
    for _ in range(3 * MAX_UNPROVEN_STARTS):
        store.count_start()
        store.forget_start()
    assert name(store) == "tiny/2/d2"


def test_quarantine_keeps_the_newest_hundred(store: BundleStore) -> None:
    records = [
        BundleRecord("tiny/1/d2", {"exit.onnx": FileRecord(f"{number:064x}", 1)})
        for number in range(120)
    ]
    for record in records:
        store.quarantine(record, "test")
    kept = [store.is_quarantined(record.digest) for record in records]
    assert sum(kept) == 100
    assert kept[-1]


def test_record_refuses_names_that_leave_the_folder() -> None:
    """FAULTS row 28."""
    with pytest.raises(BundleError, match="plain file name"):
        BundleRecord("tiny/1/d2", {"../agent.json": FileRecord("0" * 64, 1)})


def test_a_look_at_the_lock_keeps_no_program_out(tmp_path: Path) -> None:
    StateLock(tmp_path).release()
    with (tmp_path / "agent.lock").open("rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(LOOK_S / 5, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        StateLock(tmp_path).release()


def test_second_agent_on_a_state_folder_is_told_who_the_first_is(tmp_path: Path) -> None:
    """FAULTS row 30."""
    code = (
        "import sys; from pathlib import Path; from edge_sdk.state import StateLock\n"
        "lock = StateLock(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-P", "-c", code, str(tmp_path)]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdout.readline() == b"locked\n"
    try:
        with pytest.raises(StateInUseError, match=f"process {first.pid} already runs as agent"):
            StateLock(tmp_path)
        StateLock(tmp_path, "update").release()  # an updater may run at the same time
    finally:
        first.kill()
        first.communicate()
    StateLock(tmp_path).release()  # nothing stale is left of a killed one


def test_authority_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for ca in (Path("hub.pem"), Path("pi/ca.pem")):
        Identity("https://hub:8000", "pi-4", "barn", "s", ca).save(Path("pi"))
        monkeypatch.chdir("/")
        assert Identity.load(tmp_path / "pi").ca == tmp_path / ca
        monkeypatch.chdir(tmp_path)
    (tmp_path / "pi").rename(tmp_path / "moved")  # its own copy goes with it
    assert Identity.load(tmp_path / "moved").ca == tmp_path / "moved" / "ca.pem"


def test_identity_is_private_and_kept_out_of_logs(tmp_path: Path) -> None:
    """FAULTS row 34."""
    identity = Identity("https://hub:8000", "pi-4", "barn", "s3cret", tmp_path / "ca.pem")
    identity.save(tmp_path)
    assert Identity.load(tmp_path) == identity
    assert stat.S_IMODE((tmp_path / "agent.json").stat().st_mode) == 0o600
    assert "s3cret" not in repr(identity)
    assert identity.authorization == "Bearer pi-4:s3cret"
    assert identity.url("tuf/metadata/") == "https://hub:8000/tuf/metadata/"


def test_identity_says_what_is_wrong_with_its_file(tmp_path: Path) -> None:
    with pytest.raises(EnrolmentError, match="not enrolled"):
        Identity.load(tmp_path)
    for content in (b"{", b"{}", b"[]", b"null"):
        (tmp_path / "agent.json").write_bytes(content)
        with pytest.raises(ConfigurationError, match="enrol again"):
            Identity.load(tmp_path)
    with pytest.raises(ConfigurationError, match="expected http"):
        Identity("ftp://hub", "pi-4", "barn", "s3cret")


def test_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    write_atomic(path, b"old")
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from edge_sdk.durable import write_atomic\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "write_atomic(Path(sys.argv[1]), bytes(1_000_000))"
    )
    command = [sys.executable, "-P", "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "StorageError" in done.stderr
    assert "needs 1 MB" in done.stderr
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
