"""Out of memory, for real: an agent under RLIMIT_AS goes on with a smaller bundle, and says so.

The agent is a process of its own, which lowers its limit after it has started. Its bundle asks for
2 GB where an input holds a number above a million, as a graph does whose shapes depend on the data.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import orjson
import pytest

from edge_sdk import AgentSettings, api
from edge_sdk.bundles.lifecycle import BundleLifecycle
from edge_sdk.bundles.runner import BundleRunner
from edge_sdk.bundles.store import BundleStore
from edge_sdk.bundles.update import update
from edge_sdk.errors import OutOfMemoryError
from edge_sdk.manifest import BundleManifest
from profiles import load_reference
from server.bench.models import export_random
from server.processes import ServerProcess
from server.registry.database import Registry
from server.tokens import create_token
from tests.edge.hungry import hungry

if TYPE_CHECKING:
    from tests.edge.bundles.depot import Depot, Export
    from tests.edge.digits import Digits

BACK_WITHIN_S = 10.0

# limit, then one JSON line for each of: the answer to a hungry input, and to an ordinary one
AGENT = """
import json, resource, sys, time
from pathlib import Path
import numpy as np
from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.errors import OutOfMemoryError

state, spare_mb, when = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def limit():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    size = (int(status["VmSize"].split()[0]) << 10) + (spare_mb << 20)
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))

offload = (state / "connection.json").exists()  # not at the depot, which has no broker
settings = AgentSettings(deadline_s=float(sys.argv[4]), threshold=1e9, offload=offload)
if when == "load":
    import onnxruntime
    limit()
with EdgeAgent.open(state, settings) as agent:
    first = agent.status().bundle
    if when == "run":
        limit()
    spec = agent.manifest.input
    hungry = np.zeros(spec.shape, spec.dtype)
    hungry.flat[0] = 2e6
    failed, began = [], time.monotonic()
    while True:
        try:
            answer = agent.predict(hungry)
            break
        except OutOfMemoryError as err:
            failed.append(str(err))
            assert time.monotonic() - began < 30, failed
    took_s = time.monotonic() - began
    status = agent.status()
    print(json.dumps({"first": first, "failed": failed, "took_s": took_s, "bundle": status.bundle,
                      "trouble": status.trouble, "source": answer.source}))
