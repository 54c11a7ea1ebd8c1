"""New roots and new keys: devices follow the chain, and stolen keys lose their power."""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, Root, Snapshot, Targets, Timestamp

from edge_sdk.bundles.store import BundleStore
from edge_sdk.bundles.update import update
from edge_sdk.errors import ConfigurationError, StorageError
from server.errors import ArtifactError
from server.signing.artifacts import ArtifactRepository
from server.signing.keys import ONLINE, ROLES, RootKeys, encrypt_keys, is_encrypted, read_key
from server.signing.report import problems, signing_report
from tests.edge.bundles.kill_at import KILL_AT

if TYPE_CHECKING:
    from tests.edge.bundles.depot import Depot

NEW = "tiny/2/d2"
PASSPHRASE = b"correct horse battery staple"


def keys_of(repository: ArtifactRepository) -> dict[str, CryptoSigner]:
    """A copy of every key in the state, as a thief takes it."""
    return {
        role: repository.keys.signer(role) for role in ROLES if repository.keys.path(role).exists()
    }


def newest(repository: ArtifactRepository) -> Root:
    return Metadata[Root].from_bytes(repository.root_bytes).signed


def test_device_that_was_away_over_a_renewal_and_two_rotations_follows(
    depot: Depot, installed: Path
) -> None:
    before = keys_of(depot.repository)
    assert depot.repository.rotate() == 2  # a renewal
    assert depot.repository.rotate(ROLES) == 3
    between = keys_of(depot.repository)
    assert depot.repository.rotate(ROLES) == 4
    after = keys_of(depot.repository)
    for role in ROLES:
        keyids = {keys[role].public_key.keyid for keys in (before, between, after)}
        assert len(keyids) == 3
    assert update(installed, NEW).status == "installed"
    asked = [one.path for one in depot.served if one.path.endswith(".root.json")]
    assert [path.rsplit("/", 1)[1] for path in asked] == [f"{n}.root.json" for n in (2, 3, 4, 5)]
    # the next update starts from what it knows, and a root that was only renewed changes no key
    depot.repository.rotate()
    depot.served.clear()
    assert update(installed, NEW).status == "unchanged"


def test_running_server_goes_on_signing_after_another_process_rotated(
    depot: Depot, installed: Path
) -> None:
    server = depot.repository  # keeps nothing in memory
    ArtifactRepository(server.keys_folder.parent).rotate(ROLES)
    server.refresh_timestamp()
    assert update(installed, NEW).status == "installed"


def test_stolen_keys_sign_nothing_that_devices_take_after_a_rotation(
    depot: Depot, installed: Path
) -> None:
    repository = depot.repository
    stolen = keys_of(repository)
    repository.rotate(ROLES)
    assert update(installed, "tiny/1/d2").status == "unchanged"

    # the thief's next root, and timestamp
    root = Metadata[Root].from_bytes(repository.root_bytes)
    root.signed.version += 1
    root.sign(stolen["root"])
    depot.faults.replace["3.root.json"] = root.to_bytes()
    assert update(installed, NEW).status == "refused"
    depot.faults.replace.clear()
    timestamp = Metadata[Timestamp].from_file(str(repository.metadata_folder / "timestamp.json"))
    timestamp.signed.version += 100
    timestamp.sign(stolen["timestamp"])
    depot.faults.replace["timestamp.json"] = timestamp.to_bytes()
    assert update(installed, NEW).status == "refused"
    assert BundleStore(installed).active().manifest.bundle == "tiny/1/d2"
    depot.faults.replace.clear()
    assert update(installed, NEW).status == "installed"


