"""Backup of a server's state, running or not, and its restoration into an empty folder.

The registry is copied first, at one moment, then the keys and the signed metadata under the
repository's lock, then the signed files, which never change, models and the rest: the server signs
on meanwhile. A model goes from the disk to the bundles and last into the registry, so all that the
copied registry names is there later too, unless it was removed meanwhile: then the backup begins
again. Links are followed, so that what lies on another disk is in it.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_sdk.durable import make_folder, sync_folder, sync_tree, write_atomic
from edge_sdk.errors import ConfigurationError, StorageError
from edge_sdk.installation import installed_version
from edge_sdk.state import StateLock
from server.deployment.publisher import digest_of_hashes
from server.errors import ConflictError
from server.registry.copies.rows import check_empty, load_copy, save_copy
from server.registry.database import Registry, open_registry
from server.registry.location import (
    LOCATION_NAME,
    RegistryLocation,
    existing_location,
    registry_file,
)
from server.registry.records import ModelVersion
from server.signing.artifacts import RESTORED_NAME, ArtifactRepository
from server.state import check_server_state
from server.upkeep.archive import BackupWriter, extract

ATTEMPTS: Final = 3
REGISTRY_NAME: Final = "registry.db"
_FOLDER_PREFIX: Final = ".backup-"
# what signs, and what is signed
_SIGNED: Final = ("keys", "tuf")
# the registry is copied by its rows; a training has checkpoints of its own, a broker is set up anew
_LEFT_OUT: Final = (REGISTRY_NAME, LOCATION_NAME, "training", "mosquitto")


@dataclass(frozen=True, slots=True)
class Saved:
    """A backup that was made.

    Attributes:
        incomplete: versions of models whose files are damaged on the server itself.
    """

    files: int
    devices: int
    incomplete: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Restored:
    """A state that was restored.

    Attributes:
        made_at: time of the backup, UTC seconds since 1970.
        root_version: of its newest root; 0 if nothing was signed yet.
    """

    made_at: float
    devices: int
    registry: str
    root_version: int


def back_up(state: Path, out: Path) -> Saved:
    """Write all of a server's state to a tar file or a folder, readable by its owner only.

    Left out are trainings, which have checkpoints, and the files of a broker that the server runs.

    Raises: ConfigurationError if `state` is no server's, or `out` exists or lies in it, or a link
        in it leads nowhere;
        RegistryError; StorageError; ConflictError if models are removed all the time;
        StateInUseError while another backup is made.
    """
    check_server_state(state)
    if out.resolve().is_relative_to(state.resolve()):
        raise ConfigurationError(
            f"{out}: lies in the state folder, so that the next backup would hold it with all its"
            " keys; give a place outside it"
        )
    for _ in range(ATTEMPTS):
        writer = BackupWriter(out)
        try:
            saved = _save(state, writer)
            if saved is not None:
                return saved
        finally:
            writer.discard()
    raise ConflictError(
        f"{state}: models were removed during {ATTEMPTS} attempts; try again when nobody does"
    )


def restore(backup: Path, state: Path, location: RegistryLocation | None = None) -> Restored:
    """Make a server's state from a backup.

    Args:
        state: a folder that does not exist or is empty.
        location: an empty database for the registry; by default a file in the state folder.
    Raises: ConfigurationError if the backup is damaged, or the state or the database not empty;
        RegistryError; StorageError. Nothing is left in `state` then.
    """
    if state.exists() and not (state.is_dir() and not any(state.iterdir())):
        raise ConfigurationError(f"{state}: expected an empty folder or none; give another --state")
    if location is not None:
        check_empty(location)
    parent = state.absolute().parent
    make_folder(parent)
    folder = Path(tempfile.mkdtemp(prefix=f".{state.name}-", dir=parent))
    try:
        listed = extract(backup, folder)
        devices = _open_registry(folder, state, location)
        _allow_search(folder)
        # devices may have seen later versions of the signed files than those of the backup
        make_folder(folder / "tuf")  # which an archive leaves out while nothing is signed
        write_atomic(folder / "tuf" / RESTORED_NAME, b"")
        root_version = ArtifactRepository(folder).roots.newest_version
        sync_tree(folder)
        if state.exists():
            state.rmdir()
        folder.rename(state)
        sync_folder(parent)
    except OSError as err:
        raise StorageError(f"{state}: cannot be written ({err.strerror}); check the disk") from err
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    place = str(location or RegistryLocation.in_folder(state))
    return Restored(listed.made_at, devices, place, root_version)


def _save(state: Path, writer: BackupWriter) -> Saved | None:
    """Write one backup; None if what the copied registry names was removed meanwhile."""
    made_at = time.time()
    with _own_folder(state) as folder:
        copy = folder / REGISTRY_NAME
        save_copy(existing_location(state), copy)
        writer.add(REGISTRY_NAME, copy)
        with closing(_open_file(folder)) as registry:
            versions = registry.catalogue.versions()
            devices = len(registry.devices())
    artifacts = ArtifactRepository(state)
    with artifacts.locked():
        signed = [file for part in _SIGNED for file in _files(state / part)]
        targets = [file for file in signed if file.is_relative_to(artifacts.targets_folder)]
        _add_all(writer, state, (file for file in signed if file not in targets))
    if not _add_all(writer, state, targets):
        return None
    for path in sorted(state.iterdir()):
        if path.name not in (*_SIGNED, *_LEFT_OUT) and _is_kept(path):
            _add_all(writer, state, _files(path))
    missing = _incomplete(versions, writer.files)
    if missing:
        with closing(open_registry(state)) as registry:
            if set(registry.catalogue.versions()) != set(versions):
                return None
    writer.finish(made_at, installed_version())
    return Saved(len(writer.files), devices, tuple(map(str, missing)))


@contextmanager
def _own_folder(state: Path) -> Iterator[Path]:
    """A folder for this backup; those of backups that were killed are deleted."""
    with StateLock(state, "backup"):
        for left in state.glob(f"{_FOLDER_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX, dir=state) as name:
            yield Path(name)


def _add_all(writer: BackupWriter, state: Path, files: Iterable[Path]) -> bool:
    """Add files; whether none was deleted meanwhile."""
    whole = True
    for file in files:
        try:
            writer.add(file.relative_to(state).as_posix(), file)
        except FileNotFoundError:  # of the models' files it is found out afterwards
            whole = False
    return whole


def _files(path: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Plain files of a folder, without temporary ones; links are followed.

    Args:
        above: the folders that the path lies in, where they really are.
    Raises: ConfigurationError for a link that leads nowhere, or to a folder that it lies in.
    """
    if path.is_file():
        yield path
    elif path.is_dir():
        place = path.resolve()
        if place in above:
            raise ConfigurationError(f"{path}: a link to a folder that it lies in; take it away")
        for inner in sorted(path.iterdir()):
            if _is_kept(inner):
                yield from _files(inner, (*above, place))
    elif path.is_symlink():
        raise ConfigurationError(
            f"{path}: a link that leads nowhere, so the backup would lack what belongs there; mend"
            " it or take it away"
        )


