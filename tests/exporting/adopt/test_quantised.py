"""Quantised files, as onnxruntime's tools write them: they are cut, compared and published."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import orjson
import pytest
import torch
from numpy.typing import NDArray
from onnx import helper
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from torch import nn
from typer.testing import CliRunner

from edge_sdk.manifest import BundleManifest, ModelManifest
from edge_sdk.training.data.load import Dataset
from exporters.adopt.classifier import Classifier, checked, load_classifier
from exporters.adopt.cli import app
from exporters.adopt.graph.cuts import find_cuts
from exporters.adopt.graph.graph import part
from exporters.adopt.graph.split import TOLERANCE, difference, open_session, segment_model
from exporters.adopt.graph.steps import STEP_TOLERANCE
from server.backend.ladder import Entry, LadderEngine
from tests.exporting.adopt.conftest import (
    convolution,
    dynamically_quantised,
    export,
    statically_quantised,
)

Array = NDArray[Any]
Make = Callable[..., Path]


class Samples(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
    """Feeds the calibration samples one by one."""

    def __init__(self, x: Array) -> None:
        self._rows: Iterator[Array] = iter(x)

    def get_next(self) -> dict[str, Array] | None:
        row = next(self._rows, None)
        return None if row is None else {"image": row[None]}


def quantised(source: Path, target: Path, digits: Dataset) -> Path:
    """A file as a user's `quantize_static` writes it, activations and weights of 8 bits."""
    quantize_static(source, target, Samples(digits.x_train[:64]), per_channel=True)
    return target


