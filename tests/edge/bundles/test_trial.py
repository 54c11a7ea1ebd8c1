"""Signed is not yet good: hostile graphs and wrong answers are refused, and the agent lives."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_sdk.bundles.golden import check_golden
from edge_sdk.bundles.run_update import UpdateOutcome, run_measure, run_update
from edge_sdk.bundles.store import BundleStore
from edge_sdk.bundles.trial import run_trial
from edge_sdk.bundles.update import update
from edge_sdk.errors import OutOfMemoryError, UpdateRefusedError
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.edge.bundles.depot import Depot, Export

Sabotage = Callable[[onnx.ModelProto], bytes]


def serialised(model: onnx.ModelProto) -> bytes:
    return bytes(model.SerializeToString())


def garbage(_: onnx.ModelProto) -> bytes:
    return os.urandom(5000)


def empty(_: onnx.ModelProto) -> bytes:
    return b""


def truncated(model: onnx.ModelProto) -> bytes:
    return serialised(model)[:-100]


def external_data(location: str) -> Sabotage:
    """Weights read from another file of the device, to come out as answers."""

    def sabotage(model: onnx.ModelProto) -> bytes:
        weight = model.graph.initializer[0]
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", "0"), ("length", "128")):
            entry = weight.external_data.add()
            entry.key, entry.value = key, value
        return serialised(model)

    return sabotage


def huge_tensor(model: onnx.ModelProto) -> bytes:
    """z plus the sum of 10^12 ones: 4 TB, asked for in a few bytes."""
    size = numpy_helper.from_array(np.array([1_000_000_000_000], np.int64), "size")
    model.graph.initializer.append(size)
    fill = helper.make_node("ConstantOfShape", ["size"], ["ones"])
    total = helper.make_node("ReduceSum", ["ones"], ["total"], keepdims=0)
    model.graph.node.extend([fill, total])
    return _add_to_logits(model, "total")


def not_a_number(model: onnx.ModelProto) -> bytes:
    zero = numpy_helper.from_array(np.zeros((1, 3), np.float32), "zero")
    model.graph.initializer.append(zero)
    model.graph.node.append(helper.make_node("Div", ["zero", "zero"], ["nan"]))
    return _add_to_logits(model, "nan")


def no_logits(model: onnx.ModelProto) -> bytes:
    del model.graph.output[1]
    return serialised(model)


def wrong_shape(model: onnx.ModelProto) -> bytes:
    model.graph.initializer[1].CopyFrom(
        numpy_helper.from_array(np.ones((8, 4), np.float32), model.graph.initializer[1].name)
    )
    model.graph.output[1].type.tensor_type.shape.dim[1].dim_value = 4
    return serialised(model)


def other_weights(model: onnx.ModelProto) -> bytes:
    weights = numpy_helper.to_array(model.graph.initializer[1])
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(weights * np.float32(1.01), "v"))
    return serialised(model)


def endless_loop(model: onnx.ModelProto) -> bytes:
    """2^60 turns of a loop with an almost empty body."""
    turns = numpy_helper.from_array(np.array(1 << 60, np.int64), "turns")
    always = numpy_helper.from_array(np.array(True), "always")
    start = numpy_helper.from_array(np.zeros((1, 3), np.float32), "start")
    model.graph.initializer.extend([turns, always, start])
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Neg", ["carried"], ["carried_on"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", TensorProto.FLOAT, [1, 3]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried_on", TensorProto.FLOAT, [1, 3]),
        ],
    )
    loop = helper.make_node("Loop", ["turns", "always", "start"], ["never"], body=body)
    model.graph.node.append(loop)
    return _add_to_logits(model, "never")


def _add_to_logits(model: onnx.ModelProto, name: str) -> bytes:
    model.graph.node[2].output[0] = "sum"
    model.graph.node.append(helper.make_node("Add", ["sum", name], ["logits"]))
    return serialised(model)


def bundle(export: Export, sabotage: Sabotage) -> Path:
    return export.write(2, model=sabotage) / "bundles" / "d2"


@pytest.mark.parametrize(
    ("sabotage", "why"),
    [
        (garbage, "onnxruntime refuses"),
        (empty, "onnxruntime refuses"),
        (truncated, "onnxruntime refuses"),
        (external_data("../../../agent.json"), "onnxruntime refuses"),
        (external_data("/etc/passwd"), "onnxruntime refuses"),
        (huge_tensor, "onnxruntime"),
        (not_a_number, "not finite"),
        (no_logits, "not in the graph"),
        (wrong_shape, "expected float32"),
        (other_weights, "golden logits missed"),
    ],
)
def test_bad_graph_is_refused_by_the_trial(
    export: Export, tmp_path: Path, sabotage: Sabotage, why: str
) -> None:
    """FAULTS rows 5 and 27."""
    (tmp_path / "exports" / "tiny").mkdir(parents=True)
    (tmp_path / "exports" / "tiny" / "agent.json").write_bytes(bytes(128))
    with pytest.raises((UpdateRefusedError, OutOfMemoryError), match=why):
        run_trial(bundle(export, sabotage))


def test_graph_that_never_ends_is_stopped(export: Export) -> None:
    """FAULTS rows 5 and 27."""
    with pytest.raises(UpdateRefusedError, match="not finished after 2 s"):
        run_trial(bundle(export, endless_loop), timeout_s=2)


@pytest.mark.parametrize("measured", [False, True])
def test_a_trial_ends_with_the_update_or_measurement_that_began_it(
    installed: Path, depot: Depot, export: Export, *, measured: bool
) -> None:
    """Its bundles would take memory beside the smaller one that the device tries instead."""
    depot.repository.publish_bundles(export.write(3, model=endless_loop))
    begun: list[subprocess.Popen[bytes]] = []

    def run() -> UpdateOutcome:
        if measured:
            return run_measure(installed, ["tiny/3/d2"], begun=begun.append)
        return run_update(installed, "tiny/3/d2", begun=begun.append)

    def looping() -> psutil.Process | None:
        """The trial, once it has taken a second of a core: it runs the graph."""
        for child in psutil.Process(begun[0].pid).children() if begun else []:
            if child.cpu_times().user > 1 and "edge_sdk.bundles.trial" in child.cmdline():
                return child
        return None

    def ended() -> bool:
        return not trial.is_running() or trial.status() == psutil.STATUS_ZOMBIE

    with ThreadPoolExecutor() as pool:
        outcome = pool.submit(run)
        found = wait_until(looping, "the trial", 30.0)
        assert found is not None
        trial = found
        begun[0].terminate()
        assert outcome.result(10.0).status == ("stopped" if measured else "refused")
    try:
        wait_until(ended, "the end of the trial", 5.0)
    finally:
        if not ended():
            trial.kill()


def test_good_bundle_passes_and_says_what_it_takes(export: Export) -> None:
    report = run_trial(bundle(export, serialised))
    assert report.samples == 5
    assert report.difference < 1e-5  # float32 sums of 8 terms, in another order
    measured = report.measurement
    assert (measured.bundle, set(measured.graphs)) == ("tiny/2/d2", {"exit"})
    assert 0 < measured.latency_ms < 100
    assert measured.graphs["exit"].runs >= 5
    assert measured.score_gflops > 0


def test_memory_is_what_the_weights_take(export: Export) -> None:
    """28 bytes for each of a million values of z: once in use, and once more while they load."""
    small = run_trial(export.write(1) / "bundles" / "d2").measurement
    large = run_trial(export.write(2, width=1_000_000) / "bundles" / "d2").measurement
    weights = 28_000_000
    assert weights < large.memory_bytes - small.memory_bytes < 3.5 * weights
    # a page or two apart: the peak of the process is read twice
    assert large.graphs["exit"].memory_bytes == pytest.approx(large.memory_bytes, rel=0.01)


def test_golden_answers_that_differ_in_the_last_digits_pass(export: Export) -> None:
    folder = export.write(1, golden_error=1e-6) / "bundles" / "d2"
    assert 0 < check_golden(folder).difference < 1e-4


@pytest.mark.parametrize("sabotage", [garbage, huge_tensor, other_weights])
def test_bad_bundle_is_quarantined_and_the_old_one_runs_on(
    depot: Depot, export: Export, state: Path, sabotage: Sabotage
) -> None:
    """FAULTS row 5."""
    depot.repository.publish_bundles(export.write(1))
    assert update(state, "tiny/1/d2").status == "installed"
    depot.repository.publish_bundles(export.write(2, model=sabotage))

    first = update(state, "tiny/2/d2")

    assert first.status == "refused"
    assert "trial" in first.reason
    store = BundleStore(state)
    assert store.active().manifest.bundle == "tiny/1/d2"
    # no later update fetches and tries it again
    depot.served.clear()
    again = update(state, "tiny/2/d2")
    assert again.status == "refused"
    assert "failed on this device before" in again.reason
    assert depot.sent(".onnx") == 0


def test_manifest_for_a_newer_splitedge_is_refused_for_now(
    depot: Depot, export: Export, state: Path
) -> None:
    folder = export.write(1)
    depot.repository.publish_bundles(folder)
    assert update(state, "tiny/1/d2").status == "installed"
    folder = export.write(2)
    depot.repository.publish_bundles(folder)
    (path,) = depot.repository.targets_folder.rglob("2/d2/*manifest.json")
    newer = path.read_bytes().replace(b'"format": 1', b'"format": 9')
    with depot.repository.locked():
        metadata = depot.repository.metadata.load()
        target = metadata.targets.signed.targets["bundles/tiny/2/d2/manifest.json"]
        digest = hashlib.sha256(newer).hexdigest()
        target.hashes["sha256"] = digest
        depot.repository.metadata.release(metadata, targets=True, snapshot=True)
    path.with_name(f"{digest}.manifest.json").write_bytes(newer)

    outcome = update(state, "tiny/2/d2")

    assert outcome.status == "refused"
    assert "update splitedge" in outcome.reason
    assert not (state / "quarantine.json").exists()  # a newer splitedge will take it
    assert BundleStore(state).active().manifest.bundle == "tiny/1/d2"


def test_a_trial_that_the_system_kills_is_short_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it may be tried again later: the kernel's killer took it, not a fault of its own."""
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -KILL $$\n")
    killed.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(killed))
    with pytest.raises(OutOfMemoryError, match="killed by SIGKILL"):
        run_trial(tmp_path)
