from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from edge_sdk.manifest import GateSpec, GraphSpec, TensorSpec
from exporters.errors import ParityError
from exporters.parity import (
    DeviceRun,
    ParityReport,
    choose_codec,
    compare,
    require_back,
    require_fp32,
    require_int8,
    require_segments,
    run_torch,
)


def report(**changed: Any) -> ParityReport:
    fields: dict[str, Any] = {
        "samples": 1000,
        "max_logit_error": 0.0,
        "label_changes": 0,
        "gate_changes": 0,
        "offload_changes": {"int8": 0},
    } | changed
    return ParityReport(**fields)


def damage(path: Path, suffix: str, by: float) -> None:
    """Move one weight of a graph."""
    model = onnx.load(path)
    weight = next(item for item in model.graph.initializer if item.name.endswith(suffix))
    values = onnx.numpy_helper.to_array(weight).copy()
    values.flat[0] += by
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(model, path)


@pytest.fixture
def copied(tiny_tree: Any, tmp_path: Path) -> Path:
    shutil.copytree(tiny_tree.folder, tmp_path / "tree")
    return tmp_path / "tree"


def test_report_counts_by_hand() -> None:
    # entropies: sure, sure, even (ln 2 = 0.69); at threshold 0.5 the third stays
    reference = np.array([[9.0, 0.0], [0.0, 9.0], [1.0, 1.0]], np.float32)
    # the second changes its label, the third its side of the gate
    logits = np.array([[9.0, 0.25], [9.0, 0.0], [9.0, 0.0]], np.float32)
    counted = compare(reference, logits, GateSpec("entropy", 0.5), {"fp16": 1})
    assert counted == ParityReport(3, 9.0, 1, 1, {"fp16": 1})


def test_fp32_passes_up_to_a_ten_thousandth() -> None:
    require_fp32(report(max_logit_error=1e-4), "d2")
    with pytest.raises(ParityError, match=r"d2: expected logits within 0\.0001"):
        require_fp32(report(max_logit_error=1.1e-4), "d2")


@pytest.mark.parametrize("counted", ["label_changes", "gate_changes"])
def test_fp32_is_held_to_its_answers_too(counted: str) -> None:
    require_fp32(report(**{counted: 5}), "d2")
    with pytest.raises(ParityError, match="at most 5 of 1000 samples to change, got 6"):
        require_fp32(report(**{counted: 6}), "d2")


def test_nan_never_passes() -> None:
    reference = np.zeros((4, 3), np.float32)
    logits = np.full((4, 3), np.nan, np.float32)
    with pytest.raises(ParityError, match="nan"):
        require_fp32(compare(reference, logits, GateSpec("entropy", 0.5), {}), "d2")


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"label_changes": 6}, "6 labels"),
        ({"gate_changes": 6}, "6 sides of the gate"),
        ({"offload_changes": {"int8": 6}}, "6 final labels"),
    ],
)
def test_int8_may_change_half_a_percent(changed: dict[str, Any], what: str) -> None:
    fine = {key: 5 if isinstance(value, int) else {"int8": 5} for key, value in changed.items()}
    require_int8(report(**fine), "int8", "d2-int8")
    with pytest.raises(ParityError, match=f"at most 5 of 1000 samples to change, got {what}"):
        require_int8(report(**changed), "int8", "d2-int8")


def test_int8_behind_a_bottleneck_may_change_what_the_bottleneck_may() -> None:
    lost = report(offload_changes={"int8": 20})
    require_int8(lost, "int8", "d2-int8", final_at_most=0.02)
    with pytest.raises(ParityError, match="at most 19 of 1000 samples to change, got 20 final"):
        require_int8(lost, "int8", "d2-int8", final_at_most=0.0195)
    with pytest.raises(ParityError, match="at most 5 of 1000 samples to change, got 6 labels"):
        require_int8(report(label_changes=6), "int8", "d2-int8", final_at_most=0.02)