def fast_forward(repository: ArtifactRepository, stolen: dict[str, CryptoSigner]) -> dict[str, Any]:
    """Metadata of the highest versions, signed with stolen keys; the files by name."""
    top = 2**31
    folder = repository.metadata_folder
    timestamp = Metadata[Timestamp].from_file(str(folder / "timestamp.json"))
    version = timestamp.signed.snapshot_meta.version
    snapshot = Metadata[Snapshot].from_file(str(folder / f"{version}.snapshot.json"))
    version = snapshot.signed.meta["targets.json"].version
    targets = Metadata[Targets].from_file(str(folder / f"{version}.targets.json"))
    for metadata in (targets, snapshot, timestamp):
        metadata.signed.version = top
        metadata.signatures.clear()
    targets.sign(stolen["targets"])
    meta = snapshot.signed.meta["targets.json"]
    meta.version, meta.hashes, meta.length = top, None, None
    snapshot.sign(stolen["snapshot"])
    meta = timestamp.signed.snapshot_meta
    meta.version, meta.hashes, meta.length = top, None, None
    timestamp.sign(stolen["timestamp"])
    return {
        "timestamp.json": timestamp.to_bytes(),
        f"{top}.snapshot.json": snapshot.to_bytes(),
        f"{top}.targets.json": targets.to_bytes(),
    }


@pytest.mark.parametrize("where", ["on the way", "in the repository"])
def test_fast_forward_is_undone_by_new_online_keys(
    depot: Depot, installed: Path, where: str
) -> None:
    """FAULTS row 19: with stolen keys, versions of 2**31 would shut every later one out."""
    repository = depot.repository
    forged = fast_forward(repository, keys_of(repository))
    if where == "on the way":
        depot.faults.replace = dict(forged)
    else:
        for name, raw in forged.items():
            (repository.metadata_folder / name).write_bytes(raw)
    assert update(installed, "tiny/1/d2").status == "unchanged"
    if where == "on the way":
        depot.faults.replace.clear()
        repository.refresh_timestamp()
        outcome = update(installed, NEW)
        assert outcome.status == "refused"
        assert "version" in outcome.reason

    repository.rotate(ONLINE)

    assert update(installed, NEW).status == "installed"
    known = Metadata[Timestamp].from_file(str(installed / "tuf" / "metadata" / "timestamp.json"))
    assert (known.signed.version < 2**31) == (where == "on the way")


def test_replayed_repository_of_before_a_rotation_is_refused(depot: Depot, installed: Path) -> None:
    """FAULTS row 19: the old timestamp is whole, and signed with a key of before."""
    old = (depot.repository.metadata_folder / "timestamp.json").read_bytes()
    depot.repository.rotate(ONLINE)
    assert update(installed, "tiny/1/d2").status == "unchanged"
    depot.faults.replace["timestamp.json"] = old
    assert update(installed, NEW).status == "refused"


def test_server_restored_with_an_older_root_is_told_from_other_signatures(
    depot: Depot, installed: Path, tmp_path: Path
) -> None:
    state = depot.repository.keys_folder.parent
    shutil.copytree(state, tmp_path / "backup")
    depot.repository.rotate(ROLES)
    assert update(installed, "tiny/1/d2").status == "unchanged"
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "backup", state)
    depot.repository.refresh_timestamp()
    refused = update(installed, NEW)
    assert refused.status == "refused"
    assert "not signed by the keys of root version 2, the newest" in refused.reason
    assert "restore a newer backup, or enrol this device again" in refused.reason


def test_frozen_repository_says_since_when_it_is_not_fresh(depot: Depot, installed: Path) -> None:
    """FAULTS row 19: the same files for longer than a timestamp lives."""
    fresh_at = update(installed, "tiny/1/d2").fresh_at
    assert fresh_at is not None
    timestamp = Metadata[Timestamp].from_file(
        str(depot.repository.metadata_folder / "timestamp.json")
    )
    timestamp.signed.version += 1
    timestamp.signed.expires = datetime.now(UTC) - timedelta(seconds=1)
    timestamp.sign(keys_of(depot.repository)["timestamp"])
    depot.faults.replace["timestamp.json"] = timestamp.to_bytes()
    outcome = update(installed, NEW)
    assert (outcome.status, outcome.fresh_at) == ("unreachable", fresh_at)
    assert "no fresh metadata" in outcome.reason


