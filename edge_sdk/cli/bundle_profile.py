"""`splitedge agent profile --bundle`: what this device's bundle takes, graph by graph."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edge_sdk.cli.output import print_json, print_table, waiting
from profiles.measured import BundleMeasurement

if TYPE_CHECKING:
    from rich.table import Table


def show_bundle_profile(state: Path, *, as_json: bool) -> None:
    """Measure the active bundle, and show it beside earlier measurements of the same model.

    Raises: NoBundleError; UpdateRefusedError if the bundle does not run.
    """
    from edge_sdk.bundles.measurements import Measurements
    from edge_sdk.bundles.store import BundleStore
    from edge_sdk.bundles.trial import run_trial

    active = BundleStore(state).active()
    kept = Measurements(state)
    with waiting(f"measuring {active.manifest.bundle}"):
        measured = run_trial(active.folder).measurement
    kept.keep(active.digest, measured)
    others = [
        entry.measurement
        for entry in reversed(kept.all())
        if entry.digest != active.digest
        and entry.measurement.bundle.startswith(f"{active.manifest.model}/")
    ]
    if as_json:
        print_json({"active": measured.to_dict(), "others": [other.to_dict() for other in others]})
        return
    print_table(_table([measured, *others], active.manifest.bundle))


def _table(measurements: list[BundleMeasurement], active: str) -> Table:
    from rich.table import Table

    table = Table("bundle", "graph", "ms", "MB")
    for each in measurements:
        name = f"{each.bundle} (active)" if each.bundle == active else each.bundle
        for graph, taken in each.graphs.items():
            table.add_row(name, graph, f"{taken.latency_ms:.3f}", f"{taken.memory_bytes / 1e6:.1f}")
            name = ""
        if len(each.graphs) > 1:
            table.add_row("", "all", "", f"{each.memory_bytes / 1e6:.1f}")
        table.add_section()
    return table
