"""What a device says of itself, from the files of its platform."""

from __future__ import annotations

import json
import time
from dataclasses import FrozenInstanceError
from pathlib import Path

import psutil
import pytest

from profiles.device import (
    DeviceProfile,
    accelerator_name,
    board_name,
    measure_compute_score_gflops,
    probe,
)
from profiles.errors import InvalidProfileError
from profiles.link import LinkProfile
from tests.profiling.trees import write_tree

PI = DeviceProfile(
    name="pi-07",
    arch="aarch64",
    cores=4,
    memory_total_bytes=1 << 30,
    memory_available_bytes=800 << 20,
    accelerator=None,
    compute_score_gflops=22.9,
    link_latency_ms=None,
    link_bandwidth_mbps=None,
)


@pytest.mark.parametrize(
    ("model", "board"),
    [
        ("Raspberry Pi Zero 2 W Rev 1.0\0", "raspberry-pi-zero-2-w"),
        ("Raspberry Pi 3 Model B Plus Rev 1.3\0", "raspberry-pi-3b-plus"),
        ("Raspberry Pi 4 Model B Rev 1.4\0", "raspberry-pi-4"),
        ("Raspberry Pi 5 Model B Rev 1.0\0", "raspberry-pi-5"),
        ("NVIDIA Jetson Nano Developer Kit\0", "jetson-nano"),
        ("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit\0", "jetson-orin-nano"),
        ("NVIDIA Jetson Orin NX Engineering Reference Developer Kit\0", "jetson-orin-nx"),
        ("Radxa ROCK 5B\0", "radxa-rock-5b"),
    ],
)
def test_board_is_known_by_its_device_tree(tmp_path: Path, model: str, board: str) -> None:
    assert board_name(write_tree(tmp_path, {"proc/device-tree/model": model})) == board


def test_second_place_of_the_device_tree_is_read_too(tmp_path: Path) -> None:
    tree = {"sys/firmware/devicetree/base/model": "Raspberry Pi 5 Model B Rev 1.0\0"}
    assert board_name(write_tree(tmp_path, tree)) == "raspberry-pi-5"


def test_board_without_a_device_tree_has_no_name(tmp_path: Path) -> None:
    assert board_name(tmp_path) is None


@pytest.mark.parametrize(
    ("tree", "gpu"),
    [
        (
            {"proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005\0nvidia,tegra234\0"},
            "NVIDIA Ampere GPU (tegra234)",
        ),
        (
            {"proc/device-tree/compatible": "nvidia,p3450-0000\0nvidia,tegra210\0"},
            "NVIDIA Maxwell GPU (tegra210)",
        ),
        ({"etc/nv_tegra_release": "# R32 (release), REVISION: 7.1\n"}, "NVIDIA Tegra GPU"),
        ({"proc/device-tree/compatible": "raspberrypi,4-model-b\0brcm,bcm2711\0"}, None),
        ({}, None),
    ],
)
def test_accelerator_is_that_of_the_chip(
    tmp_path: Path, tree: dict[str, str], gpu: str | None
) -> None:
    assert accelerator_name(write_tree(tmp_path, tree)) == gpu


def test_probe_describes_this_machine() -> None:
    profile = probe("here")
    assert profile.name == "here"
    assert 1 <= profile.cores <= (psutil.cpu_count() or 1)
    assert profile.memory_total_bytes <= psutil.virtual_memory().total
    assert profile.compute_score_gflops > 0
    assert profile.link is None


def test_probe_takes_its_name_from_the_board(tmp_path: Path) -> None:
    tree = {"proc/device-tree/model": "Raspberry Pi 4 Model B Rev 1.4\0"}
    assert probe(root=write_tree(tmp_path, tree)).name == "raspberry-pi-4"


