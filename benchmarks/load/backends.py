"""Throughput against the number of backends, and what the kill of one costs.

    python -m benchmarks.load.backends

One Mosquitto, `splitedge server api`, and 1, 2 and 3 `splitedge server backend` of one thread each,
which share the queries of eight agents, all on this machine. In one half of the rows each backend
may take no more of a core than --share, by a control group (needs root), so that three of them
leave room for the broker and the devices on two cores. In the other half they take what they get.

For the kill, one of two backends with that share gets SIGKILL under an open loop. Writes
benchmarks/results/backends.json and .md.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.load.clients import ANSWERED, Load
from benchmarks.load.processes import children, processor_s
from benchmarks.load.quota import bounded
from benchmarks.load.timed_crowd import Asked, CrowdProcess, quantile_ms
from benchmarks.reports import RESULTS, Results, made_by, provenance, write
from edge_sdk import api
from edge_sdk.http import HttpClient, Timeout
from profiles.reference import load_reference
from server.bench.models import export_random
from server.processes import ChildProcess
from server.tokens import create_token

NAME: Final = "backends"
DEVICES: Final = 8
IN_FLIGHT: Final = 4  # of each device
DEADLINE_MS: Final = 4_000.0
SECONDS: Final = 6.0
WARM_S: Final = 1.0
READY_S: Final = 60.0
KILL_SECONDS: Final = 14.0
KILL_AT_S: Final = 5.0
KILL_LOAD: Final = 0.8  # of the rate that one backend has in a closed loop
WINDOW_S: Final = 0.25
BACK: Final = 0.9  # of the offered rate


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of a number of backends in a closed loop, one for each repetition.

    Attributes:
        share: of a core, that each backend may take; None without a bound.
        rates: answers a second.
        cores: that backends, broker and crowd took.
        outcomes: of all queries.
    """

    backends: int
    share: float | None
    rates: list[float]
    p50_ms: list[float]
    p99_ms: list[float]
    cores: dict[str, list[float]]
    outcomes: Mapping[str, int]

    @property
    def rate(self) -> float:
        """The median."""
        return statistics.median(self.rates)


@dataclass(frozen=True, slots=True)
class Kill:
    """One of two backends killed under an open loop.

    Attributes:
        lost: queries without an answer.
        sent_again: answered after half of their time, as a query that was sent once more is.
        before_ms, during_ms, after_ms: p99 of queries that ended before the kill, that were under
            way then or came within a second, and that came later.
        back_s: from the kill to the first window of WINDOW_S with 0.9 of the offered rate.
    """

    rate: float
    outcomes: Mapping[str, int]
    lost: int
    sent_again: int
    before_ms: float
    during_ms: float
    worst_ms: float
    after_ms: float
    back_s: float


class Site:
    """An API with its Mosquitto, a model, and devices that are enrolled there."""

    def __init__(self, work: Path, backbone: str, size: int) -> None:
        self.state = work / "server"
        self._shape = (3, size, size) if backbone.startswith("resnet") else (1, size, size)
        _, manifest = export_random(backbone, self._shape, (2,), self.state / "models")
        self._model = manifest.name
        words = ["server", "api", "--state", str(self.state), "--http", "127.0.0.1:0"]
        words += ["--mqtt", "mosquitto:127.0.0.1:0"]
        self._api = ChildProcess.splitedge("the API", words, work / "api.log")
        self._work = work
        line = self._api.expect("(API),", "did not start").split()
        http = line[line.index("(API),") - 1]
        profile = load_reference("raspberry-pi-4")
        self._identities = []
        for number in range(DEVICES):
            token, folder = create_token(self.state), work / f"device-{number}"
            name = f"device-{number}"
            self._identities.append(api.enroll(http, token, folder, profile=profile, name=name))
        self._broker = api.locate_broker(self._identities[0]).broker

    @property
    def broker_pids(self) -> list[int]:
        """The broker's processes."""
        return children(self._api.pid)

    @contextlib.contextmanager
    def backend(self, share: float | None) -> Iterator[ChildProcess]:
        """A backend that is ready, with a bound on its share of a core."""
        words = ["server", "backend", "--state", str(self.state), "--http", "127.0.0.1:0"]
        words += ["--threads", "1"]
        child = ChildProcess.splitedge("a backend", words, self._work / "backends.log")
        with bounded(child.pid, share):
            try:
                line = child.expect("(HTTP),", "did not start").split()
                url = f"{line[line.index('(HTTP),') - 1]}/v2/health/ready"
                until = time.monotonic() + READY_S
                with HttpClient() as client:
                    while not _is_ready(client, url) and time.monotonic() < until:
                        time.sleep(0.05)
                yield child
            finally:
                child.stop()

    def crowd(self, **more: Any) -> CrowdProcess:
        """All devices, as agents; `rate` is of all together."""
        if "rate" in more:
            more["rate"] /= DEVICES
        common = {"deadline_ms": DEADLINE_MS, "backs_off": True, "in_flight": IN_FLIGHT, **more}
        return CrowdProcess(
            [
                Load(
                    self._broker,
                    identity.device,
                    identity.credential,
                    self._model,
                    self._shape,
                    **common,
                )
                for identity in self._identities
            ]
        )

    def close(self) -> None:
        """End the API and its broker."""
        self._api.stop()


