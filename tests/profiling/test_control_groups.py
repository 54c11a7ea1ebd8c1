"""Cores that a process may use: of the machine, its CPU set, and the quotas of its groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from profiles.control_groups import usable_cores
from profiles.device import probe
from tests.profiling.trees import write_tree

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", CORES),
        ("6400000 100000", min(CORES, 64)),
        ("250000 100000", min(CORES, 2)),
        ("150000 100000", 1),
        ("5000 10000", 1),
        ("", CORES),
    ],
)
def test_a_quota_of_version_2_bounds_the_cores(tmp_path: Path, quota: str, cores: int) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/container\n",
        "sys/fs/cgroup/pod/container/cpu.max": f"{quota}\n",
    }
    assert usable_cores(write_tree(tmp_path, files)) == cores


def test_the_tightest_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/container\n",
        "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
        "sys/fs/cgroup/pod/cpu.max": "100000 100000\n",
    }
    assert usable_cores(write_tree(tmp_path, files)) == 1
    assert probe(root=tmp_path).cores == 1


@pytest.mark.parametrize(("quota", "cores"), [("-1", CORES), ("120000", 1), ("0", CORES)])
def test_a_quota_of_version_1_is_found_under_a_path_of_the_host(
    tmp_path: Path, quota: str, cores: int
) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/4f\n4:memory:/docker/4f\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": f"{quota}\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert usable_cores(write_tree(tmp_path, files)) == cores


def test_a_set_of_cores_bounds_them() -> None:
    program = (
        "import os; from profiles.control_groups import usable_cores;"
        " os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); print(usable_cores())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout == "1\n"
