"""Report of an adoption, as JSON for scripts and as a table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from exporters.adopt.adoption import Adoption, CutFigures


def report_of(adoption: Adoption) -> dict[str, Any]:
    """The report as JSON has it. Figures of `cuts` are of the test part, which chose nothing.

    `{model, classes, seconds, labelled, cuts: [{depth, tensor, z_bytes, x_bytes, device_share,
    exit_rate, agreement, hybrid_agreement, accuracy?, hybrid_accuracy?, whole_accuracy?}]}`, and
    what else is known. `agreement` is 1 where nothing exits.
    """
    manifest = adoption.manifest
    return {
        "model": manifest.name,
        "version": manifest.version,
        "path": str(adoption.path),
        "classes": len(manifest.class_names),
        "seconds": round(adoption.seconds, 2),
        "head_seconds": round(adoption.head_seconds, 2),
        "labelled": adoption.labelled,
        "samples": adoption.samples,
        "figures_of": "test",
        "threshold_chosen_on": "folds of train and held_out" if adoption.crossed else "held_out",
        "by_sample": adoption.by_sample,
        "warnings": list(adoption.warnings),
        "cuts": [_row(each) for each in adoption.cuts],
    }


def table_of(adoption: Adoption) -> Table:
    """The report for people."""
    count = adoption.samples["test"]
    table = Table(
        title=f"{adoption.path} on {count} test samples, which chose nothing", title_justify="left"
    )
    headings = ["depth", "work", "z B", "x B", "exits", "agree", "hybrid\nagrees"]
    if adoption.labelled:
        headings += ["head", "hybrid", "whole"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for each in adoption.cuts:
        figures = each.figures
        agreement = figures.agreement if figures.exit_rate else None
        shares = [figures.exit_rate, agreement, figures.hybrid_agreement]
        if adoption.labelled:
            shares += [figures.accuracy, figures.hybrid_accuracy, figures.whole_accuracy]
        table.add_row(
            str(each.cut.depth),
            f"{each.cut.device_share:.1%}",
            str(each.z_bytes),
            str(each.x_bytes),
            *("" if share is None else f"{share:.1%}" for share in shares),
        )
    return table


def _row(each: CutFigures) -> dict[str, Any]:
    figures = each.figures
    row = {
        "depth": each.cut.depth,
        "tensor": each.tensor,
        "z_shape": list(each.cut.shape),
        "z_bytes": each.z_bytes,
        "x_bytes": each.x_bytes,
        "codec": each.codec,
        "bottleneck": None if each.bottleneck is None else list(each.bottleneck),
        "device_share": each.cut.device_share,
        "gate": each.gate.policy,
        "threshold": each.gate.threshold,
        "exit_rate": figures.exit_rate,
        "agreement": figures.agreement,
        "hybrid_agreement": figures.hybrid_agreement,
        "bytes_per_query": (1 - figures.exit_rate) * each.z_bytes,
    }
    if figures.whole_accuracy is not None:
        row["accuracy"] = figures.accuracy
        row["hybrid_accuracy"] = figures.hybrid_accuracy
        row["whole_accuracy"] = figures.whole_accuracy
    return row
