"""An update where nothing goes wrong, and one where there is nothing to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edge_sdk.bundles.golden import check_golden
from edge_sdk.bundles.run_update import run_update
from edge_sdk.bundles.store import BundleStore
from edge_sdk.bundles.update import update
from edge_sdk.state import StateLock

if TYPE_CHECKING:
    from tests.edge.bundles.depot import Depot, Export


def test_assigned_bundle_is_installed_by_the_updater_process(
    depot: Depot, export: Export, state: Path
) -> None:
    assert depot.repository.publish_bundles(export.write(1)) == ("tiny/1/d2",)
    depot.assigned = "tiny/1/d2"

    outcome = run_update(state)

    assert (outcome.status, outcome.bundle, outcome.reason) == ("installed", "tiny/1/d2", "")
    assert outcome.fresh_at is not None
    active = BundleStore(state).active()
    assert active.manifest.bundle == "tiny/1/d2"
    assert active.fallback is None
    assert check_golden(active.folder).samples == 5
    exported = export.root / "tiny/1/bundles/d2"
    names = {path.name for path in active.folder.iterdir()}
    assert names == {"manifest.json", "exit.onnx", "golden.bin"}
    assert all((active.folder / n).read_bytes() == (exported / n).read_bytes() for n in names)


def test_device_that_has_the_assigned_bundle_only_refreshes(
    depot: Depot, export: Export, state: Path
) -> None:
    depot.repository.publish_bundles(export.write(1))
    depot.assigned = "tiny/1/d2"
    assert update(state).status == "installed"
    depot.served.clear()

    outcome = update(state)

    assert (outcome.status, outcome.reason) == ("unchanged", "")
    # the next root there is not, a timestamp that did not change, and nothing else
    asked = [served.path for served in depot.served]
    assert asked == [
        "/api/v1/devices/pi-4/assignment",
        "/tuf/metadata/2.root.json",
        "/tuf/metadata/timestamp.json",
    ]


def test_update_during_a_measurement_says_so_and_is_no_refusal(
    depot: Depot, export: Export, state: Path
) -> None:
    depot.repository.publish_bundles(export.write(1))
    depot.assigned = "tiny/1/d2"
    with StateLock(state, "update"):
        outcome = run_update(state)
    assert outcome.status == "busy"
    assert "under way on this device; try again" in outcome.reason
    assert depot.served == []  # nothing was asked, and nothing was reported
    assert run_update(state).status == "installed"


def test_device_without_an_assignment_changes_nothing(depot: Depot, state: Path) -> None:
    outcome = update(state)
    assert (outcome.status, outcome.bundle) == ("unchanged", None)
    assert "no bundle is assigned" in outcome.reason
    assert outcome.fresh_at is not None


def test_going_back_to_the_bundle_before_fetches_nothing(
    depot: Depot, export: Export, state: Path
) -> None:
    for version in (1, 2):
        depot.repository.publish_bundles(export.write(version))
        assert update(state, f"tiny/{version}/d2").status == "installed"
    depot.served.clear()

    assert update(state, "tiny/1/d2").status == "installed"

    assert BundleStore(state).active().manifest.bundle == "tiny/1/d2"
    assert not [served for served in depot.served if "/targets/" in served.path]


def test_refreshed_metadata_is_taken_by_a_device_that_knows_the_old(
    depot: Depot, export: Export, state: Path
) -> None:
    depot.repository.publish_bundles(export.write(1))
    assert update(state, "tiny/1/d2").status == "installed"
    for _ in range(3):
        depot.repository.refresh_timestamp()
    assert update(state, "tiny/1/d2").status == "unchanged"


def test_bundle_that_is_not_published_is_refused_by_name(depot: Depot, state: Path) -> None:
    outcome = update(state, "tiny/9/d2")
    assert outcome.status == "refused"
    assert "tiny/9/d2" in outcome.reason


def test_wrong_credential_is_refused_and_says_what_to_do(depot: Depot, state: Path) -> None:
    text = (state / "agent.json").read_text()
    (state / "agent.json").write_text(text.replace("c0ffee", "c0ffff", 1))
    outcome = update(state)
    assert outcome.status == "refused"
    assert "enrol again" in outcome.reason


def test_device_that_was_never_enrolled_is_told_so(tmp_path: Path) -> None:
    outcome = update(tmp_path / "not-enrolled")
    assert outcome.status == "refused"
    assert "not enrolled" in outcome.reason


def test_server_that_is_away_leaves_the_bundle_and_says_since_when(
    depot: Depot, export: Export, state: Path
) -> None:
    depot.repository.publish_bundles(export.write(1))
    fresh_at = update(state, "tiny/1/d2").fresh_at
    away = (state / "agent.json").read_text().replace(depot.url, "http://127.0.0.1:9")
    (state / "agent.json").write_text(away)

    outcome = update(state)

    assert outcome.status == "unreachable"
    assert outcome.fresh_at == fresh_at
    assert fresh_at is not None
    assert BundleStore(state).active().manifest.bundle == "tiny/1/d2"
