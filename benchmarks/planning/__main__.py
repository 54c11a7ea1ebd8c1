"""Per-unit figures that a fleet is planned from, and the plan's page.

    python -m benchmarks.planning sizes         bytes of messages and bundles
    python -m benchmarks.planning service       the engine by batch; server and broker a query
    python -m benchmarks.planning heartbeats    server, broker and database a heartbeat
    python -m benchmarks.planning depths        memory of an agent against its depth
    python -m benchmarks.planning arrivals      the plan of 10,000 devices, simulated
    python -m benchmarks.planning figures       figures.json of `splitedge server plan`
    python -m benchmarks.planning page          the plans in docs/planning.md

All but the last two write a report (JSON) and a table (markdown) into benchmarks/results/.
"""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.planning import arrivals as simulated
from benchmarks.planning import collect
from benchmarks.planning import depths as agent_depths
from benchmarks.planning import heartbeats as beats
from benchmarks.planning import page as planned
from benchmarks.planning import service as queries
from benchmarks.planning import sizes as message_sizes
from benchmarks.reports import RESULTS, Results

app = typer.Typer(add_completion=False, help=__doc__.partition("\n")[0] if __doc__ else None)


@app.command(epilog="Example: python -m benchmarks.planning sizes")
def sizes(results: Results = RESULTS) -> None:
    """Weigh heartbeats, queries, replies and bundles."""
    typer.echo("\n\n".join(message_sizes.measure(results)))


@app.command(epilog="Example: python -m benchmarks.planning service")
def service(results: Results = RESULTS) -> None:
    """Time the engine by batch, and what a query takes of server and broker."""
    typer.echo("\n\n".join(queries.measure(results)))


@app.command(epilog="Example: python -m benchmarks.planning heartbeats --devices 500")
def heartbeats(
    devices: Annotated[
        list[int] | None,
        typer.Option(help="Number of devices, may be repeated.", show_default="four"),
    ] = None,
    results: Results = RESULTS,
) -> None:
    """Measure what heartbeats of many devices take of server, broker and database."""
    typer.echo("\n\n".join(beats.measure(results, devices or beats.DEVICES)))


@app.command(epilog="Example: python -m benchmarks.planning depths")
def depths(results: Results = RESULTS) -> None:
    """Measure the memory of agents at every depth of two networks."""
    typer.echo("\n\n".join(agent_depths.measure(results)))


@app.command(epilog="Example: python -m benchmarks.planning arrivals")
def arrivals(results: Results = RESULTS) -> None:
    """Simulate the arrivals at the plan of 10,000 devices."""
    typer.echo("\n\n".join(simulated.measure(results)))


@app.command(epilog="Example: python -m benchmarks.planning figures")
def figures(results: Results = RESULTS) -> None:
    """Write the figures that `splitedge server plan` ships with, from the reports."""
    typer.echo("written" if collect.rewrite(results) else "nothing has changed")


@app.command(epilog="Example: python -m benchmarks.planning page")
def page() -> None:
    """Write the plans into docs/planning.md."""
    typer.echo("written" if planned.rewrite() else "nothing has changed")


if __name__ == "__main__":
    app()
