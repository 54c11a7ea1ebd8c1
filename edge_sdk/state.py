"""The lock of a state folder: one process per role; a second one is told which process has it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from edge_sdk.durable import make_folder, storage_error
from edge_sdk.errors import StateInUseError

Role = Literal["agent", "backup", "keep", "rotation", "server", "simulation", "training", "update"]

# so long a look at the lock may last on a busy machine
LOOK_S: Final = 0.05


class StateLock:
    """Exclusive use of a state folder in one role, until `release` or the end of the process.

    The kernel releases the lock when the process ends for any reason, so a lock is never stale. An
    agent and an updater may run at the same time; two agents may not.
    """

    def __init__(self, state: Path, role: Role = "agent") -> None:
        """Take the lock.

        Raises: StateInUseError naming the process that holds it; StorageError.
        """
        make_folder(state, mode=0o700)
        path = state / f"{role}.lock"
        try:
            self._handle = _open(path)
        except OSError as err:
            raise storage_error(path, 0, err) from err
        if not _lock(self._handle):
            owner = os.pread(self._handle, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._handle)
            raise StateInUseError(
                f"{state}: process {owner} already runs as {role} here; stop it, or use another"
                " state folder"
            )
        # the pid only informs a second process: on a disk that takes nothing the lock works without
        try:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            pass

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def _open(path: Path) -> int:
    """The lock's file, open; on a read-only disk for reading alone, which is enough to lock it."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as err:
        if err.errno == errno.EROFS:
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        raise


def _lock(handle: int) -> bool:
    """Whether the lock could be taken; `is_held` of another process has it for microseconds."""
    end = time.monotonic() + LOOK_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(LOOK_S / 10)
        else:
            return True


def is_held(state: Path, role: Role) -> bool:
    """Whether a process has `state` in that role; nothing is written, and nothing is created."""
    try:
        handle = os.open(state / f"{role}.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
