"""The agent on arm64: a Debian bookworm of that processor, emulated, against a server on this one.

    make arm64
    make arm64 ARGS=--extras      # memory and start alone (emulated_footprint.py)

The agent's wheel is installed with pip into the emulated system. There it is enrolled, fetches its
bundle, predicts, offloads, loses the server and finds it again, and answers v2 over HTTP. The same
agent runs on this machine's processor beside it, and the answers are compared.
Writes arm64.json and .md into benchmarks/results/. It needs root, and Debian's archive.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.install.digits import SAMPLES, export_digits, threshold_of_a_quarter
from benchmarks.install.emulated_footprint import install_extras, report_extras
from benchmarks.reports import RESULTS, ROOT, Results, made_by, provenance, write
from server.processes import ChildProcess, ServerProcess
from server.tokens import create_token

Array = NDArray[Any]

SCRIPT: Final = ROOT / ".ci" / "arm64-root.sh"
DEVICE_SCRIPT: Final = Path(__file__).with_name("device_script.py")
TREE: Final = ROOT / ".ci" / "arm64"
PROGRAM: Final = "/opt/splitedge/bin"
# between two processors fp32 kernels add in another order
ALLOWED: Final = 1e-4
DEADLINE_S: Final = 180.0
BASELINE: Final = (
    "import numpy, onnxruntime, paho.mqtt.client, pathlib;"
    "print(next(l for l in pathlib.Path('/proc/self/status').read_text().splitlines()"
    " if l.startswith('VmRSS')).split()[1])"
)


@dataclass(frozen=True)
class Machine:
    """Machine on which an agent runs: the emulated system, or this one.

    Attributes:
        prefix: words in front of each command; none on this machine.
        python, splitedge: its programs.
        folder: seen from here; `inside` is the same folder seen from there.
    """

    name: str
    prefix: Sequence[str]
    python: str
    splitedge: Sequence[str]
    folder: Path
    inside: Path

    def run(self, *words: str) -> tuple[str, float]:
        """Run a command; gives its output, and the seconds that it takes.

        Raises: RuntimeError with its last words.
        """
        start = time.perf_counter()
        done = subprocess.run(
            [*self.prefix, *words], capture_output=True, text=True, timeout=1200, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(words)}: {done.stderr.strip()[-2000:]}")
        return done.stdout, time.perf_counter() - start

    def start(self, *words: str) -> ChildProcess:
        """A command that goes on."""
        return ChildProcess(f"the {self.name} agent", [*self.prefix, *words], self.folder / "log")


def main(
    root: Annotated[
        Path, typer.Option(metavar="DIR", help="The emulated system; it is built if missing.")
    ] = TREE,
    results: Results = RESULTS,
    extras: Annotated[
        bool,
        typer.Option(help="Only measure memory and start there, with and without each extra."),
    ] = False,
) -> None:
    """Install the agent into an emulated arm64 system, and compare it with this machine's."""
    if os.geteuid() != 0:
        raise SystemExit("make arm64 mounts and changes root: run it as root, or in a container")
    figures: dict[str, Any] = {"installation": _install(root)}
    if extras:
        install_extras(root, _wheel(root))
        typer.echo("\n\n".join(report_extras(root, results)))
        return
    with tempfile.TemporaryDirectory(prefix="splitedge-arm64-") as text:
        folder = Path(text)
        inputs = export_digits(folder / "server" / "models")
        with _machines(root, folder) as machines:
            threshold = threshold_of_a_quarter(folder / "server" / "models", inputs)
            figures |= _compare(folder, machines, inputs, threshold)
    report = {"command": "make arm64", **provenance(), "samples": SAMPLES, **figures}
    blocks = _page(report)
    write(results / "arm64", report, blocks)
    typer.echo("\n\n".join(blocks))
    if figures["difference"] > ALLOWED or not figures["same_sources"]:
        raise SystemExit("the answers differ: see above")
    if not all(each["sources"]["answers"]["server"] for each in figures["machines"].values()):
        raise SystemExit("nothing was offloaded: see above")


def _install(root: Path) -> dict[str, float]:
    """Build the emulated system and install this tree's wheel there, if that is not done yet."""
    if not (root / "usr" / "bin" / "python3").exists():
        subprocess.run(["bash", str(SCRIPT), "fast", str(root)], check=True, stdout=sys.stderr)
    shutil.rmtree(root / "opt" / "dist", ignore_errors=True)
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(root / "opt" / "dist")]
    subprocess.run([*build, str(ROOT)], check=True, stdout=subprocess.DEVNULL)
    shutil.copy(ROOT / "constraints.txt", root / "opt" / "dist")
    inside = _wheel(root)
    if not (root / PROGRAM[1:] / "pip").exists():
        _in(root, "python3", "-m", "venv", "/opt/splitedge")
    pip = (f"{PROGRAM}/pip", "install", "--quiet", "--constraint", "/opt/dist/constraints.txt")
    first = root / "opt" / "first-installation.json"
    if not first.exists():
        start = time.perf_counter()
        _in(root, *pip, f"{inside}[serve]")
        pip_s = time.perf_counter() - start
        first.write_text(json.dumps({"pip_s": pip_s, "disk_bytes": _disk_bytes(root)}))
    _in(root, *pip, "--force-reinstall", "--no-deps", inside)  # this tree has the same version
    wheel_bytes = (root / inside[1:]).stat().st_size
    return {"wheel_bytes": wheel_bytes, **json.loads(first.read_text())}


