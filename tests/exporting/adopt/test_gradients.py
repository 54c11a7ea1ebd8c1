"""Part of a user's graph in torch: what onnx's and onnxruntime's own answers say of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from onnx import helper

from benchmarks.adopt_cuts import randomised
from exporters.adopt.classifier import load_classifier
from exporters.adopt.graph.cuts import choose_cuts, find_cuts
from exporters.adopt.graph.gradients import torch_suffix
from exporters.adopt.graph.graph import part
from exporters.adopt.graph.loading import with_open_reshapes
from exporters.adopt.graph.operators import OPERATORS, Attributes
from exporters.adopt.graph.split import open_session
from exporters.errors import ExportError
from tests.exporting.adopt.conftest import build, convolution

# onnx's own cases that classifiers do not have: they are refused, and none is answered otherwise
REFUSED = {
    *("test_averagepool_2d_ceil_last_window_starts_on_pad", "test_averagepool_2d_dilations"),
    *("test_batchnorm_epsilon_training_mode", "test_batchnorm_example_training_mode"),
    *("test_averagepool_3d_dilations_small", "test_wrap_pad"),
    *("test_training_dropout_default", "test_training_dropout_default_mask"),
    *("test_training_dropout", "test_training_dropout_mask"),
    *("test_training_dropout_zero_ratio", "test_training_dropout_zero_ratio_mask"),
    *(
        f"test_averagepool_3d_dilations_large_count_include_pad_is_{pad}_ceil_mode_is_{ceil}"
        for pad in (0, 1)
        for ceil in (True, False)
    ),
}
KINDS = {"float32", "float64", "int32", "int64", "bool"}


def published_cases() -> list[Any]:
    """Cases of one node of ours, out of the specification's own; numbers that torch computes on."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    found = []
    for case in cases:
        assert case.model is not None
        assert case.data_sets is not None
        nodes, ((given, wanted), *_) = case.model.graph.node, case.data_sets
        arrays = all(isinstance(each, np.ndarray | np.generic) for each in [*given, *wanted])
        if len(nodes) != 1 or nodes[0].op_type not in OPERATORS or not arrays:
            continue
        empty = any(not np.asarray(each).size for each in given)
        if not empty and {np.asarray(each).dtype.name for each in given} <= KINDS:
            found.append(case)
    return found


def answers(case: Any) -> list[torch.Tensor]:
    (node,), (given, _) = case.model.graph.node, case.data_sets[0]
    tensors = iter(torch.from_numpy(np.array(each)) for each in given)
    opset = max(each.version for each in case.model.opset_import)
    made = OPERATORS[node.op_type](
        Attributes(node, opset), *(next(tensors) if name else None for name in node.input)
    )
    return [made] if isinstance(made, torch.Tensor) else list(made)


def test_operators_answer_as_the_specification_s_own_cases_do() -> None:
    met, refused = set(), set()
    for case in published_cases():
        try:
            made = answers(case)
        except ExportError:
            refused.add(case.name)
            continue
        for got, wanted in zip(made, case.data_sets[0][1], strict=False):
            np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-4, atol=1e-5, err_msg=case.name)
        met.add(case.model.graph.node[0].op_type)
    assert refused == REFUSED
    assert met == set(OPERATORS) - {"Cast"}  # whose cases are of other numbers


@pytest.mark.parametrize("name", ["light_shufflenet", "light_squeezenet"])
def test_published_architectures_answer_as_onnxruntime_does(name: str, tmp_path: Path) -> None:
    path = randomised(name, tmp_path)
    classifier = load_classifier(path)
    graph = with_open_reshapes(classifier.graph)
    cut = choose_cuts(find_cuts(graph), 10**9, None).cuts[-1]
    x = np.random.default_rng(0).normal(size=(3, *classifier.raw.shape)).astype(np.float32)
    session = open_session(part(graph, ("x", graph.input), {"z": cut.tensor}, batch=None))
    (z,) = session.run(None, {"x": x})
    suffix = torch_suffix(graph, cut, z, by_sample=False)  # compares them itself
    one = torch_suffix(graph, cut, z, by_sample=True)
    given = torch.from_numpy(z)
    torch.testing.assert_close(suffix(given), one(given), rtol=1e-3, atol=1e-2)


def differences(session: Any, z: NDArray[np.float32], step: float) -> NDArray[np.float64]:
    """The gradient of the logits' squares by central differences, by onnxruntime alone."""
    slopes = np.zeros(z.size)
    for place in range(z.size):
        sides = []
        for sign in (1, -1):
            moved = z.copy()
            moved.flat[place] += sign * step
            (logits,) = session.run(None, {"z1": moved})
            sides.append(float((logits.astype(np.float64) ** 2).sum()))
        slopes[place] = (sides[0] - sides[1]) / (2 * step)
    return slopes.reshape(z.shape)


def test_gradients_are_those_of_onnxruntime_s_answers(tmp_path: Path) -> None:
    nodes, weights = convolution()
    classifier = load_classifier(build([*nodes, *tail()], tmp_path / "m.onnx", weights=weights))
    graph = classifier.graph
    cut = find_cuts(graph).at(1)
    z = np.random.default_rng(1).normal(size=(2, *cut.shape)).astype(np.float32)
    z += 0.1 * np.sign(z)  # no step of the differences passes the ReLU's corner
    model = part(graph, ("z1", cut.tensor), {"logits": graph.output}, batch=None)
    given = torch.from_numpy(z.copy()).requires_grad_()
    loss = torch_suffix(graph, cut, z, by_sample=False)(given).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert given.grad is not None
    expected = differences(open_session(model), z, 1e-2)
    np.testing.assert_allclose(given.grad.numpy(), expected, rtol=2e-2, atol=2e-2)


def test_an_operator_without_gradients_is_named(tmp_path: Path) -> None:
    nodes, weights = convolution()
    nodes[1] = helper.make_node("Celu", list(nodes[1].input), list(nodes[1].output))
    classifier = load_classifier(build([*nodes, *tail()], tmp_path / "m.onnx", weights=weights))
    cut = find_cuts(classifier.graph).at(1)
    z = np.zeros((1, *cut.shape), np.float32)
    with pytest.raises(ExportError, match="no gradients of the operator Celu"):
        torch_suffix(classifier.graph, cut, z, by_sample=False)


def tail() -> list[Any]:
    """`scores`, made into the output `y`."""
    return [helper.make_node("Identity", ["scores"], ["y"])]
