"""What a device measured of its bundles is kept beside them, whatever happens to the report."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from edge_sdk.bundles.lifecycle import BundleLifecycle
from edge_sdk.bundles.measurements import KEPT_MOST, Measurements
from edge_sdk.bundles.store import BundleStore
from edge_sdk.bundles.update import measure, update
from edge_sdk.errors import OutOfMemoryError
from edge_sdk.identity import Identity
from edge_sdk.manifest import BundleManifest, ModelManifest
from edge_sdk.monitor.monitor import Limits, Monitor
from edge_sdk.offload.link_meter import LinkSample
from edge_sdk.settings import AgentSettings
from edge_sdk.state import StateLock
from profiles.measured import BundleMeasurement, GraphMeasurement

if TYPE_CHECKING:
    from tests.edge.bundles.depot import Depot, Export


def measured(bundle: str, latency_ms: float = 1.0) -> BundleMeasurement:
    return BundleMeasurement(bundle, {"exit": GraphMeasurement(latency_ms, 10, 5)}, 2.0, 10)


def test_a_bundle_is_measured_when_it_is_installed(depot: Depot, installed: Path) -> None:
    """`installed` was brought to tiny/1/d2 by an update; this one goes to tiny/2/d2."""
    before = [entry.measurement.bundle for entry in Measurements(installed).all()]
    assert update(installed, "tiny/2/d2").status == "installed"
    kept = Measurements(installed)
    assert before == ["tiny/1/d2"]
    assert [entry.measurement.bundle for entry in kept.all()] == ["tiny/1/d2", "tiny/2/d2"]
    found = kept.of(BundleStore(installed).active().digest)
    assert found is not None
    assert found.latency_ms > 0
    # the depot has no place for measurements, as a server of an older release
    assert not any(entry.reported for entry in kept.all())


def test_a_bundle_that_an_older_release_installed_is_measured_by_the_next_update(
    depot: Depot, installed: Path
) -> None:
    (installed / "measurements.json").unlink()
    assert update(installed, "tiny/1/d2").status == "unchanged"
    (entry,) = Measurements(installed).all()
    assert entry.measurement.bundle == "tiny/1/d2"


def test_a_second_measurement_replaces_the_first_and_the_oldest_go(tmp_path: Path) -> None:
    kept = Measurements(tmp_path)
    for number in range(KEPT_MOST):
        kept.keep(f"{number:064x}", measured(f"m/{number + 1}/d1"))
    kept.keep(f"{3:064x}", measured("m/4/d1", latency_ms=2.0))
    assert kept.of(f"{3:064x}") == measured("m/4/d1", latency_ms=2.0)
    assert len(kept.all()) == KEPT_MOST
    kept.keep("f" * 64, measured("m/99/d1"))
    assert len(kept.all()) == KEPT_MOST
    assert kept.of(f"{0:064x}") is None
    assert kept.all()[-1].measurement.bundle == "m/99/d1"


@pytest.mark.parametrize("content", [b"", b"[1]", b'[{"digest": "0"}]', b"\x00" * 50])
def test_a_damaged_file_counts_as_empty(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "measurements.json").write_bytes(content)
    kept = Measurements(tmp_path)
    assert kept.all() == []
    assert "taken as empty" in caplog.text
    kept.keep("0" * 64, measured("m/1/d1"))
    assert len(kept.all()) == 1


class Watching:
    """A device's bundle for the monitor to look at."""

    def __init__(self, state: Path) -> None:
        self.bundle = BundleLifecycle.start(state, AgentSettings())
        self.measure_bundles = self.bundle.measure

    def running_bundle(self) -> tuple[str, str]:
        return self.bundle.runner.manifest.bundle, self.bundle.digest

    def take_latency_ms(self) -> None:
        return None

    def take_link(self) -> LinkSample:
        return LinkSample()


def test_a_variant_that_could_not_be_measured_is_tried_again(
    installed: Path, depot: Depot, caplog: pytest.LogCaptureFixture
) -> None:
    day = 86_400.0
    # its own thread looks once in an hour
    monitor = Monitor(installed, Identity.load(installed), Watching(installed), Limits(0.25, day))

    def asked() -> int:
        return sum(served.path.endswith("/unmeasured") for served in depot.served)

    try:
        monitor.look(0.0)
        monitor.look(day)  # a server without an answer
        depot.unmeasured = ["tiny/2/d2"]
        monitor.look(day + 59.0)
        assert asked() == 1
        with StateLock(installed, "update"):
            monitor.look(day + 61.0)
        assert "tiny/2/d2 not measured: another update" in caplog.text
        for after_s in (179.0, 200.0, day):
            monitor.look(day + after_s)
    finally:
        monitor.close()
    assert asked() == 3
    kept = [entry.measurement.bundle for entry in Measurements(installed).all()]
    assert kept == ["tiny/1/d2", "tiny/2/d2"]