"""


def run_agent(state: Path, spare_mb: int, when: str, deadline_s: float) -> tuple[Any, str]:
    """What the agent printed, and its log."""
    log = "import logging; logging.basicConfig(level=logging.INFO)\n"
    words = [str(state), str(spare_mb), when, str(deadline_s)]
    command = [sys.executable, "-P", "-c", log + AGENT, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_prediction_goes_on_with_the_smaller_bundle_at_hand(
    depot: Depot, export: Export, state: Path
) -> None:
    """FAULTS row 11: tiny/1/d2 is in the other slot, not fetched: the same call answers."""
    depot.repository.publish_bundles(export.write(1))
    depot.repository.publish_bundles(export.write(2, width=100_000, model=hungry))
    for version in (1, 2):
        assert update(state, f"tiny/{version}/d2").status == "installed"

    seen, log = run_agent(state, 100, "run", 5.0)

    assert (seen["first"], seen["bundle"]) == ("tiny/2/d2", "tiny/1/d2")
    assert (seen["failed"], seen["source"]) == ([], "device")
    assert seen["took_s"] < BACK_WITHIN_S
    assert seen["trouble"].startswith("tiny/2/d2 ran out of memory at 20")
    assert "ran out of memory" in log
    store = BundleStore(state)
    assert store.active().manifest.bundle == "tiny/1/d2"
    (entry,) = orjson.loads((state / "quarantine.json").read_bytes()).values()
    assert (entry["bundle"], entry["until"] > entry["at"]) == ("tiny/2/d2", True)
    # not fetched again for a while, and then it is
    assert "failed on this device before" in update(state, "tiny/2/d2").reason
    (digest,) = orjson.loads((state / "quarantine.json").read_bytes())
    over = {digest: entry | {"until": entry["at"]}}
    (state / "quarantine.json").write_bytes(orjson.dumps(over))
    assert update(state, "tiny/2/d2").status == "installed"


def test_a_bundle_that_has_no_memory_to_load_gives_way_at_the_start(
    depot: Depot, export: Export, state: Path
) -> None:
    """FAULTS row 11."""
    depot.repository.publish_bundles(export.write(1))
    depot.repository.publish_bundles(export.write(2, width=2_000_000))
    for version in (1, 2):
        assert update(state, f"tiny/{version}/d2").status == "installed"

    seen, log = run_agent(state, 60, "load", 5.0)

    assert (seen["first"], seen["bundle"], seen["failed"]) == ("tiny/1/d2", "tiny/1/d2", [])
    assert "tiny/2/d2 ran out of memory" in log


@pytest.mark.deadline
def test_without_a_smaller_bundle_the_error_says_so_and_the_agent_lives(
    depot: Depot, export: Export, state: Path
) -> None:
    """FAULTS row 11."""
    depot.repository.publish_bundles(export.write(1, model=hungry))
    assert update(state, "tiny/1/d2").status == "installed"
    program = AGENT.replace(
        "predict(hungry)", "predict(hungry * 0) if failed else agent.predict(hungry)"
    )
    command = [sys.executable, "-P", "-c", program, str(state), "100", "run", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["bundle"] == "tiny/1/d2"
    assert len(seen["failed"]) == 1
    assert "no memory" in seen["failed"][0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """A real server with `bench-tiny/1`: depths 1 and 2, of which 2 is hungry."""
    state = tmp_path_factory.mktemp("memory") / "server"
    folder, _ = export_random("tiny", (1, 8, 8), (1, 2), state / "models")
    path = folder / "bundles" / "d2" / "exit.onnx"
    path.write_bytes(hungry(onnx.load(path)))
    running = ServerProcess(state)
    running.start(("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"))
    yield running, state
    running.stop()


@pytest.mark.broker
@pytest.mark.deadline
def test_the_server_gives_a_smaller_bundle_and_holds_the_depth(
    server: tuple[ServerProcess, Path], tmp_path: Path, reached: Callable[..., None]
) -> None:
    """FAULTS row 11."""
    running, folder = server
    state = tmp_path / "pi"
    profile = load_reference("raspberry-pi-4")
    api.enroll(running.http, create_token(folder), state, profile=profile, name="pi-1")
    assert update(state).bundle == "bench-tiny/1/d2"

    seen, _ = run_agent(state, 100, "run", 0.5)

    reached(
        "memory",
        f"from {seen['first']} to {seen['bundle']} in {seen['took_s']:.1f} s; status:"
        f" {seen['trouble']}",
        took_s=seen["took_s"],
    )
    assert (seen["first"], seen["bundle"]) == ("bench-tiny/1/d2", "bench-tiny/1/d1")
    assert seen["took_s"] < BACK_WITHIN_S
    assert seen["trouble"].startswith("bench-tiny/1/d2 ran out of memory")
    registry = Registry.open(f"sqlite:///{folder / 'registry.db'}")
    try:
        (failure,) = registry.capabilities.of("pi-1").failures
        assert (failure.bundle, failure.count) == ("bench-tiny/1/d2", 1)
        assert "memory" in failure.why
    finally:
        registry.close()
    # the depth is not given again when the device asks
    again = update(state)
    assert (again.status, again.bundle) == ("unchanged", "bench-tiny/1/d1")


def test_without_memory_for_a_thread_it_is_out_of_memory_too(
    tmp_path: Path, digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, settings = digits.models / "digits" / "1" / "bundles" / "d2", AgentSettings()
    runner = BundleRunner(folder, BundleManifest.load(folder), settings)
    lifecycle = BundleLifecycle(BundleStore(tmp_path), settings, runner, "")

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(OutOfMemoryError, match="too little"):
        lifecycle.leave(runner, OutOfMemoryError("too little"), 0.0)