def _wheel(root: Path) -> str:
    """The wheel's path, seen from the emulated system."""
    (wheel,) = (root / "opt" / "dist").glob("*.whl")
    return f"/opt/dist/{wheel.name}"


def _disk_bytes(root: Path) -> int:
    """Bytes of what pip installed; extras that come later do not count."""
    return sum(
        path.lstat().st_size
        for path in (root / "opt" / "splitedge").rglob("*")
        if not path.is_dir() and "pip" not in path.parts
    )


def _in(root: Path, *words: str) -> None:
    subprocess.run(["bash", str(SCRIPT), "run", str(root), *words], check=True)


@contextlib.contextmanager
def _machines(root: Path, folder: Path) -> Iterator[list[Machine]]:
    """The two machines, this one and the emulated one, each with an empty folder."""
    there = Path(tempfile.mkdtemp(prefix="run-", dir=root / "opt"))
    here = folder / "x86-64"
    here.mkdir()
    ours = [sys.executable, "-P", "-m", "edge_sdk.cli"]
    arm64 = ["bash", str(SCRIPT), "run", str(root)]
    inside = Path("/opt") / there.name
    program = f"{PROGRAM}/python"
    try:
        yield [
            Machine("x86-64", [], sys.executable, ours, here, here),
            Machine("arm64", arm64, program, [f"{PROGRAM}/splitedge"], there, inside),
        ]
    finally:
        shutil.rmtree(there)


def _compare(
    folder: Path, machines: Sequence[Machine], inputs: Array, threshold: float
) -> dict[str, Any]:
    """Everything that both agents do, and how far their answers are apart."""
    server = ServerProcess(folder / "server")
    server.start(("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"))
    try:
        found = {each.name: _join(each, server, folder, inputs) for each in machines}
        agents = {each.name: _agent(each, threshold) for each in machines}
        try:
            for each in machines:
                found[each.name] |= _status(agents[each.name], "present")
                found[each.name]["answers"] = _ask(agents[each.name], "predict")
            server.stop()
            for each in machines:
                _status(agents[each.name], "away")
                found[each.name]["alone"] = _ask(agents[each.name], "predict")
            server.start()
            for each in machines:
                _status(agents[each.name], "present")
                found[each.name]["again"] = _ask(agents[each.name], "predict")
                found[each.name] |= _ask(agents[each.name], "status")
        finally:
            for agent in agents.values():
                agent.close()
        for each in machines:
            found[each.name] |= _served(each, inputs)
    finally:
        server.stop()
    return _summary(found)


def _join(machine: Machine, server: ServerProcess, folder: Path, inputs: Array) -> dict[str, Any]:
    """Enrol the device and fetch its bundle."""
    np.save(machine.folder / "inputs.npy", inputs)
    shutil.copy(DEVICE_SCRIPT, machine.folder)
    token = create_token(folder / "server")
    state = ("--state", str(machine.inside / "state"))
    enroll = ("agent", "enroll", "--server", server.http, "--token", token, "--name", machine.name)
    _, enroll_s = machine.run(*machine.splitedge, *enroll, *state)
    printed, update_s = machine.run(*machine.splitedge, "agent", "update", *state, "--json")
    imports, _ = machine.run(machine.python, "-c", BASELINE)
    return {
        "bundle": json.loads(printed)["bundle"],
        "enroll_s": enroll_s,
        "update_s": update_s,
        "imports_bytes": int(imports) << 10,
    }


def _agent(machine: Machine, threshold: float) -> ChildProcess:
    """The agent in a script of its user."""
    inside = machine.inside
    words = (machine.python, inside / DEVICE_SCRIPT.name, inside / "state", inside / "inputs.npy")
    return machine.start(*map(str, words), repr(threshold))


def _ask(agent: ChildProcess, word: str) -> Any:
    agent.write_line(word)
    line = agent.read_line(DEADLINE_S)
    if not line:
        raise agent.error("ended")
    return json.loads(line)


def _status(agent: ChildProcess, presence: str) -> dict[str, Any]:
    """The agent's state, once it sees the server so.

    Raises: RuntimeError if it does not in time.
    """
    deadline = time.monotonic() + DEADLINE_S
    while True:
        status: dict[str, Any] = _ask(agent, "status")
        if status["presence"] == presence:
            return status
        if time.monotonic() > deadline:
            raise RuntimeError(f"expected a server that is {presence}, got {status}")
        time.sleep(0.2)


