"""Graphs in the forms that frameworks write them: the parts give what the whole file gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from edge_sdk.manifest import TensorSpec
from exporters.adopt.classifier import Classifier, checked, load_classifier
from exporters.adopt.graph.cuts import choose_cuts, find_cuts
from exporters.adopt.graph.graph import part
from exporters.adopt.graph.split import difference, open_session, segment_model
from tests.exporting.adopt.conftest import (
    export,
    export_by_torchscript,
    recurrence,
    recurrent,
)

Array = NDArray[Any]
Make = Callable[..., Path]
Convolution = tuple[list[Any], dict[str, Any]]


def inputs(classifier: Classifier, count: int = 8) -> Array:
    random = np.random.default_rng(3)
    return random.normal(size=(count, *classifier.raw.shape)).astype(np.float32)


def whole(path: Path, x: Array) -> Array:
    """The oracle: the file, one sample at a time."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    rows = [session.run(None, {name: x[i : i + 1]})[0] for i in range(len(x))]
    return np.stack(rows).reshape(len(x), -1)


def through_every_cut(classifier: Classifier, x: Array, *, by_sample: bool = False) -> list[Array]:
    """The logits of prefix and suffix at each cut, the batch as a whole."""
    graph = classifier.graph
    found = []
    for cut in find_cuts(graph).cuts:
        first = open_session(segment_model(graph, None, cut, by_sample=by_sample))
        rest = open_session(segment_model(graph, cut, None, by_sample=by_sample))
        (z,) = first.run(None, {"x": x})
        assert z.shape == (len(x), *cut.shape)
        found += rest.run(None, {f"z{cut.depth}": z})
    return found


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: Array = weights / weights.sum(axis=1, keepdims=True)
    return shares


def test_trained_network_is_the_same_at_every_cut(small_onnx: Path) -> None:
    classifier = load_classifier(small_onnx)
    x = inputs(classifier, 32)
    expected = whole(small_onnx, x)
    found = through_every_cut(classifier, x)
    assert len(found) >= 8
    assert max(difference(expected, logits) for logits in found) <= 1e-4
    assert checked(classifier, x).batches


def test_batch_normalisation_is_folded(small_onnx: Path) -> None:
    kinds = {node.op_type for node in load_classifier(small_onnx).graph.nodes}
    assert "BatchNormalization" not in kinds


def test_weights_among_the_inputs_are_weights(make_graph: Make, convolution: Convolution) -> None:
    nodes, weights = convolution
    nodes.append(helper.make_node("Identity", ["scores"], ["y"]))
    listed = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape)
        for name, value in weights.items()
    ]
    path = make_graph(nodes, weights=weights, more_inputs=listed)
    classifier = load_classifier(path)
    x = inputs(classifier)
    assert all(
        difference(whole(path, x), logits) <= 1e-4 for logits in through_every_cut(classifier, x)
    )


@pytest.mark.parametrize("opset", [9, 17])
@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
def test_softmax_gives_its_input_as_logits(
    make_graph: Make, convolution: Convolution, kind: str, opset: int
) -> None:
    nodes, weights = convolution
    nodes.append(helper.make_node(kind, ["scores"], ["y"], axis=1))
    path = make_graph(nodes, weights=weights, opset=opset)
    classifier = load_classifier(path)
    x = inputs(classifier)
    for logits in through_every_cut(checked(classifier, x), x):
        given = softmax(logits) if kind == "Softmax" else np.log(softmax(logits))
        assert difference(whole(path, x), given) <= 1e-4
    assert np.abs(logits).max() > 1.5  # no probabilities


