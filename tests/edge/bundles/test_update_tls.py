"""TLS with a pinned authority, and a clock that is plainly wrong."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest

from edge_sdk.bundles.update import update
from tests.edge.authority import make_authority

if TYPE_CHECKING:
    from tests.edge.bundles.depot import Depot

NOW = datetime.now(UTC)


@contextmanager
def depot_of(depot_class: type[Depot], folder: Path, context: ssl.SSLContext) -> Iterator[Depot]:
    depot = depot_class(folder, context)
    try:
        yield depot
    finally:
        depot.close()


@pytest.fixture
def depot_class(depot: Depot) -> type[Depot]:
    return type(depot)


def test_pinned_authority_is_trusted_and_no_other(depot_class: type[Depot], tmp_path: Path) -> None:
    ours = make_authority(tmp_path / "ours", NOW - timedelta(days=1))
    other = make_authority(tmp_path / "other", NOW - timedelta(days=1))
    state = tmp_path / "device"
    with depot_of(depot_class, tmp_path / "tls", ours.context) as hub:
        hub.enrol(state, ours.ca)
        assert update(state).status == "unchanged"
        for ca in (other.ca, None):
            hub.served.clear()
            hub.enrol(state, ca)
            outcome = update(state)
            assert outcome.status == "unreachable"
            assert "certificate verify failed" in outcome.reason
            assert hub.served == []  # the credential was not shown to it


def test_authority_file_that_is_none_is_named(depot: Depot, state: Path, tmp_path: Path) -> None:
    text = (state / "agent.json").read_text().replace("http://", "https://")
    (state / "agent.json").write_text(text.replace('"ca": null', f'"ca": "{tmp_path}/no.pem"'))
    outcome = update(state)
    assert outcome.status == "refused"
    assert "no.pem: cannot be used to verify the server" in outcome.reason


def test_clock_behind_the_last_time_seen_skips_only_the_dates_of_our_authority(
    depot_class: type[Depot], tmp_path: Path
) -> None:
    """FAULTS row 12: the certificate is of tomorrow, or the clock is of yesterday: the device
    cannot tell, until it remembers a time later than its clock.
    """
    tomorrow = make_authority(tmp_path / "tomorrow", NOW + timedelta(days=1))
    other = make_authority(tmp_path / "other", NOW + timedelta(days=1))
    state = tmp_path / "device"
    with depot_of(depot_class, tmp_path / "tls", tomorrow.context) as hub:
        hub.enrol(state, tomorrow.ca)
        outcome = update(state)
        assert outcome.status == "unreachable"
        assert "not yet valid" in outcome.reason

        seen = NOW + timedelta(days=2)  # within the week that a timestamp lives
        (state / "tuf" / "fresh.json").write_bytes(orjson.dumps({"at": seen.isoformat()}))
        outcome = update(state)
        assert outcome.status == "unchanged"
        assert outcome.fresh_at == seen.isoformat(timespec="seconds")  # time does not go back

        hub.enrol(state, other.ca)
        assert "certificate verify failed" in update(state).reason


def test_metadata_expires_by_the_latest_time_known(depot: Depot, state: Path) -> None:
    """FAULTS row 12: a clock set back does not bring expired metadata back to life."""
    seen = NOW + timedelta(days=8)  # a timestamp lives seven
    (state / "tuf" / "fresh.json").write_bytes(orjson.dumps({"at": seen.isoformat()}))
    outcome = update(state)
    assert outcome.status == "unreachable"
    assert "expired" in outcome.reason
