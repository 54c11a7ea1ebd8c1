"""A real server and a real agent: what the device measures and reports moves it, without a gap.

Depth 2 of the model holds 40 MB of weights more than depth 1, and has two variants. The one called
int8 is made the slower one, as it is on some processors.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import onnx
import psutil
import pytest
from onnx import helper, numpy_helper

from edge_sdk import AgentSettings, EdgeAgent, api
from edge_sdk.bundles.update import update
from edge_sdk.manifest import BundleManifest
from profiles import load_reference
from server.bench.models import export_random
from server.processes import ServerProcess
from server.registry.database import Registry
from server.tokens import create_token
from tests.waiting import wait_until

SHAPE = (1, 8, 8)
WITHIN_S = 120.0  # each move starts several processes

pytestmark = [pytest.mark.broker, pytest.mark.deadline, pytest.mark.timeout(600)]


def weigh_down(path: Path, *, megabytes: float, products: int) -> None:
    """Make a graph larger and slower without another answer: 0 times a sum is added to its logits.

    The graphs stay far below a millisecond, so that a busy machine takes none beyond a limit.

    Args:
        megabytes: of a weight of which one row is read. products: of two 192 x 192 matrices.
    """
    model = onnx.load(path)
    (last,) = (node for node in model.graph.node if "logits" in node.output)
    last.output[list(last.output).index("logits")] = "plain"
    weights = {
        "ballast": np.ones((round(megabytes * 1e6 / 4 / 64), 64), np.float32),
        "square": np.full((192, 192), 1e-3, np.float32),
        "zero": np.float32(0),
        "row": np.int64(0),
    }
    for name, value in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    nodes = [
        ("ReduceSum", ["x"], "seen"),  # of the input, so that nothing is computed in advance
        ("Mul", ["seen", "zero"], "naught"),
        ("Cast", ["naught"], "index"),
        ("Add", ["index", "row"], "place"),
        ("Gather", ["ballast", "place"], "read"),
        ("ReduceSum", ["read"], "sum"),
        ("Mul", ["sum", "zero"], "none"),
        ("Add", ["square", "none"], "product0"),
        *(("MatMul", [f"product{n}", "square"], f"product{n + 1}") for n in range(products)),
        ("ReduceSum", [f"product{products}"], "end"),
        ("Mul", ["end", "zero"], "nothing"),
        ("Add", ["plain", "nothing"], "logits"),
    ]
    for kind, inputs, output in nodes:
        node = helper.make_node(kind, inputs, [output])
        if kind == "ReduceSum":
            node.attribute.append(helper.make_attribute("keepdims", 0))
        if kind == "Cast":
            node.attribute.append(helper.make_attribute("to", onnx.TensorProto.INT64))
        model.graph.node.append(node)
    onnx.save(model, path)


class Server:
    """A server with `bench-tiny/1`: the bundles d1, d2 and d2-int8."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "server"
        export, manifest = export_random("tiny", SHAPE, (1, 2), self.state / "models")
        fast, slow = export / "bundles" / "d2", export / "bundles" / "d2-int8"
        shutil.copytree(fast, slow)
        weigh_down(fast / "exit.onnx", megabytes=40, products=0)
        weigh_down(slow / "exit.onnx", megabytes=40, products=4)
        renamed = replace(BundleManifest.load(slow), bundle="bench-tiny/1/d2-int8")
        (slow / "manifest.json").write_bytes(renamed.to_json())
        more = replace(manifest, variants=(*manifest.variants, "d2-int8"))
        (export / "model.json").write_bytes(more.to_json())
        self._process = ServerProcess(self.state)
        self._process.start(("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"))

    def stop(self) -> None:
        self._process.stop()

    def enrol(self, state: Path) -> Path:
        profile = load_reference("raspberry-pi-4")
        token = create_token(self.state)
        api.enroll(self._process.http, token, state, profile=profile, name="pi-1")
        assert update(state).status == "installed"
        return state

    @contextmanager
    def registry(self) -> Iterator[Registry]:
        opened = Registry.open(f"sqlite:///{self.state / 'registry.db'}")
        try:
            yield opened
        finally:
            opened.close()

    def moves(self) -> list[str]:
        """The bundles that the device was given, in order."""
        with self.registry() as registry:
            trail = reversed(registry.trail.entries(1000))
            return [e.detail.rpartition("/")[2] for e in trail if e.what == "device.assign"]

    def splitedge(self, *words: str) -> None:
        command = [sys.executable, "-P", "-m", "edge_sdk.cli", "server", *words]
        subprocess.run([*command, "--state", str(self.state)], check=True, timeout=60)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.stop()


