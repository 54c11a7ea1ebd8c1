"""Orderings that the papers claim, checked in our reports: differences of rows, seed by seed.

    python -m benchmarks.paper.orderings --scale cpu

Reads the reports of `python -m benchmarks.paper` and writes orderings-SCALE.md next to them.
Rows of one seed have the same data on the same clients, so they are compared in pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import orjson
import typer

from benchmarks.paper.measures import by_threshold, of_clients, shown
from benchmarks.paper.report import NO_GATE, RESULTS, report_path
from benchmarks.paper.tables.catalog import TABLES
from benchmarks.paper.tables.table import Scale
from benchmarks.reports import PaperResults
from edge_sdk.durable import make_folder, write_atomic
from server.training.comparison.intervals import Interval, mean_interval

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Claim:
    """The row `above` has more of a measure than every row of `below`."""

    table: str
    measure: str
    above: str
    below: Sequence[str]


_ABLATED: Final = [row.name for row in TABLES["besplit"].rows if row.name.startswith("no ")]
# the baselines of HARMONY's tables; fine-tuned SplitGP is above HARMONY at rho 0 in its Table 2
_OF_HARMONY: Final = ("SplitGP, lambda 0.2", "SplitGP, lambda 0.9", "multi-exit", "SplitFed")

_OF_PAPERS: Final[Sequence[Claim]] = (
    Claim("supersfl", "accuracy", "SuperSFL", ["SplitFedV1"]),
    Claim(
        "supersfl-fusion",
        "accuracy",
        "depth and loss",
        ["no loss", "no depth", "equal"],
    ),
    Claim(
        "besplit",
        "accuracy",
        "BESplit",
        [*_ABLATED, "SplitFed", "MergeSFL", "FedAvg", "FedDyn"],
    ),
    Claim("besplit-iid", "accuracy", "BESplit", ["SplitFed"]),
    Claim("scala", "accuracy", "SCALA", ["Minibatch-SFL", "FedLC"]),
    Claim("scala", "accuracy", "Minibatch-SFL", ["SplitFedV1"]),
    Claim(
        "harmony",
        "rho 0.8",
        "HARMONY",
        [*_OF_HARMONY, "SplitGP, lambda 0.2, fine-tuned", "no alignment", "no stochastic depth"],
    ),
    Claim("harmony", "rho 0", "HARMONY", _OF_HARMONY),
    *(
        Claim(f"splitlpf-{kind}", measure, "SplitLPF", ["SplitGP", "SplitFed", "FedAvg"])
        for kind in ("udd", "uds", "udds")
        for measure in ("jain", "clients")
    ),
    # PFSL is 0.1 points above SplitLPF on UDD in the paper, and 0.5 below on the other two
    Claim("splitlpf-udd", "clients", "PFSL", ["SplitLPF"]),
    Claim("splitlpf-udd", "clients", "SplitLPF", ["Ditto", "FedPer"]),
    Claim("splitlpf-uds", "clients", "SplitLPF", ["PFSL", "Ditto", "FedPer"]),
    Claim("splitlpf-udds", "clients", "SplitLPF", ["PFSL", "Ditto", "FedPer"]),
    Claim(
        "default",
        "accuracy",
        "default",
        ["SuperSFL", "BESplit", "SCALA", "HARMONY", "SplitLPF"],
    ),
    Claim("default", "ood", "default", ["SuperSFL", "BESplit", "SCALA", "HARMONY", "SplitLPF"]),
)
# Tables of the same rows with a smaller network, other data or fewer rounds.
_VARIANTS: Final[Mapping[str, str]] = {
    "supersfl-fusion": "supersfl-fusion-cnn6",
    "besplit": "besplit-cnn6",
    "harmony": "harmony-cnn6",
    "scala": "scala-60",
}
_SHARES: Final = [row.name for row in TABLES["supersfl-availability-cnn6"].rows]

CLAIMS: Final[Sequence[Claim]] = (
    *_OF_PAPERS,
    *(replace(each, table=_VARIANTS[each.table]) for each in _OF_PAPERS if each.table in _VARIANTS),
    Claim("supersfl-availability-cnn6", "accuracy", _SHARES[0], _SHARES[1:]),
)


@app.command(epilog="Example: python -m benchmarks.paper.orderings --scale cpu")
def orderings(
    scale: Annotated[Scale, typer.Option(help="Scale of the reports.")] = "cpu",
    results: PaperResults = RESULTS,
) -> None:
    """Tell for each ordering whether the reports in the folder show it."""
    about = (
        f"Scale `{scale}`. Difference: the first row less the second, in points, mean ± half width"
        " of the 95 % interval over seeds, each seed compared with itself. An ordering is shown"
        " where the interval lies above 0, reversed where below, and open where 0 is in it. Gated"
        " pairs are compared by thresholds that were chosen on held-out samples; rows without a"
        " gate beside them say so."
    )
    head = (
        "| table | measure | above | below | difference | seeds above | |\n"
        "| --- | --- | --- | --- | --- | --- | --- |"
    )
    rows = []
    for claim in (each for each in CLAIMS if scale in TABLES[each.table].scales):
        path = report_path(results, claim.table, scale).with_suffix(".json")
        if not path.is_file():
            typer.echo(f"{path.name} does not exist: left out", err=True)
            continue
        report = orjson.loads(path.read_bytes())
        rows += [_line(claim, report, below) for below in claim.below]
    lines = "\n".join([head, *rows])
    text = f"# Orderings that the papers claim\n\n{about}\n\n{lines}\n"
    path = report_path(results, "orderings", scale).with_suffix(".md")
    make_folder(path.parent)
    write_atomic(path, text.encode())
    typer.echo(f"{text}\nwritten to {path}")


def differences(report: Mapping[str, Any], measure: str, above: str, below: str) -> list[float]:
    """`above` less `below`, for every seed that has both rows."""
    found = {(run["row"], run["seed"]): run["measures"].get(measure) for run in report["runs"]}
    pairs = [(found.get((above, seed)), found.get((below, seed))) for seed in report["seeds"]]
    return [one - other for one, other in pairs if one is not None and other is not None]


def verdict(found: Interval) -> str:
    """`shown`, `reversed`, or `open` where 0 is in the interval or there is one seed only."""
    if math.isnan(found.half_width) or abs(found.mean) <= found.half_width:
        return "open"
    return "shown" if found.mean > 0 else "reversed"


def _line(claim: Claim, report: Mapping[str, Any], below: str) -> str:
    apart = differences(report, claim.measure, claim.above, below)
    gated = {row: _has_gate(report, row, claim.measure) for row in (claim.above, below)}
    named = {
        row: f"{row} ({NO_GATE})" if any(gated.values()) and not has_gate else row
        for row, has_gate in gated.items()
    }
    measure = shown(_headline(report, claim.measure, any(gated.values())))
    head = f"| {claim.table} | {measure} | {named[claim.above]} | {named[below]} |"
    if not apart:
        return f"{head} - | - | not run |"
    found = mean_interval(apart)
    difference = f"{found.mean:.4g}" if found.seeds == 1 else str(found)
    above = sum(each > 0 for each in apart)
    return f"{head} {difference} | {above} of {len(apart)} | {verdict(found)} |"


def _has_gate(report: Mapping[str, Any], row: str, measure: str) -> bool:
    key = by_threshold(measure, "oracle")
    return any(run["row"] == row and key in run["measures"] for run in report["runs"])


def _headline(report: Mapping[str, Any], measure: str, gated: bool) -> str:
    """Name of a measure, with the choice of thresholds that its figures are by."""
    if gated:
        return by_threshold(measure, "held_out")
    if of_clients(measure) and "recipes" not in report:
        return f"{shown(measure)} (earlier version: gated rows by the oracle)"
    return measure


if __name__ == "__main__":
    app()
