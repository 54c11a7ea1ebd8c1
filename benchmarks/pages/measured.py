"""The measured part of a page of docs/methods, made from the committed reports of its tables.

A page says which tables it shows by a mark, `<!-- measured: besplit besplit-iid -->`; what stands
from there to `<!-- end of measured -->` is made here. The page of a method that has rows in the
tables of another names one table and these rows, its own first:
`<!-- measured: besplit: FedDyn; FedAvg -->`. `<!-- report: training-digits -->` shows a whole
report of benchmarks/results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from benchmarks.pages.plots import CURVES, drawn
from benchmarks.paper.curves import Curves, curves_of
from benchmarks.paper.report import RESULTS, report_path
from benchmarks.paper.tables.catalog import TABLES
from benchmarks.paper.tables.table import Scale
from benchmarks.reports import ROOT
from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.errors import ConfigurationError

PAGES: Final = ROOT / "docs" / "methods"
END: Final = "<!-- end of measured -->"
_BEGIN: Final = re.compile(r"<!-- measured: ([a-z0-9 -]+?)(?:: ([^\n]+?))? -->\n")
_REPORT: Final = re.compile(r"<!-- report: ([a-z0-9-]+) -->\n")
_MARK: Final = re.compile(f"{_BEGIN.pattern}|{_REPORT.pattern}")
_BANDS: Final = "Means over the seeds; bands reach from the worst seed to the best."
_SCALES: Final[tuple[Scale, ...]] = ("full", "cpu")  # `smoke` only shows that the code runs


@dataclass(frozen=True, slots=True)
class Mark:
    """The tables and rows that the mark of a page asks for.

    Attributes:
        tables: their names.
        rows: of the one table, the page's own first; empty for all rows of all tables.
    """

    tables: Sequence[str]
    rows: Sequence[str]

    @property
    def table(self) -> str:
        """The one table whose rows are asked for."""
        return self.tables[0]

    def picture(self, report: Path) -> str:
        """Name of the picture of these rows of a report."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.rows[0].lower())
        return f"{report.stem}-{slug}"

    def curves(self, report: Path) -> Curves:
        """Curves of the rows asked for, in their order; none where the own row has none."""
        found = curves_of(orjson.loads(report.with_suffix(".json").read_bytes()))
        own = {row: found[row] for row in self.rows if row in found}
        return own if self.rows[0] in own else {}


def marks_of(text: str) -> list[Mark]:
    """The marks of a page."""
    return [_mark(begun) for begun in _BEGIN.finditer(text)]


def pictures(pages: Path = PAGES, results: Path = RESULTS) -> Mapping[str, bytes]:
    """All pictures by name: of every report that has curves, and of the rows that pages name."""
    named = {report for name in TABLES for report in _reports(results, name)}
    reports = sorted(named.union(*(results.glob(f"*-{scale}.json") for scale in _SCALES)))
    found = {report.stem: curves_of(orjson.loads(report.read_bytes())) for report in reports}
    for path in sorted(pages.glob("*.md")):
        for mark in (mark for mark in marks_of(path.read_text()) if mark.rows):
            for report in _reports(results, mark.table):
                found[mark.picture(report)] = mark.curves(report)
    return {name: drawn(curves) for name, curves in found.items() if curves}


def with_figures(text: str, results: Path = RESULTS) -> str:
    """A page with the figures of the reports as they are now.

    Raises: ConfigurationError if a mark names no table and no report, or has no end.
    """
    parts = []
    while begun := _MARK.search(text):
        body, ended, rest = text[begun.end() :].partition(END)
        if not ended or _MARK.search(body):
            raise ConfigurationError(
                f"measured figures: expected {END!r} behind {begun[0].strip()!r}; put it back"
            )
        blocks = "\n\n".join(_made(begun[0], results))
        parts += [text[: begun.end()], f"\n{blocks}\n\n", END]
        text = rest
    return "".join([*parts, text])


def rewrite(pages: Path = PAGES, results: Path = RESULTS) -> list[Path]:
    """Write the figures into every page, and draw the curves; what changed.

    Raises: ConfigurationError, StorageError.
    """
    changed = []
    make_folder(CURVES)
    for name, picture in pictures(pages, results).items():
        path = CURVES / f"{name}.svg"
        if not path.exists() or path.read_bytes() != picture:
            write_atomic(path, picture)
            changed.append(path)
    for path in sorted(pages.glob("*.md")):
        text = path.read_text()
        if (now := with_figures(text, results)) != text:
            write_atomic(path, now.encode())
            changed.append(path)
    return changed


