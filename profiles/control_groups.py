"""Limits that Linux sets this process: memory and processor time of its control groups.

A container, a service of systemd and a pod of Kubernetes are control groups. Their files are read
below a root folder, so a test can pass a small tree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def usable_cores(root: Path = Path("/")) -> int:
    """CPU cores that this process may use: of the machine, its CPU set and its groups' quotas.

    A quota of 1.5 cores counts as one: a thread more would wait for the next period of the quota.
    """
    if hasattr(os, "sched_getaffinity"):  # Linux: fewer than all in a CPU set
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min([cores, *(int(quota) for quota in _quotas(root))]))


def memory_limits(root: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of every control group of this process.

    Page cache that can be dropped at once does not count as used.
    """
    for group, version in _groups(root, "memory"):
        if version == 2:
            names = "memory.max", "memory.current", "inactive_file"
        else:
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        limit = read_number(group / names[0])
        if limit is not None:
            used = read_number(group / names[1]) or 0
            yield limit, max(used - _droppable_bytes(group, names[2]), 0)


def read_text(path: Path) -> str:
    """The file's text without NULs (device trees end in one); "" if it cannot be read."""
    try:
        return path.read_bytes().replace(b"\0", b"\n").decode("utf-8", "replace")
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """The whole number in a file; None if there is none, as in "max", or "-1", for no limit."""
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None


def _quotas(root: Path) -> Iterator[float]:
    """The quota, in cores, of every control group of this process that has one."""
    for group, version in _groups(root, "cpu"):
        if version == 2:
            words = read_text(group / "cpu.max").split()
            quota, period = words if len(words) == 2 else ("max", "")
        else:
            quota = read_text(group / "cpu.cfs_quota_us").strip()
            period = read_text(group / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
            yield int(quota) / int(period)


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The control groups of this process, up to the topmost, each with its version, 1 or 2.

    Inside a container the path may be one of the host that does not exist; its parents do.
    """
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "-", "")
        if controllers == "":
            mount, version = "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            mount, version = f"sys/fs/cgroup/{controller}", 1
        else:
            continue
        below = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for length in range(len(below), -1, -1):
            yield root.joinpath(mount, *below[:length]), version


def _droppable_bytes(group: Path, key: str) -> int:
    found = re.search(rf"^{key} (\d+)$", read_text(group / "memory.stat"), re.MULTILINE)
    return int(found[1]) if found else 0