def test_few_samples_allow_no_change() -> None:
    # 0.5 % of 199 is less than one sample
    with pytest.raises(ParityError, match="at most 0 of 199"):
        require_int8(report(samples=199, label_changes=1), "int8", "d2-int8")


def test_damaged_weight_of_a_bundle_is_refused(tiny_tree: Any, copied: Path) -> None:
    x = tiny_tree.data.x_test[:50]
    with torch.no_grad():
        exits, _ = tiny_tree.net.eval().forward_exits(torch.from_numpy(x))
    folder, graphs = copied / "bundles" / "d2", tiny_tree.bundle("d2").graphs
    logits, _ = DeviceRun(folder, graphs)(x)
    require_fp32(compare(exits[2].numpy(), logits, GateSpec("entropy", 0.5), {}), "d2")
    damage(folder / "exit.onnx", "stage1.0.weight", by=0.01)
    logits, _ = DeviceRun(folder, graphs)(x)
    with pytest.raises(ParityError, match="d2"):
        require_fp32(compare(exits[2].numpy(), logits, GateSpec("entropy", 0.5), {}), "d2")


@pytest.mark.parametrize(
    ("file", "weight"), [("0-2.onnx", "stage1.0.weight"), ("2-4.onnx", "stage3.0.bias")]
)
def test_damaged_segment_is_refused(tiny_tree: Any, copied: Path, file: str, weight: str) -> None:
    net, x = tiny_tree.net.eval(), tiny_tree.data.x_test[:50]
    with torch.no_grad():
        reference = net(torch.from_numpy(x)).numpy()

    def prefix(depth: int, x: Any) -> Any:
        return run_torch(net.prefix(depth), x)[0]

    folder, segments = copied / "segments", tiny_tree.manifest.segments
    assert require_segments(folder, segments, prefix, x, lambda _: reference) < 1e-4
    damage(folder / file, weight, by=0.05)
    with pytest.raises(ParityError, match="segments from 0"):
        require_segments(folder, segments, prefix, x, lambda _: reference)


def test_damaged_back_is_refused(tmp_path: Path) -> None:
    class Back(nn.Module):
        """What a `back` graph of ONNX's own making is held against."""

        def __init__(self, slope: float) -> None:
            super().__init__()
            self.slope = slope

        def forward(self, features: Tensor) -> Tensor:
            return self.slope * features

    make = onnx.helper
    tensors = [
        make.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 3])
        for name in ("features", "logits")
    ]
    two = onnx.numpy_helper.from_array(np.array(2.0, np.float32), "two")
    node = make.make_node("Mul", ["features", "two"], ["logits"])
    graph = make.make_graph([node], "back", tensors[:1], tensors[1:], [two])
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "back.onnx")
    spec = TensorSpec("float32", (3,))
    described = GraphSpec("back.onnx", "fp32", {"features": spec}, {"logits": spec})
    require_back(tmp_path, described, Back(2.0))
    with pytest.raises(ParityError, match=r"back\.onnx"):
        require_back(tmp_path, described, Back(2.001))


class Compare(nn.Module):
    """Logits are the last two numbers of z: the label says which is larger."""

    def forward(self, z: Tensor) -> Tensor:
        return z[:, 1:]


@pytest.mark.parametrize(
    ("apart", "codec"),
    [
        (1.0, "int8"),  # steps of int8 over 0..100 are 0.39
        (0.1, "fp16"),  # at 50, steps of fp16 are 0.03
        (0.001, "fp32"),
    ],
)
def test_codec_is_the_cheapest_that_keeps_the_final_labels(apart: float, codec: str) -> None:
    z = np.array([[100.0, 50.0, 50.0 + apart]] * 4, np.float32)
    chosen, tried = choose_codec(z, lambda z: run_torch(Compare(), z)[0], np.ones(4, int))
    changes = {each.codec: each.changes for each in tried}
    assert chosen == codec
    assert changes[chosen] == 0
    assert all(each.changes == 4 for each in tried if each.codec != codec)