@pytest.mark.parametrize("end", ["column", "axis", "before", "behind"])
def test_sigmoid_of_one_value_is_a_classifier_of_two_classes(
    make_graph: Make, convolution: Convolution, end: str
) -> None:
    """The usual end of Keras (batch, 1), and those of torch with a squeeze (batch): of that axis,
    or of all axes of size 1, that of the batch too if it is 1.
    """
    nodes, weights = convolution
    weights = {**weights, "v": weights["v"][:, :1], "last": np.array([1])}
    ends = {
        "column": [helper.make_node("Sigmoid", ["scores"], ["y"])],
        "axis": [
            helper.make_node("Squeeze", ["scores", "last"], ["s"]),
            helper.make_node("Sigmoid", ["s"], ["y"]),
        ],
        "before": [
            helper.make_node("Squeeze", ["scores"], ["s"]),
            helper.make_node("Sigmoid", ["s"], ["y"]),
        ],
        "behind": [
            helper.make_node("Sigmoid", ["scores"], ["s"]),
            helper.make_node("Squeeze", ["s"], ["y"]),
        ],
    }
    made = ("n", 1) if end == "column" else ("n",)
    path = make_graph([*nodes, *ends[end]], weights=weights, made=made)
    classifier = load_classifier(path)
    assert classifier.classes == 2
    x = inputs(classifier)
    ready = checked(classifier, x)
    assert ready.batches
    p = whole(path, x)
    for logits in through_every_cut(ready, x):
        np.testing.assert_allclose(softmax(logits), np.hstack([1 - p, p]), atol=1e-6)


