"""The plan of 10,000 devices against simulated arrivals: waiting times, and deadlines missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from benchmarks.planning.queues import Times, batch_times, poisson, served, switching, together
from benchmarks.reports import made_by, provenance, write
from server.planning.figures import load_figures
from server.planning.fleet import Fleet
from server.planning.plan import plan_of
from server.planning.queueing import mean_wait_s, wait_share
from server.planning.rates import rates_of

NAME: Final = "planning-arrivals"
COMMAND: Final = "python -m benchmarks.planning arrivals"
DEVICES: Final = 10_000
SECONDS: Final = 1_200.0  # of arrivals
SEEDS: Final = 3
BATCH_MOST: Final = 32
#: Loads, as a share of what one backend does without batches.
LOADS: Final = (0.3, 0.5, 0.7, 0.9, 1.1, 1.5)

Arrivals = Callable[[float, float, np.random.Generator], Times]
#: A burst has five times the rate of the calm, 10 % of the time; a group is one hundredth of the
#: devices, which see the same within a second.
KINDS: Final[Mapping[str, Arrivals]] = {
    "Poisson": poisson,
    "bursts": partial(switching, times=5.0, share=0.1, burst_s=10.0),
    "together": partial(together, many=DEVICES // 100, within_s=1.0),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of arrivals at one rate; means over the seeds.

    Attributes:
        load: erlang of one backend without batches. batch_most: largest batch.
        mean_ms, p99_ms: of waiting. missed: share of the deadlines.
        formula_ms: mean wait by Erlang's C, for Poisson arrivals; None if it is infinite.
    """

    kind: str
    rate: float
    load: float
    backends: int
    batch_most: int
    queries: int
    mean_ms: float
    p50_ms: float
    p99_ms: float
    missed: float
    missed_most: float
    formula_ms: float | None


def measure(results: Path, seconds: float = SECONDS) -> list[str]:
    """Simulate, and write the report; its blocks."""
    fleet = Fleet(DEVICES)
    figures = load_figures()
    plan, rates = plan_of(fleet, figures), rates_of(fleet, figures)
    one = rates.of_one(plan.servers).peak_per_s
    measured = orjson.loads((results / "planning-service.json").read_bytes())
    around_s = figures["server_query_us"].value / 1e6
    quantiles = {
        each["rows"]: each["seconds"]
        for each in measured["batches"]
        if each["backbone"] == fleet.network
    }
    alone_s = float(np.mean(quantiles[1])) + around_s

    def row(kind: str, rate: float, backends: int, batch_most: int) -> Row:
        drawn = [
            _drawn(kind, rate, seconds, seed, quantiles, around_s, backends, batch_most)
            for seed in range(SEEDS)
        ]
        waited = [each[0] for each in drawn]
        missed = [float(np.mean(1e3 * each[1] > fleet.deadline_ms)) for each in drawn]
        formula = mean_wait_s(backends, rate, alone_s)
        return Row(
            kind,
            rate,
            rate * alone_s,
            backends,
            batch_most,
            sum(map(len, waited)),
            1e3 * float(np.mean([each.mean() for each in waited])),
            1e3 * float(np.mean([np.quantile(each, 0.5) for each in waited])),
            1e3 * float(np.mean([np.quantile(each, 0.99) for each in waited])),
            float(np.mean(missed)),
            max(missed),
            1e3 * formula if kind == "Poisson" and np.isfinite(formula) else None,
        )

    planned = [row(kind, one, plan.backends, most) for kind in KINDS for most in (1, BATCH_MOST)]
    loaded = [row(kind, load / alone_s, 1, BATCH_MOST) for kind in KINDS for load in LOADS]
    report = {
        "command": COMMAND,
        **provenance(),
        "service_when": measured["when"],
        "fleet": asdict(fleet),
        "servers": plan.servers,
        "backends": plan.backends,
        "alone_ms": 1e3 * alone_s,
        "seconds": seconds,
        "seeds": SEEDS,
        "late_by_formula": wait_share(plan.backends, one, alone_s, rates.patience_s),
        "planned": [asdict(each) for each in planned],
        "loaded": [asdict(each) for each in loaded],
    }
    blocks = page(report)
    write(results / NAME, report, blocks)
    return blocks


def _drawn(  # noqa: PLR0917 - one call
    kind: str,
    rate: float,
    seconds: float,
    seed: int,
    quantiles: Mapping[int, Sequence[float]],
    around_s: float,
    backends: int,
    batch_most: int,
) -> tuple[Times, Times]:
    """Waits and times to the end of one seed's queries."""
    random = np.random.default_rng([seed, 7])
    arrivals = KINDS[kind](rate, seconds, random)
    service = batch_times(quantiles, around_s, random)
    return served(arrivals, service, servers=backends, batch_most=batch_most)


def _lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield (
        "| arrivals | queries/s | load, erlang | backends | batch at most | mean wait, ms |"
        " Erlang C, ms | p50 | p99 | deadlines missed |"
    )
    yield "|---" * 10 + "|"
    for row in rows:
        formula = "-" if row["formula_ms"] is None else f"{row['formula_ms']:.2f}"
        yield (
            f"| {row['kind']} | {row['rate']:.1f} | {row['load']:.2f} | {row['backends']} |"
            f" {row['batch_most']} | {row['mean_ms']:.2f} | {formula} | {row['p50_ms']:.2f} |"
            f" {row['p99_ms']:.2f} | {100 * row['missed']:.3g} % |"
        )


def page(report: Mapping[str, Any]) -> list[str]:
    """The report's text."""
    fleet = report["fleet"]
    return [
        f"# Arrivals at the plan of {fleet['devices']:,} devices",
        (
            f"Simulated: {report['seconds']:g} s of arrivals with each of {report['seeds']} seeds,"
            f" {fleet['queries_per_hour']:g} answers an hour of a device,"
            f" {100 * fleet['offload']:g} % of them offloads, a peak of {fleet['peak']:g} times the"
            f" mean, a deadline of {fleet['deadline_ms']:g} ms. Service times are drawn from those"
            f" of {fleet['network']} in planning-service; one query alone takes"
            f" {report['alone_ms']:.2f} ms of a backend. *Bursts*: five times the rate of the calm,"
            " a tenth of the time, ten seconds each. *Together*: groups of a hundredth of the"
            " devices ask within a second. Nothing is refused: the real server refuses what would"
            " come too late. Erlang C is for Poisson arrivals without batches."
        ),
        "## The plan, at its peak",
        "\n".join(_lines(report["planned"])),
        (
            "By Erlang C a share of"
            f" {report['late_by_formula']:.2g} would wait too long; the plan allows"
            f" {fleet['late_most']:g}."
        ),
        "## One backend, against its load",
        "\n".join(_lines(report["loaded"])),
        made_by(report),
    ]
