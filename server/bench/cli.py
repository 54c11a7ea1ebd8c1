"""`splitedge bench`: the figures with a goal, each with its reference measured in the same run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from edge_sdk.cli.main import stop_on_sigterm
from edge_sdk.cli.output import check_report, print_table
from edge_sdk.durable import make_folder

if TYPE_CHECKING:
    from server.bench.measure import Row

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: splitedge bench --quick --report bench.json")
def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rounds: about two minutes.")
    ] = False,
    only: Annotated[
        Literal["device", "service", "offload", "energy", "ladder", "server"] | None,
        typer.Option(help="Measure this part only."),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="File for the figures as JSON.")] = None,
) -> None:
    """Measure what splitedge costs, as ratios to named references.

    Each figure is the median of several rounds.
    """
    from server.bench import device, energy, ladder, offload, service, throughput

    check_report(report)
    # SIGTERM ends the child processes too, as Ctrl-C does
    stop_on_sigterm()
    console = Console()
    parts: dict[str, tuple[str, Callable[..., list[Row]]]] = {
        "device": ("predict on the device", device.run),
        "service": ("asking a running agent", service.run),
        "offload": ("offload round trip", offload.run),
        "energy": ("energy of an answer", energy.run),
        "ladder": ("ladder engine", ladder.run),
        "server": ("server over MQTT", throughput.run),
    }
    rows: list[Row] = []
    for part, (title, run) in parts.items():
        if only not in (None, part):
            continue
        with console.status(title), tempfile.TemporaryDirectory(prefix="splitedge-bench-") as work:
            rows += run(Path(work), quick=quick)
        console.print(f"[green]✓[/] {title}")
    if report is not None:
        raw = orjson.dumps([asdict(row) for row in rows], option=orjson.OPT_INDENT_2)
        make_folder(report.parent)
        report.write_bytes(raw + b"\n")
    _show(rows)


def _mark(row: Row) -> Text:
    return Text("met", "green") if row.ok else Text("missed", "red")


def _show(rows: list[Row]) -> None:
    table = Table("figure", "value", "goal", "", "reference")
    for row in rows:
        goal = "" if row.limit is None else f"{row.limit:g}"
        mark = "" if row.limit is None else _mark(row)
        reference = "" if row.reference_value is None else f"{row.reference_value:.4g}"
        value = "" if row.value is None else f"{row.value:.3f} {row.unit}"
        table.add_row(row.name, value, goal, mark, reference)
    print_table(table)
