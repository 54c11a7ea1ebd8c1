"""Graphs that cannot be adopted: the sentence names the tensor or node that stands in the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from exporters.adopt.classifier import load_classifier
from exporters.adopt.graph.cuts import find_cuts
from exporters.adopt.graph.graph import part
from exporters.adopt.graph.preprocess import Preprocessing
from exporters.errors import ExportError
from tests.exporting.adopt.conftest import recurrent

Make = Callable[..., Path]
Convolution = tuple[list[Any], dict[str, Any]]


def refusal(path: Path, **more: Any) -> str:
    with pytest.raises(ExportError) as caught:
        find_cuts(load_classifier(path, **more).graph)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


def test_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "notes.onnx"
    assert "expected an ONNX file there" in refusal(path)
    path.write_bytes(b"\x00\x01 no model \xff" * 9)
    assert "expected an ONNX model" in refusal(path)
    path.write_bytes(b"")
    assert "without any node" in refusal(path)


def test_weights_in_a_file_that_is_missing(make_graph: Make, convolution: Convolution) -> None:
    nodes, weights = convolution
    nodes.append(helper.make_node("Identity", ["scores"], ["y"]))
    path = make_graph(nodes, weights=weights)
    beside = path.with_name("user.onnx.data")
    onnx.save(
        onnx.load(path), path, save_as_external_data=True, location=beside.name, size_threshold=0
    )
    assert load_classifier(path).classes == 10
    beside.unlink()
    assert "put user.onnx.data beside it" in refusal(path)


def test_graph_with_two_inputs(make_graph: Make, convolution: Convolution) -> None:
    nodes, weights = convolution
    mask = helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["n", 10])
    last = helper.make_node("Mul", ["scores", "mask"], ["y"])
    path = make_graph([*nodes, last], weights=weights, more_inputs=[mask])
    text = refusal(path)
    assert "expected one input, got 2" in text
    assert "'x', 'mask'" in text


def test_input_of_words(make_graph: Make) -> None:
    table = np.zeros((30, 10), np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "x"], ["e"]),
        helper.make_node("ReduceMean", ["e"], ["y"], axes=[1], keepdims=0),
    ]
    kinds = (TensorProto.INT64, TensorProto.FLOAT)
    path = make_graph(nodes, weights={"table": table}, given=("n", 7), kinds=kinds)
    assert "input 'x': expected floats or uint8, got int64" in refusal(path)


def test_batch_that_is_fixed_to_eight(make_graph: Make, convolution: Convolution) -> None:
    nodes, weights = convolution
    nodes.append(helper.make_node("Identity", ["scores"], ["y"]))
    path = make_graph(nodes, weights=weights, given=(8, 1, 8, 8), made=(8, 10))
    assert "expected a batch axis of size 1 or open" in refusal(path)


def test_sizes_that_are_open_ask_for_a_shape(make_graph: Make) -> None:
    weights = {"w": np.ones((4, 1, 3, 3), np.float32), "v": np.ones((4, 10), np.float32)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["y"]),
    ]
    path = make_graph(nodes, weights=weights, given=("n", 1, "height", "width"))
    assert "give those of one sample, --shape" in refusal(path)
    assert "--shape 3,8,8" in refusal(path, shape=(3, 8, 8))
    assert load_classifier(path, shape=(1, 8, 12)).raw.shape == (1, 8, 12)


@pytest.mark.parametrize(
    ("kind", "made", "message"),
    [
        ("map", ("n", 4, 8, 8), "expected a classifier's"),
        ("number", ("n", 1), "export two columns, 1 - p and p"),
        ("label", ("n", 1), "expected scores as floats"),
    ],
)
def test_what_is_no_classifier(
    make_graph: Make, convolution: Convolution, kind: str, made: tuple[Any, ...], message: str
) -> None:
    nodes, weights = convolution
    ends = {
        "map": helper.make_node("Sigmoid", ["h"], ["y"]),
        "number": helper.make_node("ReduceMean", ["scores"], ["y"], axes=[1]),
        "label": helper.make_node("ArgMax", ["scores"], ["y"], axis=1),
    }
    used = nodes[:2] if kind == "map" else nodes
    kinds = (TensorProto.FLOAT, TensorProto.INT64 if kind == "label" else TensorProto.FLOAT)
    text = refusal(make_graph([*used, ends[kind]], weights=weights, made=made, kinds=kinds))
    assert "output 'y'" in text
    assert message in text


def test_shape_that_depends_on_the_data(make_graph: Make, convolution: Convolution) -> None:
    nodes, weights = convolution
    more = [
        helper.make_node("NonZero", ["scores"], ["places"], name="find"),
        helper.make_node("Cast", ["places"], ["y"], to=TensorProto.FLOAT),
    ]
    text = refusal(make_graph([*nodes, *more], weights=weights))
    assert "'find' (NonZero, makes 'places')" in text
    assert "depends on the data" in text


def test_names_that_hold_our_own_prefixes_are_shown_whole(make_graph: Make) -> None:
    """`/resnet/head` holds `net/`, which names get in front of them while a file is read."""
    weights = {"w": np.ones((64, 10), np.float32)}
    nodes = [
        helper.make_node("Flatten", ["x"], ["net/f"]),
        helper.make_node("MatMul", ["net/f", "w"], ["/resnet/head"]),
    ]
    label = helper.make_node("ArgMax", ["/resnet/head"], ["y"], name="/resnet/label", axis=1)
    kinds = (TensorProto.FLOAT, TensorProto.INT64)
    text = refusal(make_graph([*nodes, label], weights=weights, made=("n", 1), kinds=kinds))
    assert "node '/resnet/label' (ArgMax, makes 'y')" in text
    places = helper.make_node("NonZero", ["/resnet/head"], ["/resnet/places"])
    last = helper.make_node("Cast", ["/resnet/places"], ["y"], to=TensorProto.FLOAT)
    text = refusal(make_graph([*nodes, places, last], weights=weights))
    assert "node (NonZero, makes '/resnet/places')" in text
    scores = helper.make_node("MatMul", ["net/f", "w"], ["y"])
    graph = load_classifier(make_graph([nodes[0], scores], weights=weights)).graph
    with pytest.raises(ExportError, match=r"from 'y': .* also 'x'; cut"):
        part(graph, ("z", "net/y"), {"early": "net/net/f"}, batch=1)


def test_shape_that_is_computed_from_the_data(make_graph: Make, convolution: Convolution) -> None:
    nodes, weights = convolution
    weights = {**weights, "one": np.array([1], np.int64), "start": np.array([0], np.int64)}
    more = [
        helper.make_node("ReduceMax", ["scores"], ["top"], keepdims=0),
        helper.make_node("Cast", ["top"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Reshape", ["whole", "one"], ["until"]),
        helper.make_node("Slice", ["scores", "start", "until", "one"], ["y"]),
    ]
    text = refusal(make_graph([*nodes, *more], weights=weights))
    assert "(Slice, makes 'y')" in text
    assert "tensor 'until'" in text


def test_graph_that_does_not_run(make_graph: Make) -> None:
    """A file whose own runtime error would be the first to say so: 64 values in rows of 7."""
    weights = {
        "w": np.ones((64, 64), np.float32),
        "seven": np.array([-1, 7]),
        "v": np.ones((7, 10), np.float32),
        "place": np.array([0]),
        "ten": np.array([10]),
        "bias": np.ones((1, 10), np.float32),
    }
    nodes = [
        helper.make_node("Flatten", ["x"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["m"]),
        helper.make_node("Reshape", ["m", "seven"], ["r"]),
        helper.make_node("MatMul", ["r", "v"], ["z"]),
        helper.make_node("Shape", ["r"], ["s"]),
        helper.make_node("Gather", ["s", "place"], ["rows"], axis=0),
        helper.make_node("Concat", ["rows", "ten"], ["sizes"], axis=0),
        helper.make_node("Expand", ["bias", "sizes"], ["b"]),
        helper.make_node("Add", ["z", "b"], ["y"]),
    ]
    assert "the graph does not run on zeros" in refusal(make_graph(nodes, weights=weights))


def test_graph_that_is_never_narrow(make_graph: Make) -> None:
    w = np.ones((4, 1, 3, 3), np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["left"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["x", "w"], ["right"], pads=[2, 2, 2, 2], dilations=[2, 2]),
        helper.make_node("Mul", ["left", "right"], ["c"]),
        helper.make_node("ReduceMean", ["c"], ["y"], axes=[2, 3], keepdims=0),
    ]
    text = refusal(make_graph(nodes, weights={"w": w}, made=("n", 4)))
    assert "cannot be cut" in text
    assert "needed together, 'left', 'x' where they are fewest" in text
    assert "join the branches" in text


def test_graph_of_one_layer(make_graph: Make) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("ReduceMean", ["c"], ["scores"], axes=[2, 3], keepdims=0),
        helper.make_node("Softmax", ["scores"], ["y"]),
    ]
    path = make_graph(nodes, weights={"w": np.ones((4, 1, 3, 3), np.float32)}, made=("n", 4))
    text = refusal(path)
    assert "it has one layer with weights, node (Conv, makes 'c')" in text
    assert "run this file whole" in text
    # what stands in front of the model is no layer of it
    mean = Preprocessing(mean=(1.0,), std=(2.0,))
    assert refusal(path, preprocessing=mean) == text


@pytest.mark.parametrize("maps", [False, True])
def test_trees_have_no_layer(make_graph: Make, *, maps: bool) -> None:
    """A tree of one question, as converters of scikit-learn write it: with maps as scores, unless
    they are told not to. No other export helps.
    """
    made = ["y", "scores"] if maps else ["label", "y"]
    tree = helper.make_node(
        "TreeEnsembleClassifier", ["x"], made, domain="ai.onnx.ml",
        classlabels_int64s=[0, 1], class_ids=[0, 1, 0, 1], class_nodeids=[1, 1, 2, 2],
        class_treeids=[0] * 4, class_weights=[0.9, 0.1, 0.2, 0.8], nodes_falsenodeids=[2, 0, 0],
        nodes_featureids=[0] * 3, nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
        nodes_nodeids=[0, 1, 2], nodes_treeids=[0] * 3, nodes_truenodeids=[1, 0, 0],
        nodes_values=[0.0] * 3, post_transform="NONE",
    )  # fmt: skip
    domains = [helper.make_opsetid("ai.onnx.ml", 3)]
    path = make_graph(
        [tree],
        given=("n", 20),
        made=("n",) if maps else ("n", 2),
        kinds=(TensorProto.FLOAT, TensorProto.INT64 if maps else TensorProto.FLOAT),
        more_domains=domains,
    )
    if maps:
        add_maps(path, "scores", 2)
    text = refusal(path)
    only = "TreeEnsembleClassifier, ZipMap;" if maps else "TreeEnsembleClassifier;"
    assert f"it has no layer with weights, only {only}" in text
    assert "run this file whole" in text


def test_layers_that_give_whole_numbers(make_graph: Make) -> None:
    """Operators of whole numbers, `QuantFormat.QOperator` of onnxruntime."""
    weights = {
        "s": np.array(0.1, np.float32),
        "z": np.array(0, np.uint8),
        "w": np.ones((64, 16), np.uint8),
        "v": np.ones((16, 10), np.uint8),
    }
    around = ["s", "z"]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", *around], ["q"]),
        helper.make_node("Flatten", ["q"], ["f"]),
        helper.make_node("QLinearMatMul", ["f", *around, "w", *around, *around], ["h"]),
        helper.make_node("QLinearMatMul", ["h", *around, "v", *around, *around], ["p"]),
        helper.make_node("DequantizeLinear", ["p", *around], ["y"]),
    ]
    text = refusal(make_graph(nodes, weights=weights))
    assert "no tensor between its layers is float32, 'h' is uint8" in text
    assert "adopt the float model" in text
    assert "--int8 auto" in text


def test_layers_that_give_another_axis_first(make_graph: Make) -> None:
    nodes, weights = recurrent("LSTM")
    # the last layer takes the states with the axis of directions, which is parted from it later
    weights["u"] = weights["u"][:16]
    nodes[2:] = [
        helper.make_node("MatMul", ["states", "u"], ["scores"]),
        helper.make_node("Squeeze", ["scores", "first"], ["y"]),
    ]
    text = refusal(make_graph(nodes, weights=weights, given=("n", 8, 8)))
    assert "'states' is (1, 1, 16) for one sample" in text
    assert "with the batch first" in text


def test_output_that_does_not_depend_on_the_input(make_graph: Make) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["unused"]),
        helper.make_node("Identity", ["w"], ["y"]),
    ]
    path = make_graph(nodes, weights={"w": np.ones((1, 10), np.float32)}, made=(1, 10))
    assert "does not depend on" in refusal(path)


def test_several_outputs_need_a_name(make_graph: Make, convolution: Convolution) -> None:
    nodes, weights = convolution
    path = make_graph([*nodes, helper.make_node("Softmax", ["scores"], ["y"])], weights=weights)
    model = onnx.load(path)
    more = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 10])
    model.graph.output.append(more)
    onnx.save(model, path)
    assert "name it with --output" in refusal(path)
    assert "expected one of 'y', 'scores'" in refusal(path, output="nothing")
    assert load_classifier(path, output="scores").classes == 10


def add_maps(path: Path, scores: str, classes: int) -> None:
    """Put maps from class to score behind the scores of a file, and give them out beside `y`."""
    model = onnx.load(path)
    labels = list(range(classes))
    model.graph.node.append(
        helper.make_node(
            "ZipMap", [scores], ["maps"], domain="ai.onnx.ml", classlabels_int64s=labels
        )
    )
    row = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(1, []))
    kind = helper.make_sequence_type_proto(row)
    model.graph.output.append(helper.make_value_info("maps", kind))
    onnx.save(model, path)


def test_scores_in_a_list_of_maps(make_graph: Make, convolution: Convolution) -> None:
    """As converters of scikit-learn write them unless they are told not to."""
    nodes, weights = convolution
    label = helper.make_node("ArgMax", ["scores"], ["y"], axis=1, keepdims=0)
    path = make_graph(
        [*nodes, label],
        weights=weights,
        made=("n",),
        kinds=(TensorProto.FLOAT, TensorProto.INT64),
        more_domains=[helper.make_opsetid("ai.onnx.ml", 3)],
    )
    add_maps(path, "scores", 10)
    for given in (None, "maps"):
        text = refusal(path, output=given)
        assert "output 'maps'" in text
        assert "skl2onnx with options={'zipmap': False}, onnxmltools with zipmap=False" in text


def test_operator_that_nobody_knows(make_graph: Make) -> None:
    path = make_graph([helper.make_node("Sparkle", ["x"], ["y"])])
    assert "onnxruntime refuses it" in refusal(path)
