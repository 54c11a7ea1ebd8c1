"""Profile of a device: memory, cores, speed. The only importer of psutil.

The platform's files are read below a root folder, so a test can pass a small tree.
"""

from __future__ import annotations

import platform
import re
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import psutil

from profiles.checks import number, optional, text, whole
from profiles.control_groups import memory_limits, read_text, usable_cores
from profiles.fields import check_fields, exact_keys, need
from profiles.link import LinkProfile

# words of a device tree ("Raspberry Pi 4 Model B Rev 1.4") -> name in the catalogue
BOARDS = (
    ("raspberry pi zero 2", "raspberry-pi-zero-2-w"),
    ("raspberry pi 3 model b plus", "raspberry-pi-3b-plus"),
    ("raspberry pi 4 model b", "raspberry-pi-4"),
    ("raspberry pi 5", "raspberry-pi-5"),
    ("jetson orin nano", "jetson-orin-nano"),
    ("orin nx", "jetson-orin-nx"),
    ("jetson nano", "jetson-nano"),
)
TEGRA_GPUS = {
    "tegra210": "NVIDIA Maxwell GPU (tegra210)",
    "tegra186": "NVIDIA Pascal GPU (tegra186)",
    "tegra194": "NVIDIA Volta GPU (tegra194)",
    "tegra234": "NVIDIA Ampere GPU (tegra234)",
}
SCORE_SIZE = 256  # 34 MFLOP a product, 4 ms on a Pi Zero 2 W; three matrices take 0.8 MB
SCORE_TIME_S = 0.12
SCORE_LEAST_REPEATS = 5


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Profile of a device, as it reports itself or from the catalogue.

    Attributes:
        name: the device's or board's id.
        arch: machine as uname says: aarch64, x86_64.
        cores: CPU cores this process may use, bounded by the container's quota.
        memory_total_bytes: RAM, bounded by the container's limit.
        memory_available_bytes: RAM that is available without swapping.
        accelerator: name of the GPU or NPU; None if there is none. The score leaves it out: whether
            a bundle runs on it is measured bundle by bundle (docs/providers.md).
        compute_score_gflops: float32 matrix products on the CPU, 10**9 operations a second.
        link_latency_ms: round trip of a small message to the server, ms; None if not measured.
        link_bandwidth_mbps: 10**6 bits a second; None if not measured.
    """

    name: str
    arch: str
    cores: int
    memory_total_bytes: int
    memory_available_bytes: int
    accelerator: str | None
    compute_score_gflops: float
    link_latency_ms: float | None
    link_bandwidth_mbps: float | None

    def __post_init__(self) -> None:
        check_fields(self, "profile", name=text())
        owner = f"profile {self.name}"
        check_fields(
            self,
            owner,
            arch=text(),
            cores=whole(1),
            memory_total_bytes=whole(1),
            memory_available_bytes=whole(0),
            accelerator=optional(text()),
            compute_score_gflops=number(above=0),
            link_latency_ms=optional(number(least=0)),
            link_bandwidth_mbps=optional(number(above=0)),
        )
        need(
            self.memory_available_bytes <= self.memory_total_bytes,
            owner,
            "memory_available_bytes",
            f"at most memory_total_bytes ({self.memory_total_bytes})",
            self.memory_available_bytes,
        )

    @property
    def memory_total_gb(self) -> float:
        """RAM in GB as memory is sold: 2**30 bytes."""
        return self.memory_total_bytes / 2**30

    @property
    def core_score_gflops(self) -> float:
        """The compute score of one core, for a session with one thread."""
        return self.compute_score_gflops / self.cores

    @property
    def link(self) -> LinkProfile | None:
        """The link; None unless latency and bandwidth are known."""
        if self.link_latency_ms is None or self.link_bandwidth_mbps is None:
            return None
        return LinkProfile(self.link_latency_ms, self.link_bandwidth_mbps)

    def with_link(self, link: LinkProfile) -> DeviceProfile:
        """The same device with a measured link."""
        return replace(
            self, link_latency_ms=link.latency_ms, link_bandwidth_mbps=link.bandwidth_mbps
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON has them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> DeviceProfile:
        """Read what `to_dict` wrote.

        Raises: InvalidProfileError naming the field, what was expected and what was got.
        """
        checked = exact_keys("profile", data, [field.name for field in fields(cls)])
        return cls(**cast("dict[str, Any]", dict(checked)))


def probe(name: str | None = None, *, root: Path = Path("/")) -> DeviceProfile:
    """Measure this device; takes about 0.2 s, nearly all for the compute score.

    The link stays unknown: measure it with `measure_link` and add it with `with_link`.

    Args:
        name: the profile's name; by default the board's catalogue id, else the host name.
        root: folder of the platform's files.
    """
    total, available = memory_bytes(root)
    return DeviceProfile(
        name=name or board_name(root) or platform.node() or "unnamed",
        arch=platform.machine() or "unknown",
        cores=usable_cores(root),
        memory_total_bytes=total,
        memory_available_bytes=min(available, total),
        accelerator=accelerator_name(root),
        compute_score_gflops=measure_compute_score_gflops(),
        link_latency_ms=None,
        link_bandwidth_mbps=None,
    )


def memory_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """RAM in total, and what is available to this process without swapping, in bytes.

    Limits of the container and of this process (`ulimit -v`) count too.
    """
    memory = psutil.virtual_memory()
    limits = tuple(memory_limits(root))
    total = min([memory.total, *(limit for limit, _ in limits)])
    room = [max(limit - used, 0) for limit, used in (*limits, *_own_limit())]
    return total, min([memory.available, *room])


def _own_limit() -> Iterator[tuple[int, int]]:
    """The limit of this process's address space and the size of it, if there is a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield limit, psutil.Process().memory_info().vms