def main(
    *,
    results: Results = RESULTS,
    backbone: Annotated[str, typer.Option(help="Network of random weights.")] = "resnet18",
    size: Annotated[int, typer.Option(help="Height and width of a sample.")] = 64,
    most: Annotated[int, typer.Option(min=1, help="Most backends.")] = 3,
    share: Annotated[float, typer.Option(help="Of a core, for each backend.")] = 0.3,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions; medians are shown.")] = 3,
) -> None:
    """Measure the throughput of 1 to 3 backends, and the kill of one of two."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="splitedge-backends-") as work:
        site = Site(Path(work), backbone, size)
        try:
            rows = _rows(site, share, most, repeat) + _rows(site, None, most, repeat)
            rate = KILL_LOAD * rows[0].rate
            kills = [_kill(site, share, rate) for _ in range(repeat)]
        finally:
            site.close()
    report = {
        "command": shlex.join(["python", "-m", "benchmarks.load.backends", *sys.argv[1:]]),
        **provenance(),
        "network": f"{backbone}, {size} x {size}",
        "load_before": load,
        "rows": [asdict(row) for row in rows],
        "kills": [asdict(kill) for kill in kills],
    }
    blocks = _blocks(report, rows, kills)
    write(results / NAME, report, blocks)
    typer.echo("\n\n".join(blocks))


def _rows(site: Site, share: float | None, most: int, repeat: int) -> list[Row]:
    """Each number of backends up to `most`: one more joins after each measurement."""
    runs: dict[int, list[tuple[list[Asked], dict[str, float]]]] = {}
    for _ in range(repeat):
        with contextlib.ExitStack() as stack:
            backends: list[ChildProcess] = []
            for count in range(1, most + 1):
                backends.append(stack.enter_context(site.backend(share)))
                runs.setdefault(count, []).append(_closed_loop(site, backends))
    return [_row(count, share, each) for count, each in runs.items()]


def _closed_loop(
    site: Site, backends: Sequence[ChildProcess]
) -> tuple[list[Asked], dict[str, float]]:
    """The counted queries of a closed loop, and the cores that were taken meanwhile."""
    crowd = site.crowd(seconds=SECONDS + WARM_S)
    pids = {
        "backends": [child.pid for child in backends],
        "broker": site.broker_pids,
        "crowd": [crowd.pid],
    }
    began = crowd.go()
    time.sleep(WARM_S)
    used = {part: -sum(map(processor_s, own)) for part, own in pids.items()}
    time.sleep(SECONDS)
    cores = {
        part: (used[part] + sum(map(processor_s, own))) / SECONDS for part, own in pids.items()
    }
    since, until = began + WARM_S, began + WARM_S + SECONDS
    return [each for each in crowd.asked() if since <= each.end < until], cores


def _row(
    count: int, share: float | None, runs: Sequence[tuple[list[Asked], dict[str, float]]]
) -> Row:
    return Row(
        count,
        share,
        [sum(each.outcome == ANSWERED for each in asked) / SECONDS for asked, _ in runs],
        [quantile_ms(asked, 0.5) for asked, _ in runs],
        [quantile_ms(asked, 0.99) for asked, _ in runs],
        {part: [cores[part] for _, cores in runs] for part in runs[0][1]},
        dict(Counter(each.outcome for asked, _ in runs for each in asked)),
    )


def _kill(site: Site, share: float, rate: float) -> Kill:
    with contextlib.ExitStack() as stack:
        first, _ = (stack.enter_context(site.backend(share)) for _ in range(2))
        crowd = site.crowd(seconds=KILL_SECONDS, rate=rate)
        began = crowd.go()
        time.sleep(KILL_AT_S)
        at = time.monotonic()
        os.kill(first.pid, signal.SIGKILL)
        asked = crowd.asked()
    return cost_of(asked, rate, began + WARM_S, at)


def cost_of(asked: Sequence[Asked], rate: float, since: float, at: float) -> Kill:
    """Cost of a kill at a time to the queries from `since` on."""
    counted = [each for each in asked if each.due >= since]
    during = [each for each in counted if each.end >= at and each.due < at + 1]
    answered = [each for each in counted if each.outcome == ANSWERED]
    return Kill(
        rate,
        dict(Counter(each.outcome for each in counted)),
        len(counted) - len(answered),
        sum(each.took_s >= DEADLINE_MS / 2e3 for each in answered),
        quantile_ms([each for each in counted if each.end < at], 0.99),
        quantile_ms(during, 0.99),
        quantile_ms(during, 1.0),
        quantile_ms([each for each in counted if each.due >= at + 1], 0.99),
        _back_s([each.end for each in answered], rate, at),
    )


def _back_s(ends: Sequence[float], rate: float, at: float) -> float:
    """Seconds from a kill to the first window that has the rate again."""
    windows = Counter(int((end - at) / WINDOW_S) for end in ends if end >= at)
    needed = BACK * rate * WINDOW_S
    return WINDOW_S * next((n for n in sorted(windows) if windows[n] >= needed), float("inf"))


def _blocks(report: Mapping[str, Any], rows: Sequence[Row], kills: Sequence[Kill]) -> list[str]:
    """The report's text."""
    return [
        f"# Throughput against backends: {report['network']}",
        made_by(report),
        (
            f"{DEVICES} agents with {IN_FLIGHT} queries each under way, one raw input a query, all"
            f" processes on {os.cpu_count()} cores; medians (least to most). Load of the machine"
            f" before it began: {report['load_before']:.2f}."
        ),
        _throughput(rows),
        "## The kill of one of two backends",
        (
            f"{DEVICES} agents in an open loop at {KILL_LOAD} of the rate of one backend, a"
            f" deadline of {DEADLINE_MS:g} ms. An agent sends a query once more when half of its"
            f" time is gone. During: under way at the kill, or sent within a second after it. The"
            f" rate is back with the first {WINDOW_S:g} s in which {BACK} of it is answered."
        ),
        _killed(kills),
    ]