def test_a_measurement_that_took_long_is_tried_again_a_pause_after_its_end(
    installed: Path, depot: Depot
) -> None:
    device = Watching(installed)
    depot.unmeasured = ["tiny/2/d2"]

    def stop_late() -> None:
        depot.faults.before_target = None  # the next ones come at once
        time.sleep(2.0)
        measurer = device.bundle._measurer
        assert measurer is not None
        measurer.terminate()

    depot.faults.before_target = stop_late
    # its own thread looks once in an hour
    day = 86_400.0
    monitor = Monitor(installed, Identity.load(installed), device, Limits(0.25, day))
    tried = []
    try:
        for now in (0.0, day, day + 61.0, day + 120.0):
            before = len(depot.served)
            monitor.look(now)
            if any(served.path.endswith("/unmeasured") for served in depot.served[before:]):
                tried.append(now - day)
    finally:
        monitor.close()
    assert tried == [0.0, 120.0]
    assert [entry.measurement.bundle for entry in Measurements(installed).all()][1:] == [
        "tiny/2/d2"
    ]


@pytest.mark.parametrize("left", [False, True])
def test_a_measurement_that_was_refused_is_tried_again_after_a_day_or_with_another_bundle(
    installed: Path, depot: Depot, caplog: pytest.LogCaptureFixture, *, left: bool
) -> None:
    device = Watching(installed)
    depot.unmeasured = ["tiny/9/d2"]  # it was never published
    day = 86_400.0
    # its own thread looks once in a minute
    monitor = Monitor(installed, Identity.load(installed), device, Limits(0.25, 1200.0))
    tried = []
    try:
        for after_s in (-1200.0, 0.0, 3600.0, 5000.0, day - 1.0, day + 60.0):
            if left and after_s == 3600.0:
                assert update(installed, "tiny/2/d2").status == "installed"
                device.bundle._switch_bundle()
            before = len(depot.served)
            monitor.look(day + after_s)
            if any(served.path.endswith("/unmeasured") for served in depot.served[before:]):
                tried.append(after_s)
    finally:
        monitor.close()
    assert "tiny/9/d2 not measured: " in caplog.text
    assert "tried again in a day" in caplog.text
    assert tried == [0.0, 5000.0 if left else day + 60.0]


def test_a_report_without_a_server_is_kept_for_later(tmp_path: Path, free_port: int) -> None:
    kept = Measurements(tmp_path)
    kept.keep("0" * 64, measured("m/1/d1"))
    server = f"http://127.0.0.1:{free_port}"
    kept.report(Identity(server, "pi-1", "default", "c0ffee" * 10, None))
    assert [entry.reported for entry in kept.all()] == [False]


def test_a_bundle_that_ran_short_beside_another_one_is_not_held_against_the_device(
    depot: Depot, export: Export, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure would keep this depth from the device, whose own bundle of this depth runs."""
    folder = export.write(1)
    other = folder / "bundles" / "d2-int8"
    shutil.copytree(folder / "bundles" / "d2", other)
    manifest = replace(BundleManifest.load(other), bundle="tiny/1/d2-int8")
    (other / "manifest.json").write_bytes(manifest.to_json())
    model = replace(ModelManifest.load(folder), variants=("d2", "d2-int8"))
    (folder / "model.json").write_bytes(model.to_json())
    depot.repository.publish_bundles(folder)
    assert update(state, "tiny/1/d2").status == "installed"
    told: list[str] = []

    def short(*_: object) -> None:
        raise OutOfMemoryError("trial: too little for both")

    monkeypatch.setattr("edge_sdk.bundles.update.run_trial", short)
    monkeypatch.setattr(
        "edge_sdk.bundles.update.tell_failure", lambda *words: told.append(words[1])
    )
    outcome = measure(state, ["tiny/1/d2-int8"])
    assert (outcome.status, outcome.reason) == (
        "refused",
        "tiny/1/d2-int8: trial: too little for both",
    )
    assert not told
    monkeypatch.undo()
    assert update(state, "tiny/1/d2-int8").status == "installed"