def board_name(root: Path = Path("/")) -> str | None:
    """The board's name in the catalogue, or its own name in that form; None if unknown."""
    for place in ("proc/device-tree/model", "sys/firmware/devicetree/base/model"):
        model = read_text(root / place).strip().lower()
        if model:
            return next((board for words, board in BOARDS if words in model), _slug(model))
    return None


def accelerator_name(root: Path = Path("/")) -> str | None:
    """The GPU of a Jetson, by its chip; None on other boards.

    Containers have the device tree too, but `/etc/nv_tegra_release` only exists on the host.
    """
    compatible = read_text(root / "proc/device-tree/compatible")
    for chip, gpu in TEGRA_GPUS.items():
        if f"nvidia,{chip}" in compatible:
            return gpu
    release = read_text(root / "etc/nv_tegra_release")
    return "NVIDIA Tegra GPU" if release.strip() else None


def measure_compute_score_gflops() -> float:
    """Speed of float32 matrix products on the CPU, in 10**9 operations a second.

    The median over at least five products of two 256 x 256 matrices (2 * 256**3 operations each),
    on as many cores as numpy's BLAS uses. Takes 0.12 s, or 0.2 s at 1 GFLOP/s.
    """
    import numpy as np  # noqa: PLC0415 - a profile that is given or read needs none of it

    rng = np.random.default_rng(0)
    left = rng.standard_normal((SCORE_SIZE, SCORE_SIZE), dtype=np.float32)
    right = rng.standard_normal((SCORE_SIZE, SCORE_SIZE), dtype=np.float32)
    out = left @ right  # starts BLAS's threads, touches the memory
    times: list[float] = []
    end = time.perf_counter() + SCORE_TIME_S
    while len(times) < SCORE_LEAST_REPEATS or time.perf_counter() < end:
        start = time.perf_counter()
        np.matmul(left, right, out=out)
        times.append(time.perf_counter() - start)
    return 2 * SCORE_SIZE**3 / statistics.median(times) / 1e9


def _slug(text: str) -> str | None:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63] or None
