"""A small device beside devices that flood the server: how long its queries take.

    python -m benchmarks.load.fairness                    alone, beside one flood and beside ten
    python -m benchmarks.load.fairness --backbone resnet18 --size 64

The small device asks for one sample at a time, and 10 ms after each answer again. A flood is a
device that keeps 100 queries of 32 samples under way (10, where there are ten such devices). Every
load is a process of its own; the server is the real one, with its embedded broker. Writes
benchmarks/results/fairness.json and .md.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.load.clients import Load, Tally, measure, median
from benchmarks.reports import Results, made_by, provenance, write
from edge_sdk import api
from edge_sdk.identity import Identity
from profiles.reference import load_reference
from server.bench.models import export_random
from server.processes import ServerProcess
from server.tokens import create_token

SECONDS: Final = 6.0
PAUSE_S: Final = 0.01
FLOOD_ROWS: Final = 32
# queries that one flooding device keeps under way, by the number of such devices
IN_FLIGHT: Final[Mapping[int, int]] = {1: 100, 10: 10}


@dataclass(frozen=True, slots=True)
class Case:
    """The small device beside `floods` others; milliseconds are medians over the repetitions."""

    transport: str
    floods: int
    p50_ms: float
    p99_ms: float
    flood_rows_per_s: float
    outcomes: Mapping[str, int]


class Site:
    """A server with one model, and devices that are enrolled there.

    Args:
        options: more options of the server.
    Attributes:
        model: its name. shape: of a sample. urls: by transport.
    """

    def __init__(
        self, work: Path, backbone: str, size: int, devices: int, options: Sequence[str] = ()
    ) -> None:
        state = work / "server"
        self.shape = (3, size, size) if backbone == "resnet18" else (1, size, size)
        _, manifest = export_random(backbone, self.shape, (2,), state / "models")
        self.model = manifest.name
        self.server = ServerProcess(state)
        free = ("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0", "--threads", "1")
        self.server.start((*free, *options))
        profile = load_reference("raspberry-pi-4")
        self.identities: list[Identity] = []
        for number in range(devices):
            token, folder = create_token(state), work / f"device-{number}"
            name = f"device-{number}"
            self.identities.append(
                api.enroll(self.server.http, token, folder, profile=profile, name=name)
            )
        broker = api.locate_broker(self.identities[0]).broker
        self.urls = {"HTTP": self.server.http, "MQTT": broker}

    def load(self, transport: str, device: int, **more: Any) -> Load:
        """A load of that device."""
        identity = self.identities[device]
        return Load(
            self.urls[transport],
            identity.device,
            identity.credential,
            self.model,
            self.shape,
            **{"seconds": SECONDS, **more},
        )


def main(
    results: Results = Path("benchmarks/results"),
    backbone: Annotated[str, typer.Option(help="Network of random weights.")] = "cnn6",
    size: Annotated[int, typer.Option(help="Height and width of a sample.")] = 28,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions; medians are shown.")] = 3,
    name: Annotated[str, typer.Option(help="Name of the report.")] = "fairness",
) -> None:
    """Measure a small device beside floods, over HTTP and MQTT."""
    with tempfile.TemporaryDirectory(prefix="splitedge-fairness-") as work:
        site = Site(Path(work), backbone, size, 1 + max(IN_FLIGHT))
        try:
            cases = [
                _case(site, transport, floods, repeat)
                for transport in site.urls
                for floods in (0, *IN_FLIGHT)
            ]
        finally:
            site.server.stop()
    about = provenance() | {
        "command": shlex.join(["python", "-m", "benchmarks.load.fairness", *sys.argv[1:]]),
        "title": f"A small device beside floods: {backbone}, {size} x {size}",
    }
    lines = _lines(cases)
    write(results / name, about | {"cases": cases}, [f"# {about['title']}", made_by(about), lines])
    typer.echo(lines)


def _case(site: Site, transport: str, floods: int, repeat: int) -> Case:
    small = site.load(transport, 0, pause_s=PAUSE_S)
    more = {"rows": FLOOD_ROWS, "in_flight": IN_FLIGHT.get(floods, 0), "connections": 100}
    others = [site.load(transport, 1 + number, **more) for number in range(floods)]
    runs = [measure(small, *others) for _ in range(repeat)]
    own: list[Tally] = [run[0] for run in runs]
    rows = [FLOOD_ROWS * sum(tally.rate for tally in run[1:]) for run in runs]
    outcomes = sum((tally.outcomes for tally in own[1:]), own[0].outcomes)
    return Case(
        transport,
        floods,
        median([tally.quantile_ms(0.5) for tally in own]),
        median([tally.quantile_ms(0.99) for tally in own]),
        median(rows),
        dict(outcomes),
    )


def _lines(cases: Sequence[Case]) -> str:
    rows = ["| transport | floods | p50 | p99 | floods' samples/s | outcomes |", "|" + " --- |" * 6]
    for case in cases:
        outcomes = ", ".join(f"{count} {word}" for word, count in case.outcomes.items())
        rows.append(
            f"| {case.transport} | {case.floods} | {case.p50_ms:.1f} ms | {case.p99_ms:.1f} ms"
            f" | {case.flood_rows_per_s:,.0f} | {outcomes} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    typer.run(main)