@pytest.mark.parametrize("role", ["root", "timestamp"])
def test_endless_metadata_without_a_declared_length_is_refused(
    depot: Depot, installed: Path, role: str
) -> None:
    """FAULTS row 19: no other file vouches for the length of these two."""
    name = "2.root.json" if role == "root" else "timestamp.json"
    depot.faults.replace[name] = b"{"
    depot.faults.endless.add(name)
    assert update(installed, NEW).status == "refused"
    # what the device did not read filled the sockets' buffers
    assert sum(one.sent for one in depot.served if one.path.endswith(name)) < 20_000_000


def test_two_of_three_offline_root_keys_sign_and_one_does_not(
    depot: Depot, installed: Path, tmp_path: Path
) -> None:
    repository = depot.repository
    stolen = keys_of(repository)["root"]
    offline, other = tmp_path / "offline", tmp_path / "other"
    repository.rotate(["root"], new_root_keys=RootKeys(offline, 3, 2))
    assert not repository.keys.path("root").exists()
    assert newest(repository).roles["root"].threshold == 2
    # the keys are shared out; each place alone is not enough
    other.mkdir()
    for name in ("root-v2-2.pem", "root-v2-3.pem"):
        (offline / name).rename(other / name)
    (other / "root-v2-3.pem").rename(tmp_path / "third.pem")
    with pytest.raises(ArtifactError, match=r"asks for 2 of its 3 root keys .* 1 of them"):
        repository.rotate(folders=[offline])
    with pytest.raises(ConfigurationError, match="connect the medium"):
        repository.rotate(folders=[tmp_path / "away"])
    assert repository.rotate(folders=[offline, other]) == 3
    (offline / "root-v2-1.pem").unlink()
    # the server needs none of them
    repository.open_or_create()
    assert update(installed, NEW).status == "installed"
    # and the key that had lain in the state has lost its power
    root = Metadata[Root].from_bytes(repository.root_bytes)
    root.signed.version += 1
    root.sign(stolen)
    depot.faults.replace["4.root.json"] = root.to_bytes()
    assert update(installed, NEW).status == "refused"


def test_new_server_with_an_offline_root_starts_without_it_ever_after(tmp_path: Path) -> None:
    keys = RootKeys(tmp_path / "usb", 3, 2)
    state = tmp_path / "state"
    ArtifactRepository(state, root_keys=keys).open_or_create()
    assert sorted(path.name for path in (tmp_path / "usb").iterdir()) == [
        f"root-v1-{number}.pem" for number in (1, 2, 3)
    ]
    assert not (state / "keys" / "root.pem").exists()
    (tmp_path / "usb").rename(tmp_path / "drawer")
    for options in (keys, RootKeys()):
        ArtifactRepository(state, root_keys=options).open_or_create()
    assert not (tmp_path / "usb").exists()
    with pytest.raises(ArtifactError, match="0 of them were found"):
        ArtifactRepository(state).rotate()
    assert ArtifactRepository(state).rotate(folders=[tmp_path / "drawer"]) == 2


def test_root_keys_of_another_server_are_never_replaced(tmp_path: Path) -> None:
    keys = RootKeys(tmp_path / "usb")
    first = ArtifactRepository(tmp_path / "first", root_keys=keys)
    first.open_or_create()
    key = (tmp_path / "usb" / "root-v1-1.pem").read_bytes()
    second = ArtifactRepository(tmp_path / "second", root_keys=keys)
    with pytest.raises(ConfigurationError, match="root key of another server"):
        second.open_or_create()
    assert (tmp_path / "usb" / "root-v1-1.pem").read_bytes() == key
    assert first.rotate(folders=[tmp_path / "usb"]) == 2
    assert second.roots.newest_version == 0


