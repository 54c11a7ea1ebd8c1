"""The dashboard over 500 devices: loads of its pages, and what it costs the server.

    python -m benchmarks.dashboard             into benchmarks/results/dashboard.json and .md
    python -m benchmarks.dashboard --devices 50 --repeat 1 --seconds 8      a try

The server, its broker (a Mosquitto child where one is installed) and the browser are the real ones.
Simulated devices send a heartbeat every 30 s, and there is an hour of history. Pages are loaded in
Chromium, each time in a new profile. For the cost, a server with the dashboard, whose fleet page is
open, takes turns with one of `--no-dashboard`: one device asks queries at fixed times over MQTT
beside the heartbeats. The open page is then a client that sends the requests that Chromium was seen
to send, because a browser beside the server would take its processor.
"""

from __future__ import annotations

import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.dashboard.loads import PAGES, Asked, PageLoad, Replay, visitor
from benchmarks.dashboard.site import Running, Site
from benchmarks.load.clients import LoadProcess
from benchmarks.reports import RESULTS, Results, made_by, provenance, write

WITHOUT: Final = ("--no-dashboard",)
WATCH_S: Final = 30.0
SETTLE_S: Final = 5.0
LOAD_GOAL_S: Final = 2.0
RATIO_GOAL: Final = 1.1


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a server: with its fleet page open, or without the dashboard.

    Attributes:
        p50_ms, p99_ms: of queries beside the heartbeats.
        server_s, broker_s: seconds of the processor in a minute, of heartbeats, queries and page.
        server_mb, broker_mb: resident memory at the end.
    """

    with_page: bool
    queries: int
    p50_ms: float
    p99_ms: float
    server_s: float
    broker_s: float
    server_mb: float
    broker_mb: float


@dataclass(frozen=True, slots=True)
class Page:
    """The open fleet page as it was seen: its requests in `span_s` seconds."""

    asked: list[Asked]
    span_s: float
    cookies: Any


def main(  # noqa: PLR0917 - typer's options
    results: Results = RESULTS,
    devices: Annotated[int, typer.Option(min=50, help="Simulated devices.")] = 500,
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each server.")] = 3,
    seconds: Annotated[float, typer.Option(min=5, help="Length of a turn.")] = 25.0,
    rate: Annotated[float, typer.Option(min=1, help="Queries a second.")] = 40.0,
    loads: Annotated[int, typer.Option(min=1, help="Loads of each page.")] = 3,
    broker: Annotated[str, typer.Option(help="As `server run --mqtt` takes it.")] = "auto",
    name: Annotated[str, typer.Option(help="Name of the report.")] = "dashboard",
) -> None:
    """Measure the dashboard over many devices."""
    with tempfile.TemporaryDirectory(prefix="splitedge-dashboard-") as work:
        site = Site(Path(work), devices, broker)
        typer.echo(f"{devices} devices are enrolled")
        with site.running() as server, visitor(server.http, site.link()) as person:
            page = Page(person.watch("fleet", WATCH_S), WATCH_S, person.cookies)
        turns = []
        for number in range(2 * repeat):
            with_page = number % 4 in (0, 3)  # neither of the two is always the first
            turns.append(_turn(site, page if with_page else None, rate, seconds))
            typer.echo(turns[-1])
        site.start_rollout()
        with site.running() as server, visitor(server.http, site.link()) as person:
            found = [person.load(one, devices, loads) for one in PAGES]
    about = provenance() | {
        "command": shlex.join(["python", "-m", "benchmarks.dashboard", *sys.argv[1:]]),
        "title": f"The dashboard over {devices} devices",
        "devices": devices,
        "rate": rate,
        "seconds": seconds,
        "broker": broker,
    }
    rows = {"pages": found, "turns": turns, "open_page": _asked_a_minute(page)}
    blocks = [f"# {about['title']}", *_blocks(about, found, turns, page)]
    write(results / name, about | rows, blocks)
    typer.echo((results / name).with_suffix(".md").read_text())


def _turn(site: Site, page: Page | None, rate: float, seconds: float) -> Turn:
    """A server of its own, measured for so long."""
    with site.running(() if page else WITHOUT) as server:
        asker = LoadProcess(server.load(rate, seconds))
        time.sleep(SETTLE_S)
        before, began = server.usage(), time.monotonic()
        asker.go()
        if page is not None:
            _replay(server, page, seconds)
        tally = asker.tally()
        after, passed_s = server.usage(), time.monotonic() - began
    return Turn(
        page is not None,
        sum(tally.outcomes.values()),
        round(tally.quantile_ms(0.5), 3),
        round(tally.quantile_ms(0.99), 3),
        round(60 * (after.server_s - before.server_s) / passed_s, 2),
        round(60 * (after.broker_s - before.broker_s) / passed_s, 2),
        round(after.server_bytes / 1e6, 1),
        round(after.broker_bytes / 1e6, 1),
    )


def _replay(server: Running, page: Page, seconds: float) -> None:
    """Send the page's requests for so long, in a thread."""
    replay = Replay(server.http, page.asked, page.span_s, page.cookies)
    thread = threading.Thread(target=replay.run, args=(seconds,))
    thread.start()
    thread.join()
    if not replay.done:
        raise RuntimeError(f"the page was answered {replay.requests} times only; see above")


