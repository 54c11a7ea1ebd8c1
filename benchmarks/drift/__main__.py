"""The alert for drift on Fashion-MNIST: false alarms beside scipy's, and what it finds how soon.

    python -m benchmarks.drift --data DIR

A small network learns from plain pictures. Windows of its exit head's uncertainties are drawn from
pictures that it did not learn from, plain and changed, thousands of times. Writes
benchmarks/results/drift.json and .md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer

from benchmarks.drift.exit_head import BACKBONE, DEPTH, ExitHead, Floats
from benchmarks.drift.looks import (
    Days,
    Detection,
    Level,
    Share,
    detection,
    false_alarms,
    quiet_days,
)
from benchmarks.drift.streams import CHANGES
from benchmarks.reports import RESULTS, Data, Results, made_by, provenance, write
from edge_sdk.training.data.dataset import Dataset
from edge_sdk.training.data.load import load_dataset

TRAINED: Final = 12_000
EPOCHS: Final = 2
ALPHAS: Final = (0.5, 0.2, 0.1, 0.05, 0.01)
ANSWERS: Final = (100, 200, 400, 1_000, 4_000)
DEVICES: Final = 10
STATED: Final = (0.1, 0.01)
PER_LOOK: Final = 100

_ABOUT: Final = (
    "`{network}` answers {accuracy:.1%} of the test pictures right at its exit. The manifest rests"
    " on {held_out} held-out pictures; windows are drawn from others that the network did not learn"
    " from. In brackets: intervals of 95 %."
)
_ONE_LOOK: Final = (
    "Nothing has changed. Each window has held-out samples of its own. scipy's two-sample test"
    " (`ks_2samp`) is the oracle: on the uncertainties themselves it errs as often as its level"
    " says. Ours sees a histogram and a curve, and may err less often, never more."
)
_A_DAY: Final = (
    "A device whose pictures do not change: 96 looks a day at windows that overlap, "
    f"{PER_LOOK} answers in a quarter of an hour. `certain`: days with a look below the level;"
    " `alerts`: days with an alert, for which the distance must be 0.15 too."
)
_FOUND: Final = (
    "Share of windows that raise an alert, in a fleet of {devices} devices with one false alarm in"
    " 100 days. In brackets: scipy's test on the uncertainties themselves at the same level,"
    " without the rule of the distance."
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a run.

    Attributes:
        held_out: samples behind the manifest. windows: drawn for each figure.
    """

    trained: int = TRAINED
    epochs: int = EPOCHS
    held_out: int = 1_000
    windows: int = 2_000
    days: int = 300
    answers: tuple[int, ...] = ANSWERS
    levels_at: tuple[int, ...] = (100, 1_000)


def main(
    data: Data = None,
    results: Results = RESULTS,
    windows: Annotated[int, typer.Option(min=10, help="Windows for each figure.")] = 2_000,
    days: Annotated[int, typer.Option(min=10, help="Days without a drift.")] = 300,
) -> None:
    """Measure the alert for drift, and write the report."""
    torch.set_num_threads(1)
    shared = os.environ.get("SPLITEDGE_SHARED", Path(__file__).parents[3] / "shared")
    dataset = load_dataset("fashion-mnist", data or Path(shared) / "data")
    report = measured(dataset, Sizes(windows=windows, days=days))
    about = {"command": f"python -m benchmarks.drift --windows {windows} --days {days}"}
    report = about | provenance() | report
    blocks = blocks_of(report)
    write(results / "drift", report, blocks)
    print("\n\n".join(blocks))


def measured(data: Dataset, sizes: Sizes) -> dict[str, Any]:
    """All figures, as the report holds them."""
    head = ExitHead.trained(data, sizes.trained, sizes.epochs)
    fresh = np.concatenate([data.x_train[sizes.trained :], data.x_test])
    # the manifest's samples are no samples of the stream
    first, stream = fresh[: sizes.held_out], fresh[sizes.held_out :]
    if len(stream) > 20_000:
        stream = stream[-20_000:]
    held_out = head.uncertainties(first)
    seen = {name: head.uncertainties(change(stream)) for name, change in CHANGES.items()}
    pool: Floats = np.concatenate([held_out, seen["none"]])
    levels = [
        level
        for answers in sizes.levels_at
        for level in false_alarms(
            pool,
            held_out=sizes.held_out,
            answers=answers,
            windows=sizes.windows,
            alphas=ALPHAS,
        )
    ]
    found = [
        detection(name, values, held_out, answers=answers, windows=sizes.windows, devices=DEVICES)
        for name, values in seen.items()
        for answers in sizes.answers
        if answers <= len(values)
    ]
    days = [
        quiet_days(pool, held_out=sizes.held_out, per_look=PER_LOOK, days=sizes.days, stated=stated)
        for stated in STATED
        if sizes.days
    ]
    right = head.logits(data.x_test).argmax(axis=1) == data.y_test
    return {
        "network": f"{BACKBONE}, depth {DEPTH}",
        "accuracy": float(right.mean()),
        "held_out": sizes.held_out,
        "devices": DEVICES,
        "levels": [asdict(one) for one in levels],
        "detections": [asdict(one) for one in found],
        "days": [asdict(one) for one in days],
    }


def blocks_of(report: Mapping[str, Any]) -> list[str]:
    """The report as blocks of markdown."""
    levels = [
        Level(**(one | {"ours": Share(**one["ours"]), "scipy": Share(**one["scipy"])}))
        for one in report["levels"]
    ]
    found = [
        Detection(**(one | {"ours": Share(**one["ours"]), "scipy": Share(**one["scipy"])}))
        for one in report["detections"]
    ]
    days = [
        Days(one["stated"], Share(**one["certain"]), Share(**one["alarms"]))
        for one in report["days"]
    ]
    return [
        "# The alert for drift on Fashion-MNIST",
        made_by(report),
        _ABOUT.format(**report),
        "## False alarms of one look",
        _ONE_LOOK,
        _table(
            ("level", "answers", "ours", "scipy"),
            [(f"{one.alpha:g}", str(one.answers), str(one.ours), str(one.scipy)) for one in levels],
        ),
        "## False alarms of a day",
        _A_DAY,
        _table(
            ("stated a day", "certain", "alerts"),
            [(f"{one.stated:g}", str(one.certain), str(one.alarms)) for one in days],
        ),
        "## Drifts that are found",
        _FOUND.format(**report),
        _detections(found),
    ]


def _detections(found: Sequence[Detection]) -> str:
    sizes = sorted({one.answers for one in found})
    rows = []
    for change in dict.fromkeys(one.change for one in found):
        own = {one.answers: one for one in found if one.change == change}
        cells = [
            f"{own[n].ours.value:.1%} ({own[n].scipy.value:.1%})" if n in own else "" for n in sizes
        ]
        rows.append((change, f"{next(iter(own.values())).distance:.2f}", *cells))
    return _table(("change", "distance", *(f"{n:,} answers" for n in sizes)), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    typer.run(main)
