"""Disks that take no more: full for this process, or read-only."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Files of this process cannot grow above this size: writes fail, short ones first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing in the folder can be written. Root ignores modes, so it gets a read-only mount."""
    with ExitStack() as undo:
        if os.geteuid() == 0:
            place = str(folder)
            subprocess.run(["mount", "--bind", place, place], check=True)
            undo.callback(subprocess.run, ["umount", place], check=True)
            subprocess.run(["mount", "-o", "remount,ro,bind", place, place], check=True)
        else:
            for each in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
                undo.callback(each.chmod, each.stat().st_mode)
                each.chmod(0o500)
        yield