def _throughput(rows: Sequence[Row]) -> str:
    lines = [
        (
            "| a backend's share of a core | backends | queries/s | to one backend | p50, ms |"
            " p99, ms | cores of backends | of the broker | of the devices | outcomes |"
        ),
        "|" + " --- |" * 10,
    ]
    for row in rows:
        one = next(each for each in rows if each.share == row.share and each.backends == 1)
        cores = " | ".join(f"{statistics.median(each):.2f}" for each in row.cores.values())
        lines.append(
            f"| {'no bound' if row.share is None else row.share} | {row.backends} |"
            f" {_spread(row.rates)} | {row.rate / one.rate:.2f} | {_spread(row.p50_ms)} |"
            f" {_spread(row.p99_ms)} | {cores} | {_words(row.outcomes)} |"
        )
    return "\n".join(lines)


def _killed(kills: Sequence[Kill]) -> str:
    lines = [
        (
            "| queries/s | lost (goal 0) | sent once more | p99 before, ms | during | longest |"
            " after | rate back, s | outcomes |"
        ),
        "|" + " --- |" * 9,
    ]
    lines += [
        f"| {kill.rate:.0f} | {kill.lost} | {kill.sent_again} | {kill.before_ms:.0f} |"
        f" {kill.during_ms:.0f} | {kill.worst_ms:.0f} | {kill.after_ms:.0f} | {kill.back_s:g} |"
        f" {_words(kill.outcomes)} |"
        for kill in kills
    ]
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def _words(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in sorted(outcomes.items()))


def _is_ready(client: HttpClient, url: str) -> bool:
    return client.request("GET", url, timeout=Timeout(total_s=5.0), at_most=65_536).status == 200


if __name__ == "__main__":
    typer.run(main)
