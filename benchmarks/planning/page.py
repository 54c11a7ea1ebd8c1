"""The planned parts of docs/planning.md: what stands between its marks is made here.

<!-- planned: 10000 -->        the plan of so many devices
<!-- planned: figures -->      the figures behind it
<!-- planned: arrivals -->     the simulated arrivals
<!-- end of planned -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.reports import RESULTS, ROOT
from edge_sdk.durable import write_atomic
from edge_sdk.errors import ConfigurationError
from server.planning.figures import load_figures
from server.planning.fleet import Fleet, Prices
from server.planning.plan import plan_of
from server.planning.words import amount, limit_cells, line_cells, summary

PAGE: Final = ROOT / "docs" / "planning.md"
END: Final = "<!-- end of planned -->"
_BEGIN: Final = re.compile(r"<!-- planned: ([a-z0-9]+) -->\n")
_LINK: Final = "[{0}](../benchmarks/results/{0}.md)"


def with_plans(text: str, results: Path = RESULTS) -> str:
    """The page with the plans of the figures as they are now.

    Raises: ConfigurationError if a mark has no end, or names nothing.
    """
    parts = []
    while begun := _BEGIN.search(text):
        _, ended, rest = text[begun.end() :].partition(END)
        if not ended or _BEGIN.search(text[begun.end() : -len(rest) or None]):
            raise ConfigurationError(
                f"planned parts: expected {END!r} behind {begun[0].strip()!r}; put it back"
            )
        blocks = "\n\n".join(_blocks(begun[1], results))
        parts += [text[: begun.end()], f"\n{blocks}\n\n", END]
        text = rest
    return "".join([*parts, text])


def rewrite(page: Path = PAGE, results: Path = RESULTS) -> bool:
    """Write the plans into the page; whether it has changed."""
    text = page.read_text()
    now = with_plans(text, results)
    if now != text:
        write_atomic(page, now.encode())
    return now != text


def _blocks(name: str, results: Path) -> Iterator[str]:
    if name.isdigit():
        yield from _plan(int(name))
    elif name in _PARTS:
        yield from _PARTS[name](results)
    else:
        raise ConfigurationError(
            f"planned parts: expected a number of devices or one of {', '.join(_PARTS)}, got {name}"
        )


def _plan(devices: int) -> Iterator[str]:
    prices = Prices()
    plan = plan_of(Fleet(devices), load_figures(), prices)
    yield f"**{summary(plan, prices.machine_cores, prices.machine_gb)}**"
    yield _table(
        ("part", "what", "amount", "from", "measured"),
        [_linked(line_cells(line), 3) for line in plan.lines],
    )
    yield "What breaks first, if all of them had one server and one backend:"
    yield _table(
        ("what", "used", "full at", "from", "what to put there"),
        [_linked(limit_cells(limit), 3) for limit in plan.limits],
    )


def _figures(_results: Path) -> Iterator[str]:
    figures = load_figures()
    rows = []
    for name, figure in figures.figures.items():
        largest = "" if figure.largest is None else amount(figure.largest)
        cells = (name, amount(figure.value, figure.unit), figure.about, largest, figure.report)
        rows.append(_linked(cells, 4))
    yield _table(("figure", "value", "what it is", "measured up to", "report"), rows)
    rows = [
        (
            f"{name}, cut at {each.depth}",
            ", ".join(f"{codec} {amount(size, 'bytes')}" for codec, size in each.query.items()),
            amount(each.reply, "bytes"),
            amount(each.bundle, "bytes"),
            ", ".join(f"{rows}: {1e3 * s:.3g}" for rows, s in each.batch_s.items()),
        )
        for name, each in figures.networks.items()
    ]
    yield _table(("network", "a query", "reply", "bundle", "engine, ms by rows of a batch"), rows)
    yield "Networks: " + " and ".join(map(_LINK.format, ("planning-sizes", "planning-service")))


def _arrivals(results: Path) -> Iterator[str]:
    """Tables of the report on arrivals, with its headings one level lower."""
    _, *blocks = (results / "planning-arrivals.md").read_text().strip().split("\n\n")
    yield from (f"#{block}" if block.startswith("#") else block for block in blocks)


_PARTS: Final[dict[str, Callable[[Path], Iterator[str]]]] = {
    "figures": _figures,
    "arrivals": _arrivals,
}


def _linked(cells: Sequence[str], at: int) -> tuple[str, ...]:
    """The cells with the reports in one of them as links."""
    words = [
        _LINK.format(word) if (RESULTS / f"{word}.md").exists() else word
        for word in cells[at].split(", ")
    ]
    return (*cells[:at], ", ".join(words), *cells[at + 1 :])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(each) for each in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {line} |" for line in lines)
