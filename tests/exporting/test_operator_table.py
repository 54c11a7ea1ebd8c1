from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from torch.onnx._internal.exporter import _registration

from edge_sdk.manifest import TensorSpec
from edge_sdk.nets import build
from exporters.graphs import shared_exit, write_device_graphs
from exporters.operator_table import operators_read_once


def test_table_is_read_once_inside_the_block_and_anew_outside() -> None:
    read = _registration.ONNXRegistry.from_torchlib
    with operators_read_once():
        first = _registration.ONNXRegistry.from_torchlib(opset_version=20)
        assert _registration.ONNXRegistry().from_torchlib(opset_version=20) is first
        assert _registration.ONNXRegistry.from_torchlib(opset_version=19) is not first
    assert read == _registration.ONNXRegistry.from_torchlib
    assert _registration.ONNXRegistry.from_torchlib(opset_version=20) is not first


def test_graph_of_a_kept_table_computes_what_torch_computes(tmp_path: Path) -> None:
    net = build("tiny", seed=0).eval()
    x = torch.from_numpy(np.random.default_rng(0).random((1, 1, 8, 8), np.float32))
    for depth in (1, 2):  # the second graph is made with the table of the first
        graphs = shared_exit(net, depth)
        folder = tmp_path / str(depth)
        folder.mkdir()
        write_device_graphs(graphs, TensorSpec("float32", (1, 8, 8)), folder)
        logits, _ = ort.InferenceSession(folder / "exit.onnx").run(None, {"x": x.numpy()})
        with torch.no_grad():
            expected = graphs.exit.eval()(x)[0].numpy()
        np.testing.assert_allclose(logits, expected, atol=1e-5)
