"""The measured part of a page of docs/methods, made from the committed reports of its tables.

A page says which tables it shows by a mark, `<!-- measured: besplit besplit-iid -->`; what stands
from there to `<!-- end of measured -->` is made here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import orjson

from benchmarks.pages.plots import CURVES, curves_of, draw
from benchmarks.paper.catalog import TABLES
from benchmarks.paper.report import RESULTS, report_path
from benchmarks.paper.tables import Scale
from benchmarks.reports import ROOT
from edge_sdk.durable import write_atomic
from edge_sdk.errors import ConfigurationError

PAGES: Final = ROOT / "docs" / "methods"
END: Final = "<!-- end of measured -->"
_BEGIN: Final = re.compile(r"<!-- measured: ([a-z0-9 -]+?) -->\n")
_SCALES: Final[tuple[Scale, ...]] = ("full", "cpu")  # `smoke` only shows that the code runs


def with_figures(text: str, results: Path = RESULTS) -> str:
    """A page with the figures of the reports as they are now.

    Raises: ConfigurationError if a mark names no table, or has no end.
    """
    parts = []
    while begun := _BEGIN.search(text):
        body, ended, rest = text[begun.end() :].partition(END)
        if not ended or _BEGIN.search(body):
            raise ConfigurationError(
                f"measured figures: expected {END!r} behind {begun[0].strip()!r}; put it back"
            )
        blocks = "\n\n".join(_blocks(begun[1].split(), results))
        parts += [text[: begun.end()], f"\n{blocks}\n\n", END]
        text = rest
    return "".join([*parts, text])


def rewrite(pages: Path = PAGES, results: Path = RESULTS) -> list[Path]:
    """Write the figures into every page, and draw the curves; what changed.

    Raises: ConfigurationError, StorageError.
    """
    before = {path: path.read_bytes() for path in CURVES.glob("*.svg")}
    drawn = [
        draw(report) for scale in _SCALES for report in sorted(results.glob(f"*-{scale}.json"))
    ]
    changed = [path for path in drawn if path and before.get(path) != path.read_bytes()]
    for path in sorted(pages.glob("*.md")):
        text = path.read_text()
        if (now := with_figures(text, results)) != text:
            write_atomic(path, now.encode())
            changed.append(path)
    return changed


def _blocks(tables: Sequence[str], results: Path) -> Iterator[str]:
    """Blocks between the marks: each table of each scale, then the claims of the papers."""
    for name in tables:
        if name not in TABLES:
            raise ConfigurationError(f"measured figures: {name}: no such table in {list(TABLES)}")
        found = [scale for scale in _SCALES if _report(results, name, scale).exists()]
        for scale in found:
            title, *blocks = _report(results, name, scale).read_text().strip().split("\n\n")
            yield f"### {title.removeprefix('# ')}, scale `{scale}`"
            yield from blocks
            yield from _picture(_report(results, name, scale), TABLES[name].title)
        if not found:
            yield (
                f"### {TABLES[name].title}\n\nNot trained yet:"
                f" `python -m benchmarks.paper {name} --scale cpu --data DIR` does it."
            )
    if claims := list(_claims(tables, results)):
        yield "### What the paper claims, seed by seed"
        yield (
            "The first row less the second, in points, mean ± half width of the 95 % interval. A"
            " claim is *shown* where the interval lies above 0, *reversed* where it lies below, and"
            " *open* where 0 is in it."
        )
        yield "\n".join(claims)


def _picture(report: Path, title: str) -> Iterator[str]:
    """The picture of a report's curves, and the words below it, if the report has curves."""
    if curves_of(orjson.loads(report.with_suffix(".json").read_bytes())):
        yield f"![{title}: accuracy by round](../pictures/curves/{report.stem}.svg)"
        yield "Means over the seeds; bands reach from the worst seed to the best."


def _claims(tables: Sequence[str], results: Path) -> Iterator[str]:
    """The lines of the report on orderings that are of these tables, below its head."""
    path = results / "orderings-cpu.md"
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    own = [line for line in lines[2:] if line.split(" | ")[0].strip("| ") in tables]
    yield from [*lines[:2], *own] if own else []


def _report(results: Path, name: str, scale: Scale) -> Path:
    return report_path(results, name, scale).with_suffix(".md")
