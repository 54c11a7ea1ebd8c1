"""The bundle of a device: by its own measurements, around what failed there, or as it is pinned.

The model is the export of conftest.py, with bundles of the depths 1, 2 and 4. Its estimates fit any
device; the numbers of these tests come from measurements alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from profiles import load_reference
from profiles.measured import BundleMeasurement, Conditions, GraphMeasurement
from server.allocation import HOLD_MOST_S, Choice, choose_bundle, held_until
from server.backend.models import StoredModel
from server.registry.records import Capability, Device, Failure, Pin

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

MB = 1_000_000
HOLD_S = 3600.0
VARIANTS = ("d1", "d2", "d4", "d4-int8")


@pytest.fixture
def model(exported: Exported) -> StoredModel:
    """Version 2 of the export, as if its depth 4 had an int8 variant."""
    manifest = replace(exported.manifest, version="2", variants=VARIANTS)
    return StoredModel(exported.folder, manifest)


def pi(depth: int | None = None, bundle: str | None = None) -> Device:
    profile = load_reference("raspberry-pi-4").to_dict()
    return Device("pi-1", "default", "", profile, depth, bundle, 0.0, None, None)


def measured(bundle: str, latency_ms: float, megabytes: int = 10) -> BundleMeasurement:
    graph = GraphMeasurement(latency_ms, megabytes * MB, 9)
    return BundleMeasurement(bundle, {"exit": graph}, 4.0, megabytes * MB)


def choose(model: StoredModel, device: Device, now: float = 0.0, **known: Any) -> Choice:
    return choose_bundle(device, model, (), "budget", capability=Capability(**known), now=now)


def test_a_device_without_measurements_gets_the_deepest_that_its_estimate_fits(
    model: StoredModel,
) -> None:
    # int8, which an export publishes only where it is faster; fp32 is still to be measured
    assert choose(model, pi()) == Choice(4, "digits/2/d4-int8", ("digits/2/d4",))


def test_a_depth_that_is_too_slow_there_is_left(model: StoredModel) -> None:
    slow = (measured("digits/2/d4-int8", 50.1), measured("digits/2/d2", 49.9))
    assert choose(model, pi(), measurements=slow) == Choice(2, "digits/2/d2")
    assert choose(model, pi(4, "digits/2/d4-int8"), measurements=slow).depth == 2
    fast = (measured("digits/2/d4-int8", 49.9), measured("digits/2/d2", 30.0))
    assert choose(model, pi(4, "digits/2/d4-int8"), measurements=fast).depth == 4
    # from depth 2, depth 4 would have to fit 40 ms
    assert choose(model, pi(2, "digits/2/d2"), measurements=fast).depth == 2
    faster = (measured("digits/2/d4-int8", 39.9), measured("digits/2/d2", 30.0))
    assert choose(model, pi(2, "digits/2/d2"), measurements=faster).depth == 4


def test_other_devices_are_read_only_by_a_rule_that_compares_them(model: StoredModel) -> None:
    read: list[str] = []

    def others() -> Iterator[Device]:
        read.append("the fleet")
        yield replace(pi(), id="pi-2", profile=load_reference("jetson-orin-nano").to_dict())

    choose_bundle(pi(), model, others(), "budget")
    assert read == []
    choose_bundle(pi(), model, others(), "supersfl")
    assert read == ["the fleet"]


def test_a_depth_of_another_model_holds_nothing_back(model: StoredModel) -> None:
    fast = (measured("digits/2/d4-int8", 49.9), measured("digits/2/d2", 30.0))
    assert choose(model, pi(2, "letters/1/d2"), measurements=fast).depth == 4


def test_memory_that_the_device_reports_decides(model: StoredModel) -> None:
    takes = (measured("digits/2/d4-int8", 1.0, 80), measured("digits/2/d2", 1.0, 30))
    for available, present, depth in (
        (160, 4, 4),  # half of it is 80
        (159, 4, 2),
        (160, 2, 2),  # 0.8 of the half is 64
        (199, 2, 2),
        (200, 2, 4),  # 0.8 of 100 is 80
    ):
        found = choose(
            model,
            pi(present, f"digits/2/d{present}"),
            measurements=takes,
            conditions=Conditions("digits/2/d2", memory_available_bytes=available * MB),
        )
        assert found.depth == depth


def test_latency_that_the_device_reports_decides(model: StoredModel) -> None:
    takes = (measured("digits/2/d4-int8", 20.0), measured("digits/2/d2", 8.0))
    now = pi(4, "digits/2/d4-int8")
    for live, depth in ((49.0, 4), (51.0, 2)):
        found = Conditions("digits/2/d4-int8", latency_ms=live)
        assert choose(model, now, measurements=takes, conditions=found).depth == depth
    # at depth 2 and 2.5 times slower than measured, depth 4 takes 50 ms; at its old speed, 20
    now = pi(2, "digits/2/d2")
    for live, depth in ((20.0, 2), (8.0, 4)):
        found = Conditions("digits/2/d2", latency_ms=live)
        assert choose(model, now, measurements=takes, conditions=found).depth == depth


def test_the_faster_variant_there_is_chosen_and_stays(model: StoredModel) -> None:
    def both(int8: float, fp32: float) -> tuple[BundleMeasurement, ...]:
        return measured("digits/2/d4-int8", int8), measured("digits/2/d4", fp32)

    int8, fp32 = pi(4, "digits/2/d4-int8"), pi(4, "digits/2/d4")
    for device, int8_ms, fp32_ms, bundle in (
        (int8, 1.0, 2.0, "d4-int8"),
        (int8, 2.0, 1.0, "d4"),
        (int8, 1.0, 0.96, "d4-int8"),  # a gain below 5 % moves nobody
        (fp32, 0.96, 1.0, "d4"),
        (fp32, 0.94, 1.0, "d4-int8"),
    ):
        found = choose(model, device, measurements=both(int8_ms, fp32_ms))
        assert found == Choice(4, f"digits/2/{bundle}")


def test_measurements_of_an_older_version_count_until_there_are_new_ones(
    model: StoredModel,
) -> None:
    old = (measured("digits/1/d4-int8", 60.0), measured("digits/1/d2", 20.0))
    assert choose(model, pi(2, "digits/1/d2"), measurements=old).bundle == "digits/2/d2"
    new = (*old, measured("digits/2/d4-int8", 10.0))
    assert choose(model, pi(2, "digits/1/d2"), measurements=new).depth == 4


@pytest.mark.parametrize("failed", ["digits/2/d4-int8", "digits/2/d4", "digits/1/d4"])
def test_a_depth_that_ran_out_of_memory_is_held_for_an_hour(
    model: StoredModel, failed: str
) -> None:
    failures = (Failure(failed, "out of memory", 1000.0),)
    for now, depth in ((1000.0, 2), (1000.0 + HOLD_S - 1, 2), (1000.0 + HOLD_S, 4)):
        assert choose(model, pi(4), now, failures=failures).depth == depth
    other = (Failure("letters/1/d4", "out of memory", 1000.0),)
    assert choose(model, pi(4), 1000.0, failures=other).depth == 4


def test_a_depth_is_held_twice_as_long_each_time(model: StoredModel) -> None:
    times = [held_until(Failure("digits/2/d4", "", 0.0, count)) for count in (1, 2, 3, 100)]
    assert times == [HOLD_S, 2 * HOLD_S, 4 * HOLD_S, HOLD_MOST_S]
    slow = [held_until(Failure("digits/2/d4", "", 0.0, n, "conditions")) for n in (1, 2)]
    assert slow == [600.0, 1200.0]


def test_what_failed_holds_the_deeper_ones_too_and_the_shallowest_is_left(
    model: StoredModel,
) -> None:
    second = (Failure("digits/2/d2", "", 0.0),)
    assert choose(model, pi(4), failures=second).depth == 1
    first = (Failure("digits/2/d1", "", 0.0),)
    assert choose(model, pi(4), failures=first).depth == 1


def test_a_pinned_depth_wins_over_everything(
    model: StoredModel, caplog: pytest.LogCaptureFixture
) -> None:
    known: dict[str, Any] = {
        "measurements": (measured("digits/2/d4-int8", 500.0, 10_000),),
        "failures": (Failure("digits/2/d4", "", 0.0),),
    }
    found = choose(model, pi(1, "digits/2/d1"), pin=Pin(4, None), **known)
    assert found.bundle == "digits/2/d4-int8"
    assert choose(model, pi(1, "digits/2/d1"), pin=Pin(3, None), **known).depth == 1
    assert "pinned to depth 3" in caplog.text
