"""The catalogue of boards: complete, sourced, and apart enough for Eq. 1."""

from __future__ import annotations

import pytest

from profiles.allocation import supersfl_depth, supersfl_latency_ms
from profiles.device import BOARDS
from profiles.errors import UnknownReferenceError
from profiles.reference import load_reference, load_sources, reference_names

NAMES = (
    "jetson-nano",
    "jetson-orin-nano",
    "jetson-orin-nx",
    "raspberry-pi-3b-plus",
    "raspberry-pi-4",
    "raspberry-pi-5",
    "raspberry-pi-zero-2-w",
)


def test_catalogue_holds_the_seven_boards() -> None:
    assert reference_names() == NAMES


def test_every_board_can_be_recognised_by_probe() -> None:
    assert sorted(board for _, board in BOARDS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source(name: str) -> None:
    profile, sources = load_reference(name), load_sources(name)
    assert profile.name == name
    assert profile.arch == "aarch64"
    assert set(sources) == set(profile.to_dict()) - {"name"} | {"title"}
    assert all(len(source) > 30 for field, source in sources.items() if field != "title")
    assert "reference link" in sources["link_latency_ms"]


@pytest.mark.parametrize(
    ("name", "memory_gb", "cores"),
    # the vendors' data sheets, smallest variant
    [
        ("raspberry-pi-zero-2-w", 0.5, 4),
        ("raspberry-pi-3b-plus", 1, 4),
        ("raspberry-pi-4", 1, 4),
        ("raspberry-pi-5", 1, 4),
        ("jetson-nano", 2, 4),
        ("jetson-orin-nano", 4, 6),
        ("jetson-orin-nx", 8, 6),
    ],
)
def test_boards_are_the_smallest_sold(name: str, memory_gb: float, cores: int) -> None:
    profile = load_reference(name)
    assert (profile.memory_total_gb, profile.cores) == (memory_gb, cores)


@pytest.mark.parametrize("name", NAMES)
def test_score_stays_below_what_the_cores_could_ever_do(name: str) -> None:
    # clock in GHz times float32 operations a cycle: one 128-bit fused multiply-add pipe does 8
    peak = {
        "raspberry-pi-zero-2-w": 4 * 1.0 * 8,
        "raspberry-pi-3b-plus": 4 * 1.4 * 8,
        "raspberry-pi-4": 4 * 1.5 * 8,
        "raspberry-pi-5": 4 * 2.4 * 16,
        "jetson-nano": 4 * 1.43 * 8,
        "jetson-orin-nano": 6 * 1.5 * 16,
        "jetson-orin-nx": 6 * 2.0 * 16,
    }[name]
    assert 0.2 * peak < load_reference(name).compute_score_gflops < 0.6 * peak


def test_jetsons_name_their_gpu_and_raspberries_none() -> None:
    gpus = {name: load_reference(name).accelerator for name in NAMES}
    assert all((gpu is not None) == name.startswith("jetson") for name, gpu in gpus.items())


def test_eq_1_tells_the_demos_three_boards_apart() -> None:
    """L = 5 is the `tiny` network. Latencies by hand: 12.0, 0.85 and 0.65 ms."""
    fleet = [
        load_reference(name)
        for name in ("raspberry-pi-zero-2-w", "raspberry-pi-4", "jetson-orin-nano")
    ]
    latencies = [supersfl_latency_ms(board) for board in fleet]
    assert latencies == pytest.approx([11.98, 0.85, 0.65], abs=0.005)
    depths = [
        supersfl_depth(board.memory_total_gb, own, min(latencies), max(latencies), stages=5)
        for board, own in zip(fleet, latencies, strict=True)
    ]
    # 0 + 0, raised to 1; 0 + floor(4 * 11.13/11.33); 2 + 4, capped at L-1
    assert depths == [1, 3, 4]


@pytest.mark.parametrize("name", ["raspberry-pi-9", "", "../errors", "RASPBERRY-PI-4"])
def test_unknown_board_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownReferenceError, match="raspberry-pi-zero-2-w; got"):
        load_reference(name)
