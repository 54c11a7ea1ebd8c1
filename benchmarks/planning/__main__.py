"""Per-unit figures that a fleet is planned from, and the plan's page.

    python -m benchmarks.planning sizes         bytes of messages and bundles
    python -m benchmarks.planning service       the engine by batch; server and broker a query
    python -m benchmarks.planning heartbeats    server, broker and database a heartbeat
    python -m benchmarks.planning depths        memory of an agent against its depth

Each writes a report (JSON) and a table (markdown) into benchmarks/results/.
"""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.planning import depths as agent_depths
from benchmarks.planning import heartbeats as beats
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


if __name__ == "__main__":
    app()
