"""Overload: queries in an open loop, at two and five times of what the server can answer.

    python -m benchmarks.load.overload

The peak is measured in a closed loop of 32 queries over MQTT. Then queries leave at fixed times,
answered or not, at 1, 2 and 5 times the peak, each with a deadline. The agent is a device of ours:
it backs off when it is told so, and what it does not send (`not sent`) it answers by itself at
once. HTTP and MQTT are clients that do not heed a refusal. Over MQTT neither sends anything while
its link is behind.

Counted: the server's answers within the deadline, the 99th percentile of all answers, refusals and
whether they say when to come back, and the growth of the server's memory. The server is the real
one, with its own broker; the load is a process of its own. Writes benchmarks/results/overload.json
and .md.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks.load.clients import OVERLOADED, Load, Tally, measure, median
from benchmarks.load.fairness import Site
from benchmarks.reports import Results, made_by, provenance, write

SECONDS: Final = 6.0
TIMES: Final = (1.0, 2.0, 5.0)
PEAK_IN_FLIGHT: Final = 32
# above what may be under way at the highest load, so that no query waits for a connection: such a
# wait, which no server can know of, would be counted as the server's
HTTP_CONNECTIONS: Final = 5_000
AGENT: Final = "agent"


@dataclass(frozen=True, slots=True)
class Case:
    """One load; figures are medians over the repetitions.

    Attributes:
        transport: AGENT, or that of a client that does not heed refusals.
        times: of the peak. goodput: answers within the deadline, a second, as a share of the peak.
        p99_ms: of all answers. with_retry: share of refusals that say when to come back.
        grown_mb: of the server's process during the load, from the first second on.
    """

    transport: str
    times: float
    offered_per_s: float
    goodput: float
    p99_ms: float
    with_retry: float
    grown_mb: float
    outcomes: Mapping[str, int]


def main(
    results: Results = Path("benchmarks/results"),
    backbone: Annotated[str, typer.Option(help="Network of random weights.")] = "resnet18",
    size: Annotated[int, typer.Option(help="Height and width of a sample.")] = 64,
    deadline_ms: Annotated[float, typer.Option(help="Of each query.")] = 1000.0,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions; medians are shown.")] = 3,
) -> None:
    """Measure goodput, latency and memory under overload, of agents and of other clients."""
    with tempfile.TemporaryDirectory(prefix="splitedge-overload-") as work:
        peak, cases = overload(Path(work), backbone, size, deadline_ms, repeat)
    about = provenance() | {
        "command": shlex.join(["python", "-m", "benchmarks.load.overload", *sys.argv[1:]]),
        "title": f"Overload: {backbone}, {size} x {size}, deadline {deadline_ms:g} ms",
        "peak_per_s": peak,
    }
    lines = _lines(cases, deadline_ms)
    text = f"Peak: {peak:.0f} queries/s, {PEAK_IN_FLIGHT} in flight over MQTT without a deadline."
    blocks = [f"# {about['title']}", made_by(about), text, lines]
    write(results / "overload", about | {"cases": cases}, blocks)
    typer.echo(f"{text}\n\n{lines}")


def overload(
    work: Path, backbone: str, size: int, deadline_ms: float, repeat: int
) -> tuple[float, list[Case]]:
    """The peak in queries a second, and the server at TIMES the peak."""
    site = Site(work, backbone, size, 1)
    try:
        warm = site.load("MQTT", 0, in_flight=PEAK_IN_FLIGHT)
        measure(warm)
        peak = median([measure(warm)[0].rate for _ in range(repeat)])
        return peak, [
            _case(site, load, peak, times, repeat)
            for load in _loads(site, deadline_ms)
            for times in TIMES
        ]
    finally:
        site.server.stop()


def _loads(site: Site, deadline_ms: float) -> list[Load]:
    """A device that heeds refusals, and two that do not."""
    agent = site.load("MQTT", 0, deadline_ms=deadline_ms, backs_off=True)
    return [agent, *(site.load(name, 0, deadline_ms=deadline_ms) for name in site.urls)]


def _case(site: Site, load: Load, peak: float, times: float, repeat: int) -> Case:
    by_url = "MQTT" if load.url.startswith("mqtt") else "HTTP"
    open_loop = Load(
        load.url,
        load.device,
        load.credential,
        load.model,
        load.shape,
        SECONDS,
        rate=times * peak,
        deadline_ms=load.deadline_ms,
        warm_s=1.0,
        patience_s=load.deadline_ms / 1e3 + 2.0,
        connections=HTTP_CONNECTIONS,
        backs_off=load.backs_off,
    )
    runs: list[tuple[Tally, float]] = []
    for _ in range(repeat):
        before = _memory_mb(site)
        tally = measure(open_loop)[0]
        runs.append((tally, _memory_mb(site) - before))
    tallies = [tally for tally, _ in runs]
    outcomes = sum((tally.outcomes for tally in tallies[1:]), tallies[0].outcomes)
    refused = outcomes[OVERLOADED]
    return Case(
        AGENT if load.backs_off else by_url,
        times,
        times * peak,
        median([tally.within(load.deadline_ms / 1e3) for tally in tallies]) / peak,
        median([tally.quantile_ms(0.99) for tally in tallies]),
        sum(tally.with_retry for tally in tallies) / refused if refused else 1.0,
        median([grown for _, grown in runs]),
        dict(outcomes),
    )


def _memory_mb(site: Site) -> float:
    """Resident memory of the server's process; its broker is a process of its own."""
    lines = Path(f"/proc/{site.server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1e3


def _lines(cases: Sequence[Case], deadline_ms: float) -> str:
    rows = [
        "| transport | load | goodput | p99 of answers | told when to return | memory | outcomes |",
        "|" + " --- |" * 7,
    ]
    for case in cases:
        outcomes = ", ".join(f"{count} {word}" for word, count in sorted(case.outcomes.items()))
        rows.append(
            f"| {case.transport} | {case.times:g} x | {100 * case.goodput:.0f} % of the peak"
            f" | {case.p99_ms:.0f} ms ({'within' if case.p99_ms <= deadline_ms else 'beyond'})"
            f" | {100 * case.with_retry:.0f} % | {case.grown_mb:+.0f} MB | {outcomes} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    typer.run(main)