def test_offline_root_keys_of_a_root_that_could_not_be_written_are_deleted(tmp_path: Path) -> None:
    usb = tmp_path / "usb"
    new = ArtifactRepository(tmp_path / "new", root_keys=RootKeys(usb, 2, 1))
    obstacle = new.metadata_folder / ".1.root.json.tmp"
    obstacle.mkdir(parents=True)
    with pytest.raises(StorageError):
        new.open_or_create()
    assert list(usb.iterdir()) == []
    obstacle.rmdir()
    new.open_or_create()  # as the running server does by itself
    assert len(list(usb.iterdir())) == 2
    (new.metadata_folder / ".2.root.json.tmp").mkdir()
    for roles in ([], ["root"]):
        with pytest.raises(StorageError):
            new.rotate(roles, folders=[usb], new_root_keys=RootKeys(usb, 2, 1))
        assert sorted(path.name for path in usb.iterdir()) == ["root-v1-1.pem", "root-v1-2.pem"]


def test_lock_that_cannot_be_made_is_an_error_of_the_disk(tmp_path: Path) -> None:
    repository = ArtifactRepository(tmp_path)
    repository.open_or_create()
    (tmp_path / "keys" / ".lock").unlink()
    (tmp_path / "keys" / ".lock").mkdir()  # root may write everywhere, but not open a folder
    with pytest.raises(StorageError, match="cannot be written"):
        repository.refresh_timestamp()


def test_state_with_a_root_key_is_not_taken_for_an_offline_one(tmp_path: Path) -> None:
    ArtifactRepository(tmp_path / "state").open_or_create()
    for folder, why in ((tmp_path / "usb", "move-offline"), (tmp_path / "state" / "x", "move")):
        with pytest.raises(ConfigurationError, match=why):
            ArtifactRepository(tmp_path / "state", root_keys=RootKeys(folder)).open_or_create()
    inside = ArtifactRepository(tmp_path / "new", root_keys=RootKeys(tmp_path / "new" / "root"))
    with pytest.raises(ConfigurationError, match="outside the state folder"):
        inside.open_or_create()


def test_root_is_renewed_on_a_machine_that_has_only_the_roots(
    depot: Depot, installed: Path, tmp_path: Path
) -> None:
    repository, usb = depot.repository, tmp_path / "usb"
    repository.rotate(["root"], new_root_keys=RootKeys(usb))
    elsewhere = ArtifactRepository(tmp_path / "laptop")
    elsewhere.metadata_folder.mkdir(parents=True)
    for version in (1, 2):
        name = f"{version}.root.json"
        (elsewhere.metadata_folder / name).write_bytes(repository.roots.path(version).read_bytes())
    assert elsewhere.rotate(folders=[usb]) == 3
    repository.roots.path(3).write_bytes(elsewhere.root_bytes)
    assert update(installed, NEW).status == "installed"
    assert (installed / "tuf" / "metadata" / "root_history" / "3.root.json").exists()


def test_keys_are_encrypted_and_open_with_their_passphrase_alone(
    depot: Depot, installed: Path, tmp_path: Path
) -> None:
    clear = depot.repository
    state = clear.keys_folder.parent
    assert len(encrypt_keys([clear.keys_folder], PASSPHRASE, None)) == 4
    assert all(b"ENCRYPTED" in path.read_bytes() for path in clear.keys_folder.glob("*.pem"))
    for passphrase, why in (
        (None, "the key is encrypted; give --key-passphrase-file"),
        (b"wrong passphrase", "the passphrase does not open this key"),
    ):
        with pytest.raises(ArtifactError, match=why):
            ArtifactRepository(state, passphrase=passphrase).open_or_create()
    opened = ArtifactRepository(state, passphrase=PASSPHRASE)
    opened.open_or_create()
    assert update(installed, NEW).status == "installed"
    opened.rotate(ROLES)  # the next keys are encrypted too
    assert all(is_encrypted(path) for path in clear.keys_folder.glob("*.pem"))
    assert update(installed, NEW).status == "unchanged"
    report = signing_report(ArtifactRepository(state))  # needs no passphrase
    assert [(one.role, one.encrypted) for one in report.roles] == [(role, True) for role in ROLES]

    encrypt_keys([clear.keys_folder], b"another passphrase", PASSPHRASE)
    with pytest.raises(ArtifactError, match="does not open"):
        opened.open_or_create()
    ArtifactRepository(state, passphrase=b"another passphrase").open_or_create()


