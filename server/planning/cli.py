"""`splitedge server plan`: machines, memory, bytes a day, and what breaks first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from edge_sdk.cli.output import print_json, print_table
from server.options import AsJson

if TYPE_CHECKING:
    from server.planning.plan import Plan


def plan(
    devices: Annotated[int, typer.Option(help="Number of devices.")],
    queries_per_hour: Annotated[
        float, typer.Option(help="Inputs that one device answers in an hour, mean over the day.")
    ] = 60.0,
    offload: Annotated[
        str, typer.Option(metavar="SHARE", help="Of them, those that ask the server: 20% or 0.2.")
    ] = "20%",
    peak: Annotated[
        float, typer.Option(help="Queries in the busiest minute over the mean of the day.")
    ] = 3.0,
    heartbeat: Annotated[float, typer.Option(help="Seconds between two heartbeats.")] = 30.0,
    deadline_ms: Annotated[float, typer.Option(help="Of an offload.")] = 1_000.0,
    network: Annotated[
        str, typer.Option(help="Network with measured figures: tiny, cnn6 or resnet18.")
    ] = "resnet18",
    codec: Annotated[str, typer.Option(help="Codec of what is sent to the server.")] = "int8",
    service_ms: Annotated[
        float | None,
        typer.Option(help="Of the processor for your network's query.", show_default="measured"),
    ] = None,
    query_bytes: Annotated[
        float | None, typer.Option(help="Of your network's query.", show_default="measured")
    ] = None,
    bundle_bytes: Annotated[
        float | None, typer.Option(help="Of your network's bundle.", show_default="measured")
    ] = None,
    updates_per_month: Annotated[
        float, typer.Option(help="New bundles that every device loads.")
    ] = 1.0,
    tls: Annotated[bool, typer.Option(help="Devices connect by TLS.")] = True,
    busy: Annotated[
        str, typer.Option(metavar="SHARE", help="Of a core that may be used at the peak.")
    ] = "50%",
    machine_cores: Annotated[int, typer.Option(help="Cores of one machine.")] = 4,
    machine_gb: Annotated[float, typer.Option(help="Memory of one machine.")] = 8.0,
    machine_price: Annotated[
        float | None, typer.Option(help="Your price of one machine for a month.")
    ] = None,
    gb_price: Annotated[
        float | None, typer.Option(help="Your price of a GB over the network.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan the machines of a fleet, from measured figures of one device and of one query.

    Every amount names the report in benchmarks/results that it is from, and says if it lies
    beyond what was measured. Money is told for your own prices only.
    """
    from dataclasses import asdict

    from server.planning.figures import load_figures
    from server.planning.fleet import Fleet, Prices
    from server.planning.plan import plan_of

    fleet = Fleet(
        devices,
        queries_per_hour,
        _share("--offload", offload),
        peak,
        heartbeat,
        deadline_ms,
        network,
        codec,
        service_ms,
        query_bytes,
        bundle_bytes,
        updates_per_month,
        tls,
        _share("--busy", busy),
    )
    prices = Prices(machine_cores, machine_gb, machine_price, gb_price)
    found = plan_of(fleet, load_figures(), prices)
    if as_json:
        print_json(asdict(found))
    else:
        _show(found, prices.machine_cores, prices.machine_gb)


def _share(option: str, text: str) -> float:
    """A share as `20%` or `0.2`."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise typer.BadParameter(f"{option}: expected a share such as 20% or 0.2, got {text!r}")
    return value


def _show(plan: Plan, cores: int, memory_gb: float) -> None:
    from rich.table import Table

    from server.planning.words import amount, limit_cells, line_cells, summary

    typer.echo(f"{summary(plan, cores, memory_gb)}\n")
    table = Table("part", "what", "amount", "from", "measured")
    for line in plan.lines:
        table.add_row(*line_cells(line))
    print_table(table)
    typer.echo(f"\nWhat breaks first, if {amount(plan.fleet.devices)} devices had one server:")
    table = Table("what", "used", "full at", "from", "what to put there")
    for limit in plan.limits:
        table.add_row(*limit_cells(limit))
    print_table(table)
