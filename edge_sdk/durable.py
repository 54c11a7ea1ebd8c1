"""Durable files: after a power cut a file is complete, either the old one or the new one.

The new file is written under a temporary name, synced and renamed over the old one, and its folder
is synced: without the syncs the rename can reach the disk before the bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edge_sdk.errors import StorageError

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace the file at `path`; its folder must exist. One writer per path at a time.

    Raises: StorageError if the disk is full, read-only or failing; the old file stays.
    """
    # the name is fixed, so the next write replaces what a killed one left
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        # 0600 until it is complete: others can never read a secret, not even briefly
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as err:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise storage_error(path, len(data), err) from err


def make_folder(path: Path, *, mode: int = 0o755) -> None:
    """Create the folder and its missing parents, and sync them.

    Raises: StorageError.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        for folder in reversed(missing):
            folder.mkdir(mode=mode, exist_ok=True)
            sync_folder(folder.parent)
    except OSError as err:
        raise storage_error(path, 0, err) from err


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Exclusive access to a folder's files among programs that take this lock.

    A folder can be locked without writing, so on a read-only disk too. One that does not exist has
    nothing to lock.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def check_writable(folder: Path, size_bytes: int) -> None:
    """Check that a file of that size can be written there; the test file is removed.

    Raises: StorageError.
    """
    probe = folder / ".probe"
    write_atomic(probe, bytes(size_bytes))
    probe.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Wait until the file's bytes are on the disk."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Wait until the folder's entries (renames, removals) are on the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_tree(path: Path) -> None:
    """Wait until a folder with all that is in it is on the disk, and its own name."""
    for folder, _, names in os.walk(path):
        for file in (Path(folder, name) for name in names):
            if not file.is_symlink():
                sync_file(file)
        sync_folder(Path(folder))
    sync_folder(path.parent)


def free_bytes(folder: Path) -> int:
    """Bytes that an ordinary user may still write to the file system of `folder`."""
    return shutil.disk_usage(folder).free


def storage_error(path: Path, needed_bytes: int, err: OSError) -> StorageError:
    """The StorageError for `err`, raised by a write of `needed_bytes` to `path`."""
    if err.errno not in _FULL:
        return StorageError(
            f"{path}: cannot be written ({err.strerror}); check the card and its mount"
        )
    try:
        available = free_bytes(path.parent)
    except OSError:
        available = 0
    return no_space(path, needed_bytes, available)


def no_space(path: Path, needed_bytes: int, available_bytes: int) -> StorageError:
    """The error for a disk without enough space."""
    return StorageError(
        f"{path}: needs {_megabytes(needed_bytes)} MB, has {_megabytes(available_bytes)} MB; "
        "free some space on this disk",
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
    )


def _megabytes(size_bytes: int) -> str:
    """Megabytes with three significant digits, so that a few kilobytes are not shown as 0."""
    return f"{size_bytes / 1e6:.3g}"


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