def _served(machine: Machine, inputs: Array) -> dict[str, Any]:
    """Answers of `agent run --serve` to a client of the v2 protocol."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    state = ("--state", str(machine.inside / "state"))
    start = time.perf_counter()
    words = ("agent", "run", *state, "--serve", f"127.0.0.1:{port}")
    agent = machine.start(*machine.splitedge, *words)
    try:
        agent.expect("splitedge agent:", "did not start")
        served_s = time.perf_counter() - start
        path = agent.expect("/infer", "serves nothing").partition(str(port))[2].strip()
        labels = []
        for x in inputs[:20]:
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, *x.shape]}
            body = {"inputs": [{**tensor, "data": x.ravel().tolist()}]}
            asking = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            asking.request("POST", path, json.dumps(body))
            labels.append(json.load(asking.getresponse())["outputs"][0]["data"][0])
            asking.close()
        lines = Path(f"/proc/{agent.pid}/status").read_text().splitlines()
        resident = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))
    finally:
        agent.stop()
    return {"serve_start_s": served_s, "serve_resident_bytes": resident, "serve_labels": labels}


def _summary(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of both machines, without the answers themselves."""
    ours, theirs = found["x86-64"], found["arm64"]
    differences = [
        float(np.abs(np.subtract(one["probabilities"], other["probabilities"])).max())
        for when in ("answers", "alone", "again")
        for one, other in zip(ours[when], theirs[when], strict=True)
        # a late reply on a busy machine changes who answers: it is counted, not compared
        if one["source"] == other["source"]
    ]
    machines: dict[str, Any] = {}
    for name, each in found.items():
        sources = {
            when: {
                source: sum(row["source"] == source for row in each[when])
                for source in ("device", "server", "fallback")
            }
            for when in ("answers", "alone", "again")
        }
        local = [row["latency_ms"] for row in each["answers"] if row["source"] == "device"]
        kept = {key: value for key, value in each.items() if key not in sources}
        kept.pop("serve_labels")
        longest = max(row["latency_ms"] for row in each["alone"])
        machines[name] = {
            **kept,
            "sources": sources,
            "exit_ms": float(np.median(local)),
            "longest_alone_ms": longest,
        }
    same = all(
        [row["source"] for row in ours[when]] == [row["source"] for row in theirs[when]]
        for when in ("answers", "again")
    )
    return {
        "machines": machines,
        "difference": max(differences),
        "compared": len(differences),
        "same_sources": same,
        "same_served_labels": ours["serve_labels"] == theirs["serve_labels"],
    }


def _page(report: Mapping[str, Any]) -> list[str]:
    """The report's text."""
    installed, (ours, theirs) = report["installation"], report["machines"].values()

    def row(what: str, of: str, form: str, factor: float = 1.0) -> str:
        return f"| {what} | {factor * ours[of]:{form}} | {factor * theirs[of]:{form}} |"

    def sources(what: str, when: str) -> str:
        cells = [
            ", ".join(f"{count} {source}" for source, count in each["sources"][when].items())
            for each in (ours, theirs)
        ]
        return f"| {what} | {cells[0]} | {cells[1]} |"

    mib = 1 / (1 << 20)
    table = [
        "| | x86-64 | arm64, emulated |",
        "|---|---|---|",
        f"| bundle | {ours['bundle']} | {theirs['bundle']} |",
        row("enrolment with its measurements, s", "enroll_s", ".1f"),
        row("`agent update` with nothing new, s", "update_s", ".1f"),
        sources(f"{report['samples']} answers with the server", "answers"),
        sources("the same while the server is away", "alone"),
        sources("the same once it is back", "again"),
        row("median time of an answer on the device, ms", "exit_ms", ".2f"),
        row("longest answer while the server is away, ms", "longest_alone_ms", ".1f"),
        row("from the start of Python to the first answer, s", "start_s", ".2f"),
        row("from `agent run --serve` to its first line, s", "serve_start_s", ".2f"),
        row("resident: numpy, onnxruntime and paho alone, MiB", "imports_bytes", ".0f", mib),
        row("resident: an agent in a script, MiB", "resident_bytes", ".0f", mib),
        row("resident: `agent run --serve`, MiB", "serve_resident_bytes", ".0f", mib),
    ]
    return [
        "# The agent on arm64",
        (
            "A Debian bookworm of arm64 (as Raspberry Pi OS bookworm), emulated by qemu on an"
            f" x86-64 machine; the wheel of {installed['wheel_bytes'] / 1e6:.2f} MB was installed"
            f" with pip in {installed['pip_s']:.0f} s and takes"
            f" {installed['disk_bytes'] / 1e6:.0f} MB with what it needs. Times say nothing of a"
            " real Pi: emulation is some ten times slower, and its memory has the emulator's own"
            " in it. Other work ran on the machine's two cores beside it."
        ),
        "\n".join(table),
        (
            f"Of {report['compared']} pairs of answers by the same side, the largest difference"
            f" of a probability is {report['difference']:.1e} (allowed: {ALLOWED:.0e}). The same"
            f" inputs were offloaded: {'yes' if report['same_sources'] else 'NO'}. Labels over"
            f" HTTP are the same: {'yes' if report['same_served_labels'] else 'NO'}."
        ),
        made_by(report),
    ]


if __name__ == "__main__":
    typer.run(main)