@pytest.mark.parametrize("end", ["scores", "probabilities", "row"])
def test_scores_without_a_batch_axis_at_batch_one(make_graph: Make, end: str) -> None:
    """`conv(x).squeeze()` in torch, and a file of one sample that gives its row alone."""
    random = np.random.default_rng(0)
    weights = {
        "w": random.normal(size=(4, 1, 3, 3)).astype(np.float32),
        "v": random.normal(size=(10, 4, 1, 1)).astype(np.float32),
        "first": np.array(0),
    }
    ends = {
        "scores": [helper.make_node("Squeeze", ["p"], ["y"])],
        "probabilities": [
            helper.make_node("Squeeze", ["p"], ["s"]),
            helper.make_node("Softmax", ["s"], ["y"], axis=-1),
        ],
        "row": [
            helper.make_node("Flatten", ["p"], ["f"]),
            helper.make_node("Gather", ["f", "first"], ["y"], axis=0),
        ],
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Relu", ["c"], ["h"]),
        helper.make_node("Conv", ["h", "v"], ["m"]),
        helper.make_node("GlobalAveragePool", ["m"], ["p"]),
        *ends[end],
    ]
    given: tuple[int | str, ...] = (1 if end == "row" else "n", 1, 8, 8)
    path = make_graph(
        nodes, weights=weights, given=given, made=(10,) if end == "row" else ("n", 10)
    )
    classifier = load_classifier(path)
    assert classifier.classes == 10
    x = inputs(classifier)
    ready = checked(classifier, x)
    assert ready.batches == (end != "row")
    expected = whole(path, x)
    for logits in through_every_cut(ready, x, by_sample=not ready.batches):
        got = softmax(logits) if end == "probabilities" else logits
        assert difference(expected, got) <= 1e-4


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.DOUBLE])
def test_a_graph_of_another_float_is_computed_in_float32(make_graph: Make, kind: int) -> None:
    """Weights, a constant, and a cast to and fro, as converters leave them."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    random = np.random.default_rng(3)
    weights = {
        "w": random.normal(0, 0.2, (64, 32)).astype(dtype),
        "v": random.normal(0, 0.2, (32, 10)).astype(dtype),
    }
    two = numpy_helper.from_array(np.array(2.0, dtype), "two")
    nodes = [
        helper.make_node("Flatten", ["x"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["a"]),
        helper.make_node("Constant", [], ["k"], value=two),
        helper.make_node("Mul", ["a", "k"], ["m"]),
        helper.make_node("Cast", ["m"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Cast", ["r"], ["h"], to=kind),
        helper.make_node("MatMul", ["h", "v"], ["y"]),
    ]
    path = make_graph(nodes, weights=weights, kinds=(kind, kind))
    classifier = load_classifier(path)
    assert classifier.raw == TensorSpec("float32", (1, 8, 8))
    x = inputs(classifier)
    ready = checked(classifier, x)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x": x.astype(dtype)})[0].astype(np.float64)
    # float16 rounds each value to three digits; float32 holds seven
    tolerance = 5e-3 if kind == TensorProto.FLOAT16 else 1e-6
    found = through_every_cut(ready, x)
    assert len(found) >= 2
    assert max(difference(expected, logits) for logits in found) <= tolerance


def test_float16_weights_in_constant_nodes_are_seen(make_graph: Make) -> None:
    """Such a file rounds as one with float16 initialisers does, and is compared as one."""
    random = np.random.default_rng(3)
    w = numpy_helper.from_array(random.normal(0, 0.2, (64, 10)).astype(np.float16), "w")
    nodes = [
        helper.make_node("Flatten", ["x"], ["f"]),
        helper.make_node("Cast", ["f"], ["h"], to=TensorProto.FLOAT16),
        helper.make_node("Constant", [], ["w"], value=w),
        helper.make_node("MatMul", ["h", "w"], ["a"]),
        helper.make_node("Cast", ["a"], ["y"], to=TensorProto.FLOAT),
    ]
    classifier = load_classifier(make_graph(nodes, weights={}))
    assert classifier.graph.half
    checked(classifier, inputs(classifier))


def test_values_beyond_float32_become_its_largest(make_graph: Make) -> None:
    weights = {
        "mask": np.array([1e300, -1e300, np.inf, 1.0]),
        "v": np.ones((64, 4)),
    }
    nodes = [
        helper.make_node("Flatten", ["x"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["a"]),
        helper.make_node("Min", ["a", "mask"], ["y"]),
    ]
    kinds = (TensorProto.DOUBLE, TensorProto.DOUBLE)
    path = make_graph(nodes, weights=weights, made=("n", 4), kinds=kinds)
    mask = load_classifier(path).graph.weights["net/mask"]
    largest = np.finfo(np.float32).max
    assert numpy_helper.to_array(mask).tolist() == [largest, -largest, np.inf, 1.0]


def test_softmax_that_is_computed_step_by_step(make_graph: Make, convolution: Convolution) -> None:
    nodes, weights = convolution
    nodes += [
        helper.make_node("Exp", ["scores"], ["e"]),
        helper.make_node("ReduceSum", ["e"], ["s"], keepdims=1),
        helper.make_node("Div", ["e", "s"], ["y"]),
    ]
    weights = {**weights, "axis": np.array([1], np.int64)}
    nodes[-2].input.append("axis")
    path = make_graph(nodes, weights=weights)
    classifier = load_classifier(path)
    x = inputs(classifier)
    ready = checked(classifier, x)
    for logits in through_every_cut(ready, x):
        assert logits.min() < 0
        assert difference(whole(path, x), softmax(logits)) <= 1e-4


def test_trailing_axes_of_size_one(make_graph: Make) -> None:
    random = np.random.default_rng(0)
    weights = {
        "w": random.normal(size=(4, 1, 3, 3)).astype(np.float32),
        "v": random.normal(size=(10, 4, 1, 1)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Relu", ["c"], ["h"]),
        helper.make_node("Conv", ["h", "v"], ["m"]),
        helper.make_node("GlobalAveragePool", ["m"], ["y"]),
    ]
    path = make_graph(nodes, weights=weights, made=("n", 10, 1, 1))
    classifier = load_classifier(path)
    assert classifier.classes == 10
    x = inputs(classifier)
    for logits in through_every_cut(classifier, x):
        assert logits.shape == (8, 10)
        assert difference(whole(path, x), logits) <= 1e-4


def test_graph_of_one_sample_is_made_batch_free(make_graph: Make, convolution: Convolution) -> None:
    nodes, weights = convolution
    nodes[2] = helper.make_node("Reshape", ["h", "flat"], ["f"])
    nodes.append(helper.make_node("Identity", ["scores"], ["y"]))
    weights = {**weights, "flat": np.array([1, 256], np.int64)}
    path = make_graph(nodes, weights=weights, given=(1, 1, 8, 8), made=(1, 10))
    classifier = load_classifier(path)
    x = inputs(classifier, 32)
    ready = checked(classifier, x)
    assert ready.batches
    for logits in through_every_cut(ready, x):
        assert difference(whole(path, x), logits) <= 1e-4


def test_graph_that_mixes_samples_is_served_one_by_one(
    make_graph: Make, convolution: Convolution
) -> None:
    nodes, weights = convolution
    # a mean over the batch axis: of one sample it is that sample
    nodes[1] = helper.make_node("Relu", ["c"], ["r"])
    nodes.insert(2, helper.make_node("ReduceMean", ["r"], ["h"], axes=[0], keepdims=1))
    nodes.append(helper.make_node("Identity", ["scores"], ["y"]))
    path = make_graph(nodes, weights=weights, given=(1, 1, 8, 8), made=(1, 10))
    classifier = load_classifier(path)
    x = inputs(classifier, 5)
    assert not checked(classifier, x).batches
    for logits in through_every_cut(classifier, x, by_sample=True):
        assert difference(whole(path, x), logits) <= 1e-4


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_last_state_is_cut_behind_the_axis_of_its_directions(make_graph: Make, kind: str) -> None:
    nodes, weights = recurrent(kind)
    path = make_graph(nodes, weights=weights, given=("n", 8, 8))
    classifier = load_classifier(path)
    plan = find_cuts(classifier.graph)
    # `states` is (1, batch, 16): at batch 1 its first axis has the size of a batch
    assert [cut.tensor for cut in plan.cuts] == ["net/h", "net/d", "net/e"]
    assert choose_cuts(plan, 8 * 8 * 4, None).cuts[0].shape == (16,)
    x = inputs(classifier)
    ready = checked(classifier, x)
    assert ready.batches
    for logits in through_every_cut(ready, x):
        assert difference(whole(path, x), logits) <= 1e-4


@pytest.mark.parametrize("kind", ["Loop", "Scan"])
def test_body_uses_weights_of_the_graph_around_it(make_graph: Make, kind: str) -> None:
    """As tf2onnx writes a recurrence."""
    nodes, weights = recurrence(kind)
    path = make_graph(nodes, weights=weights, given=("n", 8, 8))
    classifier = load_classifier(path)
    assert [cut.tensor for cut in find_cuts(classifier.graph).cuts] == ["net/h", "net/m", "net/r"]
    x = inputs(classifier)
    for logits in through_every_cut(checked(classifier, x), x):
        assert difference(whole(path, x), logits) <= 1e-4


def test_branch_uses_weights_of_the_graph_around_it(make_graph: Make) -> None:
    """TorchScript writes a squeeze of one axis as an If, on the size of that axis."""
    random = np.random.default_rng(0)
    sizes = {"k": (8, 1, 3, 3), "a": (8, 8), "v": (8, 10)}
    weights = {name: random.normal(0, 0.3, size).astype(np.float32) for name, size in sizes.items()}
    weights |= {"one": np.array(1), "axis": np.array([2]), "last": np.array([3])}
    weights |= {"place": np.array(2)}
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("s", "i")]
    squeeze = helper.make_node("Squeeze", ["row", "axis"], ["s"])
    same = helper.make_node("Identity", ["row"], ["i"])
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Squeeze", ["p", "last"], ["row"]),
        helper.make_node("Shape", ["row"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "place"], ["size"], axis=0),
        helper.make_node("Equal", ["size", "one"], ["is_one"]),
        helper.make_node(
            "If",
            ["is_one"],
            ["q"],
            then_branch=helper.make_graph([squeeze], "then", [], ends[:1]),
            else_branch=helper.make_graph([same], "else", [], ends[1:]),
        ),
        helper.make_node("MatMul", ["q", "a"], ["m"]),
        helper.make_node("Relu", ["m"], ["r"]),
        helper.make_node("MatMul", ["r", "v"], ["y"]),
    ]
    path = make_graph(nodes, weights=weights)
    classifier = load_classifier(path)
    x = inputs(classifier)
    found = through_every_cut(checked(classifier, x), x)
    assert len(found) >= 5
    assert max(difference(whole(path, x), logits) for logits in found) <= 1e-4


def test_where_samples_run_one_by_one_every_cut_stays(
    make_graph: Make, convolution: Convolution
) -> None:
    """A graph of batch 1 that takes no batch: no axis can be told from that of the batch."""
    nodes, weights = convolution
    weights = {**weights, "one": np.array([1, 4, 64], np.int64), "all": np.array([1, 256])}
    nodes[2:3] = [
        helper.make_node("Reshape", ["h", "one"], ["maps"]),
        helper.make_node("Softmax", ["maps"], ["s"], axis=0),
        helper.make_node("Mul", ["maps", "s"], ["m"]),
        helper.make_node("ReduceSum", ["m", "first"], ["sum"], keepdims=1),
        helper.make_node("Reshape", ["sum", "all"], ["f"]),
    ]
    weights["first"] = np.array([0], np.int64)
    nodes.append(helper.make_node("Identity", ["scores"], ["y"]))
    path = make_graph(nodes, weights=weights, given=(1, 1, 8, 8), made=(1, 10))
    classifier = load_classifier(path)
    tensors = [cut.tensor for cut in find_cuts(classifier.graph).cuts]
    assert tensors == ["net/c", "net/h", "net/maps", "net/m", "net/sum", "net/f"]
    x = inputs(classifier, 5)
    assert not checked(classifier, x).batches
    for logits in through_every_cut(classifier, x, by_sample=True):
        assert difference(whole(path, x), logits) <= 1e-4


def cuts_that_take_batches(path: Path) -> int:
    """Number of cuts of a file; at each of them a batch has the answers of the whole file."""
    classifier = load_classifier(path)
    x = inputs(classifier, 7)
    ready = checked(classifier, x)
    assert ready.batches
    found = through_every_cut(ready, x)
    assert max(difference(whole(path, x), logits) for logits in found) <= 1e-4
    return len(found)


class Attention(nn.Module):
    """A small vision transformer: sizes of the batch are computed in its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.blocks = nn.ModuleList([layer])
        self.end = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), tokens], dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.end(tokens[:, 0])  # type: ignore[no-any-return]  # torch types modules as Any


