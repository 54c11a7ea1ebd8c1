"""Files that survive a power cut: whole and old, or whole and new, never in between.

A file is written beside its place, synced, renamed over it, and its folder synced: without the
syncs a rename can reach the disk before the bytes it names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import Final

from edge_sdk.errors import StorageError

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `data`; its folder must exist. One writer a path at a time.

    Raises: StorageError if the disk is full, read-only or failing; what stood there stays.
    """
    # the name is fixed, so what a killed write leaves is overwritten by the next one
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        # 0600 until it is whole: a secret is never readable by others, not even briefly
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
    """Create the folder and those above it where missing, and sync their parents.

    Raises: StorageError.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        for folder in reversed(missing):
            folder.mkdir(mode=mode, exist_ok=True)
            sync_folder(folder.parent)
    except OSError as err:
        raise storage_error(path, 0, err) from err


def check_writable(folder: Path, size_bytes: int) -> None:
    """Find out whether a file of that size can be written there, and leave nothing.

    Raises: StorageError.
    """
    probe = folder / ".probe"
    write_atomic(probe, bytes(size_bytes))
    probe.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Have the file's bytes on the disk before going on."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Have the folder's entries (renames, removals) on the disk before going on."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def free_bytes(folder: Path) -> int:
    """What an ordinary user may still write to the file system of `folder`."""
    return shutil.disk_usage(folder).free


def storage_error(path: Path, needed_bytes: int, err: OSError) -> StorageError:
    """Our error for `err`, met while `needed_bytes` were to be written to `path`."""
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
    """The error that says how much is missing."""
    return StorageError(
        f"{path}: needs {_megabytes(needed_bytes)} MB, has {_megabytes(available_bytes)} MB; "
        "free some space on this disk",
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
    )


def _megabytes(size_bytes: int) -> str:
    """With enough digits that a few kilobytes do not read as nothing."""
    return f"{size_bytes / 1e6:.3g}"


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