def _made(begun: str, results: Path) -> Iterator[str]:
    """Blocks between a mark, `begun`, and its end.

    Raises: ConfigurationError.
    """
    if named := _REPORT.fullmatch(begun):
        yield from _whole(named[1], results)
        return
    for mark in marks_of(begun):
        yield from _of_rows(mark, results) if mark.rows else _blocks(mark.tables, results)


def _whole(name: str, results: Path) -> Iterator[str]:
    """A report that is no table of a paper; it lies beside the folder of these.

    Raises: ConfigurationError if there is none of that name.
    """
    path = results.parent / f"{name}.md"
    if not path.is_file():
        raise ConfigurationError(f"measured figures: {name}: no such report in {path.parent}")
    title, *blocks = path.read_text().strip().split("\n\n")
    yield f"### {title.removeprefix('# ')}"
    yield from blocks


def _mark(begun: re.Match[str]) -> Mark:
    """A mark as it stands in a page.

    Raises: ConfigurationError if it names a table that there is not, or a row that the table lacks.
    """
    tables = begun[1].split()
    for name in tables:
        if name not in TABLES:
            raise ConfigurationError(f"measured figures: {name}: no such table in {list(TABLES)}")
    rows = begun[2].split("; ") if begun[2] else []
    known = [row.name for row in TABLES[tables[0]].rows]
    if lacking := sorted(set(rows) - set(known)):
        raise ConfigurationError(
            f"measured figures: {tables[0]}: expected rows of {known}, got {lacking}"
        )
    return Mark(tables, rows)


def _of_rows(mark: Mark, results: Path) -> Iterator[str]:
    """Some rows of a table at each scale, and their curves."""
    for report in _reports(results, mark.table):
        title, _, made, table, *_ = report.with_suffix(".md").read_text().strip().split("\n\n")
        lines = table.splitlines()
        by_row = {line.split(" | ")[0].strip("| "): line for line in lines[2:]}
        yield f"### {title.removeprefix('# ')}, some rows"
        yield "\n".join([*lines[:2], *(by_row[row] for row in mark.rows if row in by_row)])
        yield f"From the table of {made}"
        if mark.curves(report):
            name = f"../pictures/curves/{mark.picture(report)}.svg"
            yield f"![{mark.rows[0]}: accuracy by round]({name})"
            yield _BANDS


def _reports(results: Path, name: str) -> list[Path]:
    """The JSON of a table's reports, one a scale, as far as there are any."""
    found = [_report(results, name, scale).with_suffix(".json") for scale in _SCALES]
    return [path for path in found if path.exists()]


def _blocks(tables: Sequence[str], results: Path) -> Iterator[str]:
    """Blocks between the marks: each table of each scale, then the claims of the papers."""
    for name in tables:
        found = [scale for scale in _SCALES if _report(results, name, scale).exists()]
        for scale in found:
            title, *blocks = _report(results, name, scale).read_text().strip().split("\n\n")
            yield f"### {title.removeprefix('# ')}, scale `{scale}`"
            yield from blocks
            yield from _picture(_report(results, name, scale), TABLES[name].title)
        if not found:
            scale = "cpu" if "cpu" in TABLES[name].scales else "full"
            yield (
                f"### {TABLES[name].title}\n\nNot trained yet:"
                f" `python -m benchmarks.paper {name} --scale {scale} --data DIR` does it."
            )
    claims = {scale: lines for scale in _SCALES if (lines := _claims(tables, results, scale))}
    if claims:
        yield "### What the paper claims, seed by seed"
        yield (
            "The first row less the second, in points, mean ± half width of the 95 % interval. A"
            " claim is *shown* where the interval lies above 0, *reversed* where it lies below, and"
            " *open* where 0 is in it, or where there is one seed only."
        )
    for scale, lines in claims.items():
        yield f"Scale `{scale}`:"
        yield "\n".join(lines)


def _picture(report: Path, title: str) -> Iterator[str]:
    """The picture of a report's curves, and the words below it, if the report has curves."""
    if curves_of(orjson.loads(report.with_suffix(".json").read_bytes())):
        yield f"![{title}: accuracy by round](../pictures/curves/{report.stem}.svg)"
        yield _BANDS


def _claims(tables: Sequence[str], results: Path, scale: Scale) -> list[str]:
    """The lines of the report on orderings that are of these tables, below its head.

    A line of a row that was not trained is left out; there is nothing without any other.
    """
    path = _report(results, "orderings", scale)
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    own = [line for line in lines[2:] if line.split(" | ")[0].strip("| ") in tables]
    own = [line for line in own if not line.endswith("| not run |")]
    return [*lines[:2], *own] if own else []


def _report(results: Path, name: str, scale: Scale) -> Path:
    return report_path(results, name, scale).with_suffix(".md")
