"""Traces at Arize Phoenix, a collector of OpenTelemetry that is not ours.

    python3 -m venv .venv-collector && .venv-collector/bin/pip install arize-phoenix
    python -m benchmarks.collector --phoenix .venv-collector/bin/phoenix

A device answers the digits, a quarter of them by way of the server, and everything is traced. What
Phoenix stored is asked of Phoenix's own API, and the tree of each trace is compared with the one
that docs/traces.md shows. Writes benchmarks/results/collector.json and .md.
"""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import orjson
import typer

from benchmarks.install.digits import SAMPLES, export_digits, threshold_of_a_quarter
from benchmarks.reports import RESULTS, Results, made_by, provenance, write
from edge_sdk import api
from profiles.reference import load_reference
from server.processes import ChildProcess, ServerProcess
from server.tokens import create_token

FREE: Final = "127.0.0.1:0"
START_S: Final = 180.0
ARRIVE_S: Final = 60.0
# parents by name, as the tree in docs/traces.md
EXIT: Final = {"predict": ""}
OFFLOAD: Final = {
    "predict": "",
    "offload": "predict",
    "query": "offload",
    "wait": "query",
    "compute": "query",
    "reply": "query",
}

Span = Mapping[str, Any]


def main(
    phoenix: Annotated[Path, typer.Option(help="The command of an installed Phoenix.")],
    results: Results = RESULTS,
) -> None:
    """Trace a device and its server, and read the traces back from Phoenix."""
    with tempfile.TemporaryDirectory(prefix="splitedge-collector-") as text, ExitStack() as stack:
        folder = Path(text)
        inputs = export_digits(folder / "server" / "models")
        threshold = threshold_of_a_quarter(folder / "server" / "models", inputs)
        url = stack.enter_context(_running(phoenix, folder))
        sources = _traced(folder, inputs, threshold, url)
        spans = _arrived(url, 1 * sources["device"] + 6 * sources["server"])
        shapes = _shapes(spans)
        report = {
            "command": "python -m benchmarks.collector --phoenix PHOENIX",
            **provenance(),
            "phoenix": _version(url),
            "sources": dict(sources),
            "spans": dict(Counter(span["name"] for span in spans)),
            "exits": shapes["exit"],
            "offloads": shapes["offload"],
            "others": shapes["other"],
        }
    blocks = _page(report)
    write(results / "collector", report, blocks)
    typer.echo("\n\n".join(blocks))
    if (shapes["exit"], shapes["offload"]) != (sources["device"], sources["server"]):
        raise SystemExit("not every trace arrived whole: see above")


@contextmanager
def _running(phoenix: Path, folder: Path) -> Iterator[str]:
    """Phoenix on a free port, with its files in the folder; gives its URL."""
    ports = [_free_port(), _free_port()]
    environment = {
        **os.environ,
        "PHOENIX_WORKING_DIR": str(folder / "phoenix"),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(ports[0]),
        "PHOENIX_GRPC_PORT": str(ports[1]),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }
    (folder / "phoenix").mkdir()
    url = f"http://127.0.0.1:{ports[0]}"
    with (folder / "phoenix.log").open("wb") as log:
        process = subprocess.Popen(
            [phoenix, "serve"], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        _wait(lambda: _answers(url), START_S, f"{phoenix} did not start")
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def _answers(url: str) -> bool:
    try:
        return _get(url, "/healthz")[0] == 200
    except OSError:
        return False


def _get(url: str, path: str) -> tuple[int, bytes]:
    """Status and body."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=ARRIVE_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _wait(check: Callable[[], Any], seconds: float, failure: str) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := check()):
        if time.monotonic() > deadline:
            raise SystemExit(failure)
        time.sleep(0.2)
    return found


def _traced(folder: Path, inputs: Any, threshold: float, url: str) -> Counter[str]:
    """Let a device answer all inputs, traced to their ends; how many each side answered."""
    traces = ("--traces", url, "--traces-share", "1")
    server = ServerProcess(folder / "server")
    server.start(("--http", FREE, "--mqtt", f"embedded:{FREE}", *traces))
    try:
        profile = load_reference("raspberry-pi-4")
        token = create_token(folder / "server")
        api.enroll(server.http, token, folder / "pi", profile=profile, name="pi")
        np.save(folder / "inputs.npy", inputs)
        state = ("--state", str(folder / "pi"))
        words = ("agent", "run", *state, *traces, "--threshold", repr(threshold))
        agent = ChildProcess.splitedge("the agent", words, folder / "agent.log")
        try:
            agent.expect("splitedge agent:", "did not start")
            return _answers_of(folder, state)
        finally:
            agent.stop()  # which sends the last spans
    finally:
        server.stop()


def _answers_of(folder: Path, state: Sequence[str]) -> Counter[str]:
    command = (sys.executable, "-P", "-m", "edge_sdk.cli")
    words = ("agent", "predict", str(folder / "inputs.npy"), *state, "--json")
    done = subprocess.run([*command, *words], stdout=subprocess.PIPE, timeout=ARRIVE_S, check=True)
    return Counter(answer["source"] for answer in orjson.loads(done.stdout))


def _arrived(url: str, least: int) -> list[Span]:
    """All spans at Phoenix, once there are so many."""

    def spans() -> list[Span]:
        status, body = _get(url, "/v1/projects/default/spans?limit=1000")
        found: list[Span] = orjson.loads(body)["data"] if status == 200 else []
        return found if len(found) >= least else []

    arrived: list[Span] = _wait(spans, ARRIVE_S, f"fewer than {least} spans arrived")
    return arrived


def _shapes(spans: Sequence[Span]) -> Counter[str]:
    """Counts of traces whose parents are those of an exit, of an offload, and of anything else."""
    traces: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        traces[span["context"]["trace_id"]].append(span)
    shapes: Counter[str] = Counter()
    for trace in traces.values():
        names = {span["context"]["span_id"]: span["name"] for span in trace}
        tree = {span["name"]: names.get(span["parent_id"], "") for span in trace}
        kind = {str(EXIT): "exit", str(OFFLOAD): "offload"}
        shape = str({name: tree[name] for name in OFFLOAD if name in tree})
        whole = len(tree) == len(trace) and tree.keys() <= OFFLOAD.keys()
        shapes[kind.get(shape, "other") if whole else "other"] += 1
    return shapes


def _version(url: str) -> str:
    return _get(url, "/arize_phoenix_version")[1].decode()


def _page(report: Mapping[str, Any]) -> list[str]:
    """The report's text."""
    names = ", ".join(f"{count} `{name}`" for name, count in sorted(report["spans"].items()))
    sources = report["sources"]
    table = [
        "| | answers | traces that are whole at Phoenix |",
        "|---|---|---|",
        f"| exits: one span | {sources.get('device', 0)} | {report['exits']} |",
        f"| offloads: six spans | {sources.get('server', 0)} | {report['offloads']} |",
    ]
    return [
        "# Traces at a collector",
        (
            f"Arize Phoenix {report['phoenix']}, from PyPI, took the traces of a device and its"
            f" server by OTLP over HTTP. All of {SAMPLES} predictions were traced. What Phoenix"
            " stored was asked of its own API."
        ),
        "\n".join(table),
        f"Spans: {names}. Traces of another form, those of the batches: {report['others']}.",
        made_by(report),
    ]


if __name__ == "__main__":
    typer.run(main)
