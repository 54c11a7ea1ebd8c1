"""What devices report is kept, bounded, and replaced by what they report next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from profiles import load_reference
from profiles.measured import BundleMeasurement, Conditions, GraphMeasurement
from server.errors import BadRequestError, UnknownDeviceError
from server.registry.capabilities import FAILURES_APART_S, FAILURES_MOST, MEASUREMENTS_MOST
from server.registry.database import Registry
from server.registry.records import Capability, Failure, Pin


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(registry_url: str, clock: Clock) -> Iterator[Registry]:
    """With the devices pi-1 and pi-2."""
    opened = Registry.open(registry_url, clock=clock)
    for name in ("pi-1", "pi-2"):
        profile = load_reference("raspberry-pi-4").to_dict()
        opened.redeem_token(opened.create_token(), name, profile)
    yield opened
    opened.close()


def measured(bundle: str, latency_ms: float = 1.0) -> BundleMeasurement:
    return BundleMeasurement(bundle, {"exit": GraphMeasurement(latency_ms, 10, 5)}, 2.0, 10)


def test_a_device_is_known_by_what_it_reported(registry: Registry) -> None:
    known = registry.capabilities
    assert known.of("pi-1") == Capability()
    known.measured("pi-1", measured("m/1/d2"))
    known.measured("pi-1", measured("m/1/d1"))
    known.measured("pi-1", measured("m/1/d2", 3.0))
    known.report_conditions("pi-1", Conditions("m/1/d2", latency_ms=1.0))
    known.report_conditions("pi-1", Conditions("m/1/d1", memory_available_bytes=5))
    found = known.of("pi-1")
    assert found.measurements == (measured("m/1/d1"), measured("m/1/d2", 3.0))
    assert found.conditions == Conditions("m/1/d1", memory_available_bytes=5)
    assert known.of("pi-2") == Capability()


def test_reports_are_bounded(registry: Registry) -> None:
    known = registry.capabilities
    for number in range(MEASUREMENTS_MOST + 3):
        known.measured("pi-1", measured(f"m/{number + 1}/d1"))
    for number in range(FAILURES_MOST + 3):
        known.failed("pi-1", f"m/{number + 1}/d1", "no memory")
    known.measured("pi-2", measured("m/1/d1"))
    found = known.of("pi-1")
    assert len(found.measurements) == MEASUREMENTS_MOST
    assert found.measurements[0].bundle == "m/4/d1"
    assert len(found.failures) == FAILURES_MOST
    assert found.failures[-1].bundle == f"m/{FAILURES_MOST + 3}/d1"
    assert len(known.of("pi-2").measurements) == 1


def test_failures_are_counted_as_long_as_they_are_one_trouble(
    registry: Registry, clock: Clock
) -> None:
    known = registry.capabilities
    counts = [known.failed("pi-1", "m/1/d2", "full\n").count for _ in range(3)]
    clock.now += FAILURES_APART_S
    last = known.failed("pi-1", "m/1/d2", "x" * 1000)
    assert [*counts, last.count] == [1, 2, 3, 1]
    (kept,) = known.of("pi-1").failures
    assert kept == Failure("m/1/d2", "x" * 300, last.failed_at, 1)


def test_reports_do_not_grow_the_audit_trail(registry: Registry) -> None:
    """It has no bound, and each entry makes the server compare all logins with the broker's."""
    before = registry.last_change()
    registry.capabilities.failed("pi-1", "m/1/d2", "full")
    registry.capabilities.measured("pi-1", measured("m/1/d1"))
    registry.capabilities.report_conditions("pi-1", Conditions("m/1/d1"))
    registry.reports.note_update("pi-1", "m/1/d1", "m/1/d2", "full")
    assert registry.last_change() == before


def test_a_pin_replaces_the_one_before_and_goes(registry: Registry) -> None:
    known = registry.capabilities
    known.pin("pi-1", depth=2)
    known.pin("pi-1", bundle="m/1/d1-int8")
    known.pin("pi-2", depth=3)
    assert known.pinned() == {"pi-1": Pin(None, "m/1/d1-int8"), "pi-2": Pin(3, None)}
    assert known.of("pi-1").pin == Pin(None, "m/1/d1-int8")
    before = registry.last_change()
    assert known.unpin("pi-1") is True
    assert registry.last_change() > before  # a running server follows the trail
    assert known.unpin("pi-1") is False
    assert known.pinned() == {"pi-2": Pin(3, None)}


@pytest.mark.parametrize("bundle", ["", "m/1", "m/1/../../x", "m/1/2", "M/1/d2", "m/1/d2/x"])
def test_a_name_that_no_bundle_has_is_refused(registry: Registry, bundle: str) -> None:
    known = registry.capabilities
    with pytest.raises(BadRequestError, match="MODEL/VERSION"):
        known.failed("pi-1", bundle, "")
    with pytest.raises(BadRequestError, match="MODEL/VERSION"):
        known.pin("pi-1", bundle=bundle)


def test_an_unknown_device_and_a_pin_to_nothing_are_refused(registry: Registry) -> None:
    known = registry.capabilities
    with pytest.raises(UnknownDeviceError):
        known.measured("pi-3", measured("m/1/d1"))
    with pytest.raises(UnknownDeviceError):
        known.unpin("pi-3")
    with pytest.raises(BadRequestError, match="only one"):
        known.pin("pi-1")
    with pytest.raises(BadRequestError, match="only one"):
        known.pin("pi-1", depth=1, bundle="m/1/d1")