def test_cgroup_2_limit_bounds_the_memory(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/system.slice/agent.service"
    tree = {
        "proc/self/cgroup": "0::/system.slice/agent.service\n",
        f"{group}/memory.max": "10000000\n",
        f"{group}/memory.current": "4000000\n",
        f"{group}/memory.stat": "anon 2500000\ninactive_file 1500000\nactive_file 7\n",
    }
    profile = probe(root=write_tree(tmp_path, tree))
    assert profile.memory_total_bytes == 10_000_000
    # 10.0 MB less the 4.0 in use, of which 1.5 are cache that can be dropped
    assert profile.memory_available_bytes == 7_500_000


def test_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    tree = {
        "proc/self/cgroup": "0::/pod/container\n",
        "sys/fs/cgroup/pod/memory.max": "5000000\n",
        "sys/fs/cgroup/pod/memory.current": "4900000\n",
        "sys/fs/cgroup/pod/container/memory.max": "max\n",
    }
    profile = probe(root=write_tree(tmp_path, tree))
    assert profile.memory_total_bytes == 5_000_000
    assert profile.memory_available_bytes == 100_000


def test_cgroup_1_limit_is_found_under_a_path_of_the_host(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    tree = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/4f\n4:memory:/docker/4f\n1:name=systemd:/\n",
        f"{group}/memory.limit_in_bytes": "20000000\n",
        f"{group}/memory.usage_in_bytes": "25000000\n",
        f"{group}/memory.stat": "inactive_file 1\ntotal_inactive_file 11000000\n",
    }
    profile = probe(root=write_tree(tmp_path, tree))
    assert profile.memory_total_bytes == 20_000_000
    assert profile.memory_available_bytes == 6_000_000


def test_unlimited_groups_leave_the_machines_memory(tmp_path: Path) -> None:
    tree = {
        "proc/self/cgroup": "4:memory:/\n0::/\nnonsense\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    profile = probe(root=write_tree(tmp_path, tree))
    assert profile.memory_total_bytes == psutil.virtual_memory().total


@pytest.mark.deadline
def test_compute_score_is_quick() -> None:
    start = time.perf_counter()
    score = measure_compute_score_gflops()
    assert time.perf_counter() - start < 1.0  # 0.15 s alone; the machine is shared
    assert score > 0.01


def test_profile_survives_json() -> None:
    profile = PI.with_link(LinkProfile(latency_ms=6.0, bandwidth_mbps=40.0))
    assert DeviceProfile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile
    assert profile.link == LinkProfile(6.0, 40.0)


def test_profile_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        PI.cores = 8  # type: ignore[misc]  # that it is refused is the point


def test_memory_is_counted_in_gb_as_it_is_sold() -> None:
    assert PI.memory_total_gb == 1.0


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("name", "  ", "a text"),
        ("name", "x" * 201, "a text"),
        ("cores", 0, "at least 1"),
        ("cores", True, "whole number"),
        ("cores", 4.0, "whole number"),
        ("memory_total_bytes", "1 GB", "whole number"),
        ("memory_available_bytes", 2 << 30, "at most memory_total_bytes"),
        ("accelerator", "", "a text"),
        ("compute_score_gflops", 0.0, "above 0"),
        ("compute_score_gflops", float("nan"), "finite"),
        ("compute_score_gflops", float("inf"), "finite"),
        ("compute_score_gflops", 10**400, "finite"),
        ("link_latency_ms", -1.0, "at least 0"),
        ("link_bandwidth_mbps", 0, "above 0"),
    ],
)
def test_impossible_value_is_refused_by_name(field: str, value: object, expected: str) -> None:
    with pytest.raises(InvalidProfileError, match=f"{field}: expected .*{expected}.*, got "):
        DeviceProfile.from_dict({**PI.to_dict(), field: value})


@pytest.mark.parametrize("data", [None, [], {**PI.to_dict(), "core": 4}, {"name": "pi"}])
def test_profile_with_other_fields_is_refused(data: object) -> None:
    with pytest.raises(InvalidProfileError, match="expected"):
        DeviceProfile.from_dict(data)
