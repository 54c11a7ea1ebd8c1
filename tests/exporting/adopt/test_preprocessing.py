"""What is folded in front of a model equals numpy's and onnxruntime's own arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from exporters.adopt.classifier import load_classifier
from exporters.adopt.graph.cuts import find_cuts
from exporters.adopt.graph.graph import part
from exporters.adopt.graph.preprocess import Preprocessing
from exporters.adopt.graph.split import difference, open_session
from exporters.errors import ExportError

Array = NDArray[Any]
Make = Callable[..., Path]


@pytest.fixture
def colours(make_graph: Make) -> Path:
    """A classifier of (3, 6, 8) pictures."""
    return _colours(make_graph)


def _colours(make_graph: Make, *, last: bool = False) -> Path:
    return _convolutional(make_graph, (3, 6, 8), (3, 3), last=last)


def _convolutional(
    make_graph: Make, shape: tuple[int, ...], kernel: tuple[int, ...], *, last: bool
) -> Path:
    """A classifier of inputs of that shape, channels first, which it may take last."""
    random = np.random.default_rng(0)
    weights = {
        "w": random.normal(0, 0.2, (4, shape[0], *kernel)).astype(np.float32),
        "v": random.normal(0, 0.2, (4, 5)).astype(np.float32),
    }
    axes = len(shape)
    first = [helper.make_node("Transpose", ["x"], ["t"], perm=[0, axes, *range(1, axes)])]
    nodes = [
        *(first if last else []),
        helper.make_node("Conv", ["t" if last else "x", "w"], ["c"]),
        helper.make_node("Relu", ["c"], ["h"]),
        helper.make_node("GlobalAveragePool", ["h"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["y"]),
    ]
    given = ("n", *shape[1:], shape[0]) if last else ("n", *shape)
    return make_graph(nodes, weights=weights, given=given, made=("n", 5))


def answers(path: Path, x: Array, options: Preprocessing) -> Array:
    """The logits of the adopted graph, preprocessing and all, for a batch."""
    graph = load_classifier(path, options).graph
    model = part(graph, ("x", graph.input), {"logits": graph.output}, batch=None)
    session = open_session(model)
    assert session.inputs["x"] == x.dtype
    return session.run(None, {"x": x})[0]


def oracle(path: Path, x: Array) -> Array:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    result: Array = session.run(None, {"x": x.astype(np.float32)})[0]
    return result


def pictures(shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(1).integers(0, 256, (4, *shape)).astype(np.uint8)


def test_without_options_x_is_the_models_own_input(colours: Path) -> None:
    classifier = load_classifier(colours, Preprocessing())
    assert (classifier.raw.dtype, classifier.raw.shape) == ("float32", (3, 6, 8))
    assert classifier.graph.preamble == 0


def test_mean_and_deviation_of_each_channel(colours: Path) -> None:
    x = pictures((3, 6, 8))
    mean, std = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
    expected = (x - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    given = answers(colours, x, Preprocessing(input="uint8", mean=mean, std=std))
    assert difference(oracle(colours, expected), given) <= 1e-5


def test_pixels_stay_0_to_255_without_mean(colours: Path) -> None:
    x = pictures((3, 6, 8))
    given = answers(colours, x, Preprocessing(input="uint8"))
    assert difference(oracle(colours, x), given) <= 1e-5


def test_one_number_is_for_all_channels(colours: Path) -> None:
    x = pictures((3, 6, 8)).astype(np.float32)
    given = answers(colours, x, Preprocessing(mean=(0.0,), std=(255.0,)))
    assert difference(oracle(colours, x / 255), given) <= 1e-5


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("resize", [None, (12, 16)])
def test_layout_and_size_of_raw_pictures(
    make_graph: Make, layout: Any, last: bool, resize: tuple[int, int] | None
) -> None:
    path = _colours(make_graph, last=last)
    height, width = resize or (6, 8)
    shape = (3, height, width) if layout == "nchw" else (height, width, 3)
    options = Preprocessing(
        input="uint8", layout=layout, resize=resize, mean=(1.0, 2.0, 3.0), std=(2.0, 3.0, 4.0)
    )
    assert load_classifier(path, options).raw.shape == shape
    x = pictures(shape)
    first = (x if layout == "nchw" else x.transpose(0, 3, 1, 2)).astype(np.float32)
    if resize is not None:  # at half the size a bilinear sample lies between four pixels
        first = first.reshape(4, 3, 6, 2, 8, 2).mean(axis=(3, 5))
    first = (first - np.reshape([1, 2, 3], (3, 1, 1))) / np.reshape([2, 3, 4], (3, 1, 1))
    expected = oracle(path, first.transpose(0, 2, 3, 1) if last else first)
    assert difference(expected, answers(path, x, options)) <= 1e-5


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_windows_are_turned_for_a_model_of_the_other_order(make_graph: Make, layout: Any) -> None:
    """Tables and sensors give (channels, steps); Keras' networks take (steps, channels)."""
    last = layout == "nchw"  # the model's channels
    path = _convolutional(make_graph, (3, 16), (5,), last=last)
    options = Preprocessing(layout=layout, mean=(1.0, 2.0, 3.0), std=(2.0, 3.0, 4.0))
    shape = (3, 16) if last else (16, 3)
    assert load_classifier(path, options).raw.shape == shape
    x = pictures(shape).astype(np.float32)
    channels_last = x.transpose(0, 2, 1) if last else x
    scaled = (channels_last - np.array([1, 2, 3])) / np.array([2, 3, 4])
    expected = oracle(path, scaled if last else scaled.transpose(0, 2, 1))
    assert difference(expected, answers(path, x, options)) <= 1e-5


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("layout", [None, "nchw", "nhwc"])
def test_number_of_means_tells_the_channels_of_a_window(
    make_graph: Make, layout: Any, *, last: bool
) -> None:
    path = _convolutional(make_graph, (3, 16), (5,), last=last)
    options = Preprocessing(layout=layout, mean=(1.0, 2.0, 3.0), std=(2.0, 3.0, 4.0))
    x_last = last if layout is None else layout == "nhwc"
    shape = (16, 3) if x_last else (3, 16)
    assert load_classifier(path, options).raw.shape == shape
    x = pictures(shape).astype(np.float32)
    scaled = ((x if x_last else x.transpose(0, 2, 1)) - np.array([1, 2, 3])) / np.array([2, 3, 4])
    expected = oracle(path, scaled if last else scaled.transpose(0, 2, 1))
    assert difference(expected, answers(path, x, options)) <= 1e-5