@pytest.fixture(scope="module")
def softmax_onnx(small: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained network with probabilities as its answers."""
    net = nn.Sequential(small, nn.Softmax(dim=1))
    return export(net, torch.zeros(2, 1, 8, 8), tmp_path_factory.mktemp("small") / "softmax.onnx")


def whole(path: Path, x: Array) -> Array:
    """The oracle: the file, one sample at a time."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (name,) = (each.name for each in session.get_inputs())
    return np.concatenate([session.run(None, {name: x[i : i + 1]})[0] for i in range(len(x))])


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: Array = weights / weights.sum(axis=1, keepdims=True)
    return shares


def one_by_one(model: onnx.ModelProto, x: Array) -> Array:
    """The only output of a part of a graph, one sample at a time."""
    session, (name,) = open_session(model), (info.name for info in model.graph.input)
    return np.concatenate([session.run(None, {name: x[i : i + 1]})[0] for i in range(len(x))])


def by_cut(classifier: Classifier, x: Array) -> list[Array]:
    """The logits of prefix and suffix at each cut; a device's part runs sample by sample."""
    graph, found = classifier.graph, []
    for cut in find_cuts(graph).cuts:
        z = one_by_one(part(graph, ("x", graph.input), {"z": cut.tensor}, batch=1), x)
        suffix = segment_model(graph, cut, None, by_sample=not classifier.batches)
        found += open_session(suffix).run(None, {f"z{cut.depth}": z})
    return found


def test_weights_in_whole_numbers_are_weights(make_graph: Make) -> None:
    nodes, weights = statically_quantised()
    plan = find_cuts(load_classifier(make_graph(nodes, weights=weights)).graph)
    # three values of each layer fit for a cut: of the convolution, of the ReLU, and rounded
    assert len(plan.cuts) == 1 + 4 * 3 + 1
    convolutions = 9 * 16 + 9 * 16 * 32 + 2 * 9 * 32 * 32
    assert sum(stage.flops for stage in plan.stages) == 2 * (64 * convolutions + 2048 * 10)
    biases = 16 + 32 + 32 + 32
    scales = 3  # of x, of the ReLUs, which share one, and of the scores
    counted = sum(stage.parameters for stage in plan.stages)
    assert counted == convolutions + 2048 * 10 + biases + scales


def test_answers_that_are_a_step_apart_are_the_same(make_graph: Make) -> None:
    """A whole graph adds in whole numbers, the first layer behind a cut in floats: where a sum lies
    between two steps, they round to either.
    """
    nodes, weights = statically_quantised()
    path = make_graph(nodes, weights=weights)
    x = np.random.default_rng(3).normal(size=(200, 1, 8, 8)).astype(np.float32)
    ready = checked(load_classifier(path), x)
    assert ready.batches
    expected = whole(path, x)
    apart = max(difference(expected, logits) for logits in by_cut(ready, x))
    assert apart > 10 * TOLERANCE
    # three steps of 0.05 at most
    assert apart <= 0.151 / np.abs(expected).max() <= STEP_TOLERANCE


def test_file_of_quantize_static_answers_by_its_parts_as_a_whole(
    small_onnx: Path, digits: Dataset, tmp_path: Path
) -> None:
    path = quantised(small_onnx, tmp_path / "quantised.onnx", digits)
    x = digits.x_test[:100]
    ready = checked(load_classifier(path), x)
    expected = whole(path, x)
    found = by_cut(ready, x)
    assert len(found) >= 8
    for logits in found:
        assert difference(expected, logits) <= STEP_TOLERANCE
        assert (logits.argmax(axis=1) == expected.argmax(axis=1)).mean() >= 0.99


def test_softmax_is_seen_through_its_rounding(
    softmax_onnx: Path, digits: Dataset, tmp_path: Path
) -> None:
    path = quantised(softmax_onnx, tmp_path / "quantised.onnx", digits)
    x = digits.x_test[:100]
    ready = checked(load_classifier(path), x)
    graph = ready.graph
    logits = one_by_one(part(graph, ("x", graph.input), {"y": graph.output}, batch=1), x)
    assert logits.min() < -1.5
    # half a step of 1/255, and one more by onnxruntime's softmax of whole numbers
    np.testing.assert_allclose(softmax(logits), whole(path, x), atol=1.5 / 255)


def test_rounded_probabilities_of_no_softmax_are_seen_by_their_sums(make_graph: Make) -> None:
    nodes, weights = convolution()
    weights |= {"axis": np.array([1]), "s": np.array(1 / 256, np.float32)}
    weights["z"] = np.array(0, np.uint8)
    nodes += [
        helper.make_node("Exp", ["scores"], ["e"]),
        helper.make_node("ReduceSum", ["e", "axis"], ["sum"], keepdims=1),
        helper.make_node("Div", ["e", "sum"], ["p"]),
        helper.make_node("QuantizeLinear", ["p", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    path = make_graph(nodes, weights=weights)
    x = np.random.default_rng(3).normal(size=(8, 1, 8, 8)).astype(np.float32)
    answers = whole(path, x)
    assert np.abs(answers.sum(axis=1) - 1).max() > 1e-3
    graph = checked(load_classifier(path), x).graph
    logits = one_by_one(part(graph, ("x", graph.input), {"y": graph.output}, batch=1), x)
    given = softmax(logits)
    np.testing.assert_allclose(given, answers / answers.sum(axis=1, keepdims=True), atol=1e-5)


def test_thousand_rounded_probabilities_are_compared_within_a_step(make_graph: Make) -> None:
    """Where the largest of them is a few steps, half a step is a large share of it."""
    random = np.random.default_rng(3)
    weights = {
        "w": random.normal(0, 0.3, (64, 32)).astype(np.float32),
        "v": random.normal(0, 0.2, (32, 1000)).astype(np.float32),
        "s": np.array(1 / 256, np.float32),
        "z": np.array(0, np.uint8),
    }
    nodes = [
        helper.make_node("Flatten", ["x"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "v"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["p"]),
        helper.make_node("QuantizeLinear", ["p", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    path = make_graph(nodes, weights=weights, made=("n", 1000))
    x = random.normal(size=(8, 1, 8, 8)).astype(np.float32)
    assert whole(path, x).max(axis=1).min() < 0.5 / 256 / STEP_TOLERANCE
    assert checked(load_classifier(path), x).classes == 1000


def test_ranges_that_a_batch_sets_keep_samples_apart(make_graph: Make) -> None:
    nodes, weights = dynamically_quantised()
    path = make_graph(nodes, weights=weights)
    x = np.random.default_rng(3).normal(size=(20, 1, 8, 8)).astype(np.float32)
    ready = checked(load_classifier(path), x)
    assert not ready.batches
    for logits in by_cut(ready, x):
        assert difference(whole(path, x), logits) <= STEP_TOLERANCE


def test_command_publishes_a_quantised_file_in_its_own_form(
    softmax_onnx: Path, digits: Dataset, tmp_path: Path
) -> None:
    model = quantised(softmax_onnx, tmp_path / "quantised.onnx", digits)
    np.savez(tmp_path / "digits.npz", x_train=digits.x_train, x_test=digits.x_test)
    words = [str(model), "--data", str(tmp_path / "digits.npz"), "--name", "digits"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "models"), "--json"])
    assert result.exit_code == 0, result.output + str(result.exception)
    assert "the file is quantised already" in " ".join(result.stderr.split())
    folder = tmp_path / "models" / "digits" / "1"
    manifest = ModelManifest.load(folder)
    assert not any(variant.endswith("int8") for variant in manifest.variants)
    for variant in manifest.variants:
        bundle = BundleManifest.load(folder / "bundles" / variant)
        # so a device whose processor rounds otherwise does not refuse it
        assert bundle.graphs["exit"].precision == "int8"
    x = digits.x_test[:33]
    (logits,) = LadderEngine(folder, manifest).run([Entry(0, x)])
    np.testing.assert_allclose(softmax(logits), whole(model, x), atol=STEP_TOLERANCE)
    for cut in orjson.loads(result.stdout)["cuts"]:
        assert cut["exit_rate"] > 0.3
        assert cut["hybrid_agreement"] > 0.95