class Predictions:
    """Predictions one after the other, until the end of the block."""

    def __init__(self, agent: EdgeAgent) -> None:
        self.longest_gap_s = 0.0
        self.failed: list[Exception] = []
        self.count = 0
        self._agent = agent
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        x = np.zeros(SHAPE, np.float32)
        last = time.monotonic()
        while not self._stopping.wait(0.01):
            try:
                self._agent.predict(x)
            except Exception as err:  # noqa: BLE001 - any failure is one too many
                self.failed.append(err)
            now = time.monotonic()
            self.longest_gap_s, last = max(self.longest_gap_s, now - last), now
            self.count += 1


@contextmanager
def spare_memory(megabytes: int) -> Iterator[None]:
    """Lower this process's limit, the agent's too, to that much above what it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = psutil.Process().memory_info().vms + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_device_moves_by_what_it_measures_and_never_stops_answering(
    server: Server, tmp_path: Path
) -> None:
    state = server.enrol(tmp_path / "pi")
    # everything exits, and a change counts after a second in place of a minute
    settings = AgentSettings(threshold=1e9, report_after_s=1.0, heartbeat_s=0.2)
    with EdgeAgent.open(state, settings) as agent, Predictions(agent) as predictions:

        def wait_bundle(variant: str) -> None:
            wanted = f"bench-tiny/1/{variant}"
            wait_until(
                lambda: agent.status().bundle == wanted,
                lambda: (agent.status().bundle, server.moves()),
                WITHIN_S,
            )

        assert agent.status().bundle == "bench-tiny/1/d2-int8"
        # the device measures the other variant by itself, which is faster there
        wait_bundle("d2")
        with server.registry() as registry:
            known = registry.capabilities.of("pi-1")
        taken = {each.bundle.rpartition("/")[2]: each for each in known.measurements}
        assert taken["d2"].latency_ms < 0.95 * taken["d2-int8"].latency_ms
        assert taken["d2"].memory_bytes > 40_000_000

        with spare_memory(taken["d2"].memory_bytes // 2**20 // 2):
            wait_bundle("d1")

        # there is memory again, and the device says so; it does not go back at once
        def reported() -> int:
            with server.registry() as registry:
                found = registry.capabilities.of("pi-1").conditions
            return (found and found.memory_available_bytes) or 0

        wait_until(lambda: reported() > 10 * taken["d2"].memory_bytes, reported, WITHIN_S)
        agent.refresh()
        assert agent.status().bundle == "bench-tiny/1/d1"
        moves = server.moves()
        assert moves[:2] == ["d2-int8", "d2"]
        assert moves[-1] == "d1"  # by the smaller bundle of its depth, if memory went in two steps
        assert set(moves[2:-1]) <= {"d2-int8"}
        with server.registry() as registry, registry._transactions.writing() as connection:
            connection.exec_driver_sql("UPDATE failures SET failed_at = failed_at - 600")
        agent.refresh()
        wait_bundle("d2")

        # the operator's word is the last
        server.splitedge("pin", "pi-1", "--depth", "1")
        wait_bundle("d1")
        server.splitedge("unpin", "pi-1")
        wait_bundle("d2")

    assert predictions.failed == []
    assert predictions.count > 100
    assert predictions.longest_gap_s < 2.0
    # a busy machine may measure the other variant of a depth as the faster one for a while
    assert [move for move in server.moves() if move != "d2-int8"] == ["d2", "d1", "d2", "d1", "d2"]