def test_means_that_do_not_tell_the_channels_of_a_window(make_graph: Make) -> None:
    path = _convolutional(make_graph, (3, 16), (5,), last=False)
    with pytest.raises(ExportError, match=r"one a channel: 3 or 16 for windows of .*, got 5"):
        load_classifier(path, Preprocessing(mean=(0.0,) * 5, std=(1.0,)))
    square = _convolutional(make_graph, (8, 8), (5,), last=False)
    means = Preprocessing(mean=(0.0,) * 8, std=(1.0,))
    with pytest.raises(ExportError, match=r"windows of \(8, 8\) do not show .* --preprocess FILE"):
        load_classifier(square, means)
    assert load_classifier(square, replace(means, layout="nhwc")).raw.shape == (8, 8)


def test_graph_of_the_users_own(colours: Path, make_graph: Make) -> None:
    half = np.array(0.5, np.float32)
    nodes = [
        helper.make_node("Cast", ["x"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["float"], ["first"], perm=[0, 3, 1, 2]),
        helper.make_node("Mul", ["first", "half"], ["y"]),
    ]
    before = make_graph(
        nodes,
        "before.onnx",
        weights={"half": half},
        given=("n", 6, 8, 3),
        made=("n", 3, 6, 8),
        opset=14,
        kinds=(TensorProto.UINT8, TensorProto.FLOAT),
    )
    x = pictures((6, 8, 3))
    given = answers(colours, x, Preprocessing(graph=before))
    assert difference(oracle(colours, x.transpose(0, 3, 1, 2) * half), given) <= 1e-5


def test_cuts_are_those_of_the_model(colours: Path) -> None:
    options = Preprocessing(input="uint8", mean=(1.0,), std=(2.0,), resize=(12, 16))
    plain = find_cuts(load_classifier(colours).graph)
    folded = find_cuts(load_classifier(colours, options).graph)
    names = [(cut.depth, cut.tensor) for cut in plain.cuts]
    assert [(cut.depth, cut.tensor) for cut in folded.cuts] == names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (1.0,)}, "--mean and --std together"),
        ({"mean": (1.0,), "std": (0.0,)}, "deviations above 0"),
        ({"mean": (1.0, 2.0), "std": (1.0, 2.0)}, "--mean: expected 1 or 3 numbers"),
        ({"graph": Path("pre.onnx"), "input": "uint8"}, "got both"),
        ({"graph": Path("nowhere.onnx")}, "nowhere.onnx: expected an ONNX file"),
    ],
)
def test_options_that_do_not_fit(colours: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        load_classifier(colours, Preprocessing(**options))


def test_layout_of_what_is_no_picture(make_graph: Make) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("MatMul", ["h", "v"], ["y"]),
    ]
    weights = {"w": np.ones((7, 6), np.float32), "v": np.ones((6, 3), np.float32)}
    path = make_graph(nodes, weights=weights, given=("n", 7), made=("n", 3))
    with pytest.raises(ExportError, match="are for pictures"):
        load_classifier(path, Preprocessing(layout="nhwc"))


def test_graph_of_the_users_own_that_makes_something_else(colours: Path, make_graph: Make) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    before = make_graph(nodes, "before.onnx", given=("n", 3, 5, 5), made=("n", 3, 5, 5))
    with pytest.raises(ExportError, match=r"expected its output to be the model's input"):
        load_classifier(colours, Preprocessing(graph=before))