def test_sizes_that_follow_the_batch_are_worked_out_at_each_cut(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = export(Attention(), torch.zeros(3, 1, 8, 8), tmp_path / "vit.onnx")
    assert cuts_that_take_batches(path) >= 8


class Token(nn.Module):
    """A class token in front of patches: TorchScript compares its sizes with -1."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.mix = nn.Linear(16, 16)
        self.end = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), tokens], dim=1)
        weights = (tokens @ tokens.transpose(1, 2)).softmax(dim=-1)
        return self.end((weights @ self.mix(tokens))[:, 0])  # type: ignore[no-any-return]  # torch types modules as Any


def test_sizes_that_are_compared_are_worked_out_at_each_cut(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = export_by_torchscript(Token(), torch.zeros(3, 1, 8, 8), tmp_path / "token.onnx")
    assert "Equal" in {node.op_type for node in onnx.load(path).graph.node}
    assert cuts_that_take_batches(path) >= 5


def test_names_with_slashes_and_colons(make_graph: Make, convolution: Convolution) -> None:
    nodes, weights = convolution
    renamed = {"c": "tower/conv:0", "h": "tower/relu:0", "f": "z3", "scores": "logits"}
    for node in nodes:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    nodes.append(helper.make_node("Identity", ["logits"], ["y"]))
    path = make_graph(nodes, weights=weights)
    classifier = load_classifier(path)
    x = inputs(classifier)
    assert [cut.tensor for cut in find_cuts(classifier.graph).cuts] == [
        "net/tower/conv:0",
        "net/tower/relu:0",
        "net/z3",
    ]
    for logits in through_every_cut(classifier, x):
        assert difference(whole(path, x), logits) <= 1e-4


def test_depths_are_those_of_the_graph_and_offers_are_cheap(small_onnx: Path) -> None:
    plan = find_cuts(load_classifier(small_onnx).graph)
    assert [cut.depth for cut in plan.cuts] == list(range(1, len(plan.cuts) + 1))
    assert len(plan.stages) == len(plan.cuts) + 1
    shares = [cut.device_share for cut in plan.cuts]
    assert shares == sorted(shares)
    offer = choose_cuts(plan, 64 * 4, None)
    # x takes 256 bytes; behind the first pool z is 8 x 4 x 4 = 128 values
    assert all(cut.values <= 256 for cut in offer.cuts)
    asked = choose_cuts(plan, 64 * 4, [1])
    assert asked.cuts[0].values == 8 * 8 * 8 > 256


def test_part_that_needs_more_is_refused(make_graph: Make, small_onnx: Path) -> None:
    graph = load_classifier(small_onnx).graph
    cuts = find_cuts(graph).cuts
    with pytest.raises(Exception, match="it needs also"):
        part(graph, ("z", cuts[-1].tensor), {"early": cuts[0].tensor}, batch=1)


def test_onnx_finds_the_parts_sound(small_onnx: Path) -> None:
    graph = load_classifier(small_onnx).graph
    for cut in find_cuts(graph).cuts:
        for by_sample in (False, True):
            model = segment_model(graph, cut, None, by_sample=by_sample)
            onnx.checker.check_model(model, full_check=True)