def _is_kept(path: Path) -> bool:
    name = path.name
    return not (
        name.startswith((".", f"{REGISTRY_NAME}-", f"{REGISTRY_NAME}.")) or name.endswith(".lock")
    )


def _incomplete(versions: tuple[ModelVersion, ...], files: Mapping[str, str]) -> list[ModelVersion]:
    """The versions whose files are not all in the backup, or not those that were published."""
    found = []
    for one in versions:
        prefix = f"models/{one}/"
        inner = {
            name.removeprefix(prefix): digest
            for name, digest in files.items()
            if name.startswith(prefix)
        }
        if "model.json" not in inner or one.digest not in (None, digest_of_hashes(inner)):
            found.append(one)
    return found


def _open_registry(folder: Path, state: Path, location: RegistryLocation | None) -> int:
    """Bring the copied registry to its place and to this program's version; counts its devices."""
    copy = registry_file(folder)
    # a path as it is used later, should the location be the state's own file
    elsewhere = location is not None and not location.same_database(
        RegistryLocation.in_folder(state)
    )
    if location is not None and elsewhere:
        load_copy(copy, location)
        location.save(folder)
        opened = Registry.open(location.address)
    else:
        opened = _open_file(folder)
    with closing(opened) as registry:
        devices = len(registry.devices())
        registry.trail.record("operator", "server.restore", "")
    if elsewhere:
        copy.unlink()
    for left in folder.glob(f"{REGISTRY_NAME}.bak-*"):
        left.unlink()
    return devices


def _open_file(folder: Path) -> Registry:
    """The copied registry in a folder; the folder's name may hold any letters."""
    return open_registry(folder, RegistryLocation.in_folder(folder))


def _allow_search(folder: Path) -> None:
    """Give the folders the modes that a server gives them."""
    folder.chmod(0o700)
