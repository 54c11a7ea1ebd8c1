"""Weights out of an ONNX file, against the onnx package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edge_sdk.bundles.initialisers import read_initialisers, with_values
from edge_sdk.errors import BundleError
from tests.edge.digits import Digits


def test_a_bundles_weights_are_those_that_onnx_reads(digits: Digits) -> None:
    path = digits.models / "digits" / "1" / "bundles" / "d2" / "exit.onnx"
    expected = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in onnx.load(path).graph.initializer
        if tensor.data_type == TensorProto.FLOAT
    }
    assert any(name.startswith("head.") for name in expected)
    found = read_initialisers(path, list(expected))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_replaced_weights_are_those_that_onnx_reads(digits: Digits) -> None:
    path = digits.models / "digits" / "1" / "bundles" / "d2" / "exit.onnx"
    before = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    random = np.random.default_rng(0)
    values = {
        name: random.normal(size=value.shape).astype("f4")
        for name, value in before.items()
        if name.startswith("head.") and value.dtype == np.float32
    }
    model = onnx.load_from_string(with_values(path, values))
    onnx.checker.check_model(model, full_check=True)
    for tensor in model.graph.initializer:
        expected = values.get(tensor.name, before[tensor.name])
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), expected)
    wrong = {"head.2.bias": np.zeros(3, np.float32)}
    with pytest.raises(BundleError, match=r"expected head.2.bias of shape \(10,\), got \(3,\)"):
        with_values(path, wrong)


def write_model(path: Path, *tensors: TensorProto) -> None:
    graph = helper.make_graph([], "g", [], [], initializer=tensors)
    path.write_bytes(helper.make_model(graph).SerializeToString())


def test_weights_kept_as_numbers_and_scalars_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    listed = helper.make_tensor("listed", TensorProto.FLOAT, (2, 3), [1, 2, 3, 4, 5, 6.5])
    whole = helper.make_tensor("whole", TensorProto.INT64, (1,), [7])
    scalar = numpy_helper.from_array(np.array(2.5, np.float32), "scalar")
    write_model(path, whole, listed, scalar)
    found = read_initialisers(path, ["listed", "scalar"])
    assert found["listed"].tolist() == [[1, 2, 3], [4, 5, 6.5]]
    assert found["scalar"].tolist() == 2.5
    with pytest.raises(BundleError, match="expected the float32 weight whole, found none"):
        read_initialisers(path, ["whole"])


def test_a_file_that_is_no_onnx_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be read"):
        read_initialisers(tmp_path / "none.onnx", ["w"])
    path = tmp_path / "cut.onnx"
    write_model(path, numpy_helper.from_array(np.ones((50, 50), np.float32), "w"))
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(BundleError, match=r"cut\.onnx"):
        read_initialisers(path, ["w"])


@given(raw=st.binary(max_size=200))
def test_any_bytes_give_weights_or_a_bundle_error(
    raw: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """FAULTS row 27."""
    path = tmp_path_factory.getbasetemp() / "any.onnx"
    path.write_bytes(raw)
    with pytest.raises(BundleError):
        read_initialisers(path, ["w"])
