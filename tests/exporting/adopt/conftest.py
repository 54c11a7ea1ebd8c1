"""Small ONNX classifiers: trained ones by torch.onnx, odd ones node by node."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch import nn

from edge_sdk.training.data.load import Dataset

Array = NDArray[Any]


class Small(nn.Module):
    """A user's own network: it normalises nothing and knows nothing of exits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.end = nn.Sequential(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.body(x))  # type: ignore[no-any-return]  # torch types modules as Any


def export(module: nn.Module, example: torch.Tensor, path: Path, *, batch: bool = True) -> Path:
    """A module as a user's torch would write it."""
    shapes = ({0: torch.export.Dim("b", min=1, max=256)},) if batch else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module.eval(),
            (example,),
            dynamo=True,
            verbose=False,
            input_names=["image"],
            output_names=["scores"],
            dynamic_shapes=shapes,
        )
    assert program is not None
    program.save(str(path))
    return path


def export_by_torchscript(module: nn.Module, example: torch.Tensor, path: Path) -> Path:
    """A module as the exporter of older files writes it, with an open batch axis."""
    axes = {"image": {0: "b"}, "scores": {0: "b"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            (example,),
            str(path),
            dynamo=False,
            input_names=["image"],
            output_names=["scores"],
            dynamic_axes=axes,
        )
    return path


@pytest.fixture(scope="session")
def small(digits: Dataset) -> nn.Module:
    """Trained on the digits for a second or two."""
    torch.manual_seed(0)
    net = Small().train()
    x, y = torch.from_numpy(np.array(digits.x_train)), torch.from_numpy(np.array(digits.y_train))
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(6):
        for rows in torch.split(torch.randperm(len(y)), 64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]  # untyped in torch
            optimiser.step()
    return net.eval()


@pytest.fixture(scope="session")
def small_onnx(small: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained network as a file with an open batch axis."""
    return export(small, torch.zeros(2, 1, 8, 8), tmp_path_factory.mktemp("small") / "small.onnx")


@pytest.fixture(scope="session")
def unlabelled(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits without any label."""
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    np.savez(path, x_train=digits.x_train, x_test=digits.x_test)
    return path


def build(
    nodes: Sequence[NodeProto],
    path: Path,
    *,
    given: Sequence[int | str] = ("n", 1, 8, 8),
    made: Sequence[int | str] = ("n", 10),
    weights: dict[str, Array] | None = None,
    opset: int = 17,
    more_inputs: Sequence[Any] = (),
    more_domains: Sequence[Any] = (),
    kinds: tuple[int, int] = (TensorProto.FLOAT, TensorProto.FLOAT),
) -> Path:
    """A graph from `x` to `y`, node by node."""
    held = [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()]
    graph = helper.make_graph(
        list(nodes),
        "user",
        [helper.make_tensor_value_info("x", kinds[0], list(given)), *more_inputs],
        [helper.make_tensor_value_info("y", kinds[1], list(made))],
        held,
    )
    domains = [helper.make_opsetid("", opset), *more_domains]
    model = helper.make_model(graph, opset_imports=domains, ir_version=8)
    onnx.save(model, path)
    return path


def convolution(seed: int = 0) -> tuple[list[NodeProto], dict[str, Array]]:
    """`x` (1, 8, 8) -> conv -> relu `h` (4, 8, 8) -> flat -> `scores` (10)."""
    random = np.random.default_rng(seed)
    weights = {
        "w": random.normal(0, 0.4, (4, 1, 3, 3)).astype(np.float32),
        "v": random.normal(0, 0.1, (256, 10)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["h"]),
        helper.make_node("Flatten", ["h"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["scores"]),
    ]
    return nodes, weights


def statically_quantised(seed: int = 0) -> tuple[list[NodeProto], dict[str, Array]]:
    """`x` (1, 8, 8) -> four convolutions and a dense layer with pairs of QuantizeLinear and
    DequantizeLinear between them, around weights too -> `y` (10) in steps of 0.05.
    """
    random = np.random.default_rng(seed)
    nodes: list[NodeProto] = []
    weights: dict[str, Array] = {}

    def pair(name: str, scale: float, zero: int, made: str) -> None:
        weights[f"{name}_s"] = np.array(scale, np.float32)
        weights[f"{name}_z"] = np.array(zero, np.uint8)
        for kind, given, to in (("Quantize", name, f"{name}_q"), ("Dequantize", f"{name}_q", made)):
            around = [given, f"{name}_s", f"{name}_z"]
            nodes.append(helper.make_node(f"{kind}Linear", around, [to]))

    def layer(name: str, *shape: int) -> None:
        weights[f"{name}_q"] = random.integers(-127, 128, shape).astype(np.int8)
        # values of deviation 1 stay of about that size
        scale = 1.7 / (73 * np.sqrt(np.prod(shape[1:])))
        weights[f"{name}_s"] = np.array(scale, np.float32)
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", f"{name}_s"], [name]))

    pair("x", 8 / 255, 128, "d0")
    for place, (given, wide) in enumerate(((1, 16), (16, 32), (32, 32), (32, 32)), start=1):
        layer(f"w{place}", wide, given, 3, 3)
        weights[f"b{place}"] = random.normal(0, 0.2, wide).astype(np.float32)
        convolved = [f"d{place - 1}", f"w{place}", f"b{place}"]
        nodes.append(helper.make_node("Conv", convolved, [f"c{place}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"c{place}"], [f"r{place}"]))
        pair(f"r{place}", 6 / 255, 0, f"d{place}")
    layer("v", 10, 32 * 64)
    nodes.append(helper.make_node("Flatten", ["d4"], ["f"]))
    nodes.append(helper.make_node("Gemm", ["f", "v"], ["scores"], transB=1))
    pair("scores", 0.05, 128, "y")
    return nodes, weights


def dynamically_quantised(seed: int = 0) -> tuple[list[NodeProto], dict[str, Array]]:
    """`x` (1, 8, 8) -> three layers of int8 weights, 64 to 16 to 64 to 10, as onnxruntime's
    `quantize_dynamic` writes them: each measures the range of what it is given.
    """
    random = np.random.default_rng(seed)
    nodes = [helper.make_node("Flatten", ["x"], ["h0"])]
    weights: dict[str, Array] = {"zero": np.array(0, np.int8), "scale": np.array(0.01, np.float32)}
    for layer, size in ((1, (64, 16)), (2, (16, 64)), (3, (64, 10))):
        weights[f"w{layer}"] = random.integers(-60, 60, size).astype(np.int8)
        q, s, z, m, c, f = (f"{letter}{layer}" for letter in "qszmcf")
        made = "y" if layer == 3 else f"a{layer}"
        nodes += [
            helper.make_node("DynamicQuantizeLinear", [f"h{layer - 1}"], [q, s, z]),
            helper.make_node("MatMulInteger", [q, f"w{layer}", z, "zero"], [m]),
            helper.make_node("Cast", [m], [c], to=TensorProto.FLOAT),
            helper.make_node("Mul", [s, "scale"], [f]),
            helper.make_node("Mul", [c, f], [made]),
            helper.make_node("Relu", [made], [f"h{layer}"]),
        ]
    return nodes[:-1], weights


def recurrent(kind: str, seed: int = 0) -> tuple[list[NodeProto], dict[str, Array]]:
    """`x` (8, 8), 8 steps of 8 values -> LSTM, GRU or RNN -> its last state `h` (16) -> dense ->
    relu `e` (32) -> `y` (10). The state itself, `states`, is (directions, batch, 16).
    """
    random = np.random.default_rng(seed)
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    sizes = {"w": (1, 16 * gates, 8), "r": (1, 16 * gates, 16), "v": (16, 32), "u": (32, 10)}
    weights = {name: random.normal(0, 0.3, size).astype(np.float32) for name, size in sizes.items()}
    weights["first"] = np.array([0], np.int64)
    nodes = [
        helper.make_node("Transpose", ["x"], ["steps"], perm=[1, 0, 2]),
        helper.make_node(kind, ["steps", "w", "r"], ["", "states"], hidden_size=16),
        helper.make_node("Squeeze", ["states", "first"], ["h"]),
        helper.make_node("MatMul", ["h", "v"], ["d"]),
        helper.make_node("Relu", ["d"], ["e"]),
        helper.make_node("MatMul", ["e", "u"], ["y"]),
    ]
    return nodes, weights


def recurrence(kind: str, seed: int = 0) -> tuple[list[NodeProto], dict[str, Array]]:
    """`x` (8, 8), 8 steps of 8 values -> a Loop or Scan with the weights `a` and `u` of the graph
    around it -> its last state `h` (8) -> dense -> relu `r` (16) -> `y` (10).
    """
    random = np.random.default_rng(seed)
    sizes = {"a": (8, 8), "u": (8, 8), "e": (8, 16), "v": (16, 10)}
    weights = {name: random.normal(0, 0.3, size).astype(np.float32) for name, size in sizes.items()}
    step = [
        helper.make_node("MatMul", ["step", "a"], ["given"]),
        helper.make_node("MatMul", ["old", "u"], ["kept"]),
        helper.make_node("Add", ["given", "kept"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["new"]),
    ]
    old, one, new = (_info(name, TensorProto.FLOAT, None) for name in ("old", "step", "new"))
    if kind == "Scan":
        body = helper.make_graph(step, "body", [old, one], [new])
        last = helper.make_node("Scan", ["start", "steps"], ["h"], body=body, num_scan_inputs=1)
    else:
        weights |= {"count": np.array(8), "go": np.array(True)}
        place, on = _info("i", TensorProto.INT64, []), _info("on", TensorProto.BOOL, [])
        more = _info("more", TensorProto.BOOL, [])
        step.insert(0, helper.make_node("Gather", ["steps", "i"], ["step"], axis=0))
        step.append(helper.make_node("Identity", ["on"], ["more"]))
        body = helper.make_graph(step, "body", [place, on, old], [more, new])
        last = helper.make_node("Loop", ["count", "go", "start"], ["h"], body=body)
    nodes = [
        helper.make_node("Transpose", ["x"], ["steps"], perm=[1, 0, 2]),
        helper.make_node("ReduceMean", ["x"], ["start"], axes=[1], keepdims=0),
        last,
        helper.make_node("MatMul", ["h", "e"], ["m"]),
        helper.make_node("Relu", ["m"], ["r"]),
        helper.make_node("MatMul", ["r", "v"], ["y"]),
    ]
    return nodes, weights


def _info(name: str, kind: int, shape: Sequence[int] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


@pytest.fixture
def make_graph(tmp_path: Path) -> Callable[..., Path]:
    """Writes a graph into a file."""

    def make(nodes: Sequence[NodeProto], name: str = "user.onnx", **more: Any) -> Path:
        return build(nodes, tmp_path / name, **more)

    return make


@pytest.fixture(name="convolution")
def _convolution() -> tuple[list[NodeProto], dict[str, Array]]:
    return convolution()