def test_offline_root_keys_are_encrypted_too(tmp_path: Path) -> None:
    keys = RootKeys(tmp_path / "usb", 2, 1)
    repository = ArtifactRepository(tmp_path / "state", passphrase=PASSPHRASE, root_keys=keys)
    repository.open_or_create()
    with pytest.raises(ArtifactError, match="the key is encrypted"):
        read_key(tmp_path / "usb" / "root-v1-1.pem", None)
    assert repository.rotate(folders=[tmp_path / "usb"]) == 2


def test_conversion_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    """Some keys are encrypted, others are not: the server starts, and the same command ends it."""
    state = tmp_path / "state"
    repository = ArtifactRepository(state, passphrase=PASSPHRASE)
    repository.open_or_create()
    root = repository.keys.signer("root")
    repository.keys.path("root").write_bytes(root.private_bytes)
    repository.open_or_create()
    assert [path.name for path in repository.keys.in_the_clear()] == ["root.pem"]
    assert "root.pem: not encrypted, although there is a passphrase" in problems(repository)[0]
    encrypt_keys([repository.keys_folder], PASSPHRASE, None)
    assert repository.keys.in_the_clear() == []
    assert problems(repository) == []


def test_token_of_before_a_rotation_enrols_with_the_root_that_it_names(depot: Depot) -> None:
    repository = depot.repository
    first = repository.root_bytes
    repository.rotate(ROLES)
    fingerprint = hashlib.sha256(first).hexdigest()[:32]
    assert repository.root_for_enrolment(fingerprint) == first
    for other in ("", "0" * 32):
        assert repository.root_for_enrolment(other) == repository.root_bytes != first


def test_root_that_its_predecessor_did_not_sign_is_never_written(depot: Depot) -> None:
    """Devices could not follow, and a version that is served once stays."""
    repository = depot.repository
    current = repository.roots.newest()
    following = copy.deepcopy(current)
    following.signed.version += 1
    key = CryptoSigner.generate_ed25519()
    for keyid in list(following.signed.roles["root"].keyids):
        following.signed.revoke_key(keyid, "root")
    following.signed.add_key(key.public_key, "root")
    with pytest.raises(ArtifactError, match="asks for 1 of its 1 root keys"):
        repository.roots.append(following, [key])
    assert repository.roots.newest_version == 1


# Rotates all keys in forked children, each killed one file operation later than the one before.
ROTATED = (
    KILL_AT
    + """
from pathlib import Path
from server.signing.artifacts import ArtifactRepository
from server.signing.keys import ROLES

TOUCHES = {"open", "os.rename", "os.remove", "fcntl.flock"}
folder, step = sys.argv[1], int(sys.argv[2])
repository = ArtifactRepository(Path(folder))

status, number = 9, 1
while status == 9:
    number += step
    child = os.fork()
    if child == 0:
        kill_at(number)
        repository.rotate(ROLES)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print(status, flush=True)
    sys.stdin.readline()
"""
)


def test_rotation_that_is_killed_leaves_a_repository_that_devices_follow(
    depot: Depot, installed: Path, *, thorough: bool
) -> None:
    """The server completes or forgets it; killed at each file operation, or at every fifth."""
    folder = depot.repository.keys_folder.parent
    command = [sys.executable, "-P", "-c", ROTATED, str(folder), "1" if thorough else "5"]
    statuses = []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            statuses.append(int(line))
            depot.repository.open_or_create()
            assert not list(depot.repository.keys_folder.glob("*.next.pem"))
            outcome = update(installed, "tiny/1/d2")
            assert outcome.status == "unchanged", outcome
            process.stdin.write("go on\n")
            process.stdin.flush()
    assert statuses.pop() == 0
    assert set(statuses) == {signal.SIGKILL}
    assert len(statuses) > 5
    assert newest(depot.repository).version > 2
    assert update(installed, NEW).status == "installed"
