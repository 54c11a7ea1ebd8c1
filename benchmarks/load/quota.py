"""A bound on the processor that a process takes: a control group of Linux, which needs root."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

GROUPS: Final = Path("/sys/fs/cgroup")
PERIOD_US: Final = 10_000


class Quota:
    """A control group, of version 1 or 2, whose processes take at most a share of one core each.

    Args:
        name: of the group. share: of one core.
    """

    def __init__(self, name: str, share: float) -> None:
        first = GROUPS / "cpu"
        self._folder = (first if first.is_dir() else GROUPS) / name
        self._folder.mkdir()
        quota_us = int(share * PERIOD_US)
        if first.is_dir():
            (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (self._folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")

    def bound(self, pid: int) -> None:
        """Bound a process, with all of its threads."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove the group, whose processes have ended."""
        self._folder.rmdir()


@contextlib.contextmanager
def bounded(pid: int, share: float | None) -> Iterator[None]:
    """Bound a process while the block runs, at whose end it has ended; None for no bound."""
    if share is None:
        yield
        return
    quota = Quota(f"splitedge-bench-{pid}", share)
    try:
        quota.bound(pid)
        yield
    finally:
        quota.close()
