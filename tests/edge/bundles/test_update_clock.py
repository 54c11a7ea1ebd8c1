"""Updates on a device whose clock is wrong: long ago, years ahead, or there and back again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest

from edge_sdk import installation
from edge_sdk.bundles import update as updater
from edge_sdk.bundles.update import update
from edge_sdk.installation import why_clock_is_untrusted

if TYPE_CHECKING:
    from tests.edge.bundles.depot import Depot

NEW = "tiny/2/d2"
YEAR = timedelta(days=365)

SetClock = Callable[[timedelta], None]


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Moves this device's clock by a time from the right one."""

    def set_to(moved: timedelta) -> None:
        class Moved(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> Moved:
                at = datetime.now(tz) + moved
                return cls.fromtimestamp(at.timestamp(), tz)

        for module in (updater, installation):
            monkeypatch.setattr(module, "datetime", Moved)

    return set_to


def back_to_1970() -> timedelta:
    return datetime(1970, 1, 2, tzinfo=UTC) - datetime.now(UTC)


@pytest.mark.parametrize("moved", [back_to_1970(), 10 * YEAR], ids=["1970", "ten years ahead"])
def test_device_with_a_wrong_clock_takes_updates_by_the_servers(
    depot: Depot,
    installed: Path,
    set_clock: SetClock,
    moved: timedelta,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """FAULTS row 12: it says that its clock is untrusted, and remembers the server's time."""
    depot.assigned = NEW
    set_clock(moved)
    outcome = update(installed)
    assert outcome.status == "installed", outcome
    assert "clock untrusted" in caplog.text
    assert why_clock_is_untrusted().startswith("clock untrusted: it says")
    assert outcome.fresh_at is not None
    assert abs(datetime.fromisoformat(outcome.fresh_at) - datetime.now(UTC)) < timedelta(minutes=2)


def test_clock_that_jumps_between_updates_is_followed_back(
    depot: Depot, installed: Path, set_clock: SetClock
) -> None:
    """FAULTS row 12: right, 1970, ten years ahead, right."""
    for moved in (timedelta(), back_to_1970(), 10 * YEAR, timedelta()):
        set_clock(moved)
        depot.repository.refresh_timestamp()
        assert update(installed, "tiny/1/d2").status == "unchanged"
    assert why_clock_is_untrusted() == ""
    assert update(installed, NEW).status == "installed"


def test_device_comes_back_after_both_clocks_had_jumped_ahead(
    depot: Depot, installed: Path, set_clock: SetClock
) -> None:
    """FAULTS row 12: half a year ahead on both ends, as a bad time server does; then both right."""
    seen = datetime.now(UTC) + YEAR / 2
    assert update(installed, "tiny/1/d2").status == "unchanged"
    (installed / "tuf" / "fresh.json").write_bytes(orjson.dumps({"at": seen.isoformat()}))
    depot.assigned = NEW
    # nothing new is signed: what it knows does not come back to life
    frozen = update(installed)
    assert frozen.status == "unreachable"
    assert "expired" in frozen.reason
    depot.repository.refresh_timestamp()
    # a clock of its own that disagrees with the server's proves nothing
    set_clock(YEAR / 4)
    assert update(installed).status == "unreachable"
    set_clock(timedelta())
    outcome = update(installed)
    assert outcome.status == "installed", outcome
    assert outcome.fresh_at is not None
    assert datetime.fromisoformat(outcome.fresh_at) < datetime.now(UTC) + timedelta(minutes=2)
