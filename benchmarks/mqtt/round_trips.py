"""Round trips of an offload at QoS 1 and at QoS 0, beside bare echoes, over both brokers.

    python -m benchmarks.mqtt.round_trips

One query at a time; the agent, the broker, the server and the echo are processes of their own, on
loopback. Candidates take turns. Writes benchmarks/results/round-trips.json and .md.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer

from benchmarks.reports import Results, made_by, provenance, write
from edge_sdk.offload import offloader
from server.bench.brokers import Broker, embedded, mosquitto
from server.bench.models import export_random
from server.bench.offload import echo, interleaved, model_time, open_agent

# live queries under way at QoS 0, for each candidate
AT_ONCE: Final = {0: offloader.AT_ONCE, 1: 0}


@dataclass(frozen=True, slots=True)
class Case:
    """One broker and QoS; median microseconds.

    Attributes:
        offload: of a whole `predict`. model: of the device's and the server's graphs alone.
        echo: of the same bytes, sent back by a bare paho client.
    """

    broker: str
    qos: int
    size_bytes: int
    offload: float
    model: float
    echo: float

    @property
    def ratio(self) -> float:
        """The round trip less the model, over the echo."""
        return (self.offload - self.model) / self.echo


def main(
    results: Results = Path("benchmarks/results"),
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each candidate.")] = 25,
    name: Annotated[str, typer.Option(help="Name of the report.")] = "round-trips",
) -> None:
    """Measure the round trips."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="splitedge-round-trips-") as folder:
        work = Path(folder)
        with embedded() as broker:
            cases = _cases(work / "embedded", broker, "embedded:127.0.0.1:0", rounds)
        (work / "mosquitto").mkdir()
        with mosquitto(work) as broker:
            url = f"mqtt://127.0.0.1:{broker.port}"
            cases += _cases(work / "mosquitto", broker, url, rounds)
    about = provenance() | {
        "command": shlex.join(["python", "-m", "benchmarks.mqtt.round_trips", *sys.argv[1:]]),
        "title": "Round trips of an offload, one in flight",
        "load_before": load,
    }
    busy = f"Load of the machine before it began: {load:.2f}. Times in us, medians."
    lines = _lines(cases)
    write(
        results / name,
        about | {"cases": cases},
        [f"# {about['title']}", made_by(about), busy, lines],
    )
    typer.echo(lines)


def _cases(work: Path, broker: Broker, mqtt: str, rounds: int) -> list[Case]:
    state = work / "server"
    folder, manifest = export_random("cnn6", (1, 28, 28), (2,), state / "models")
    x = np.random.default_rng(1).normal(size=(1, 28, 28)).astype(np.float32)
    with open_agent(work, state, mqtt) as agent:
        agent.predict(x)
        size_bytes = agent.bytes_of_one(x)

        def offload(qos: int) -> Callable[[], None]:
            def ask() -> None:
                offloader.AT_ONCE = AT_ONCE[qos]  # type: ignore[misc]  # the reference is QoS 1
                agent.offload(x)

            return ask

        with echo(broker, size_bytes) as ping:
            turns = [offload(1), lambda: ping(1), offload(0), lambda: ping(0)]
            times = [1e6 * each for each in interleaved(turns, rounds)]
        model = 1e6 * model_time(folder, manifest, agent.device_folder, x)
    return [
        Case(broker.name, qos, size_bytes, times[at], model, times[at + 1])
        for qos, at in ((1, 0), (0, 2))
    ]


def _lines(cases: Sequence[Case]) -> str:
    head = "| broker | QoS | bytes | offload | model | bare echo | (offload - model) / echo |"
    rows = [
        f"| {case.broker} | {case.qos} | {case.size_bytes:,} | {case.offload:,.0f}"
        f" | {case.model:,.0f} | {case.echo:,.0f} | {case.ratio:.2f} |"
        for case in cases
    ]
    return "\n".join([head, "|" + " --- |" * 7, *rows])


if __name__ == "__main__":
    typer.run(main)