def _asked_a_minute(page: Page) -> dict[str, float]:
    """Requests of the open page a minute, by path."""
    paths = [one.path for one in page.asked]
    return {path: 60 * paths.count(path) / page.span_s for path in sorted(set(paths))}


def _blocks(
    about: dict[str, Any], found: Sequence[PageLoad], turns: Sequence[Turn], page: Page
) -> list[str]:
    loads = [
        "| page | first load | again | over the network | requests | goal |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        kept = "yes" if one.seconds < LOAD_GOAL_S else "no"
        loads.append(
            f"| {one.page} | {one.seconds:.2f} s | {one.again_s:.2f} s | {one.bytes / 1e3:.0f} kB"
            f" | {one.requests} | under {LOAD_GOAL_S:g} s: {kept} |"
        )
    opened = [one for one in turns if one.with_page]
    closed = [one for one in turns if not one.with_page]
    ratios = [one.p99_ms / other.p99_ms for one, other in zip(opened, closed, strict=True)]
    ratio = statistics.median(ratios)
    costs = ["| | fleet page open | `--no-dashboard` |", "|---|---|---|"]
    for label, field in (
        ("offload p50, ms", "p50_ms"),
        ("offload p99, ms", "p99_ms"),
        ("server, s of a processor a minute", "server_s"),
        ("broker, s of a processor a minute", "broker_s"),
        ("server, MB resident", "server_mb"),
        ("broker, MB resident", "broker_mb"),
    ):
        costs.append(f"| {label} | {_median(opened, field):.2f} | {_median(closed, field):.2f} |")
    each = ", ".join(f"{one:.2f}" for one in ratios)
    asked = ", ".join(f"{path} {many:g} times" for path, many in _asked_a_minute(page).items())
    kept = "yes" if ratio <= RATIO_GOAL else "no"
    fleet = (
        f"{about['devices']} simulated devices send a heartbeat every 30 s, and have an hour of"
        " history. First loads have an empty cache, and end when everything is drawn; medians."
    )
    queries = (
        f"One device asks {about['rate']:g} queries a second over MQTT for {about['seconds']:g} s,"
        f" in {len(opened)} turns of each server; medians. The open page asks a minute: {asked}."
    )
    p99 = (
        f"p99 with the page over p99 without the dashboard: {ratio:.2f}"
        f" (each pair: {each}; goal: at most {RATIO_GOAL:g}: {kept})."
    )
    costs_table, loads_table = "\n".join(costs), "\n".join(loads)
    return [made_by(about), fleet, loads_table, queries, costs_table, p99]


def _median(turns: Sequence[Turn], field: str) -> float:
    return float(statistics.median(asdict(one)[field] for one in turns))


if __name__ == "__main__":
    typer.run(main)
