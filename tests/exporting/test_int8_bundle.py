from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from edge_sdk.manifest import BundleManifest
from edge_sdk.nets import Supernet
from edge_sdk.session import Session
from edge_sdk.training.data.load import Dataset
from exporters import bundle as bundle_module
from exporters import model as model_module
from exporters.bundle import BundleSource, HeldOut, torch_source, write_fp32, write_int8
from exporters.composition import Composition
from exporters.errors import ParityError
from exporters.graphs import shared_exit
from exporters.parity import run_torch

DEPTH = 4


@dataclass(frozen=True)
class Fp32:
    """`cnn8` cut at 4, on images of uint8, and its fp32 bundle."""

    source: BundleSource
    folder: Path
    manifest: BundleManifest
    calibration: NDArray[np.uint8]


@pytest.fixture(scope="module")
def fp32(cnn8: Supernet, fashion: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Fp32:
    net = cnn8.eval()
    graphs = shared_exit(net, DEPTH)
    lower, upper = np.sort(run_torch(graphs.exit, fashion.x_test)[0], axis=1)[:, -2:].T
    surest = np.argsort(lower - upper)[:400]  # a network of one epoch has many ties
    x, y = fashion.x_test[surest], fashion.y_test[surest]
    held_out = HeldOut(x, y, run_torch(net, x)[0])
    source = torch_source(
        "fashion/1",
        Composition.of(net),
        DEPTH,
        graphs,
        class_names=fashion.class_names,
        held_out=held_out,
    )
    folder = tmp_path_factory.mktemp("d4")
    return Fp32(source, folder, write_fp32(source, folder), fashion.x_train[:64])


@pytest.fixture(scope="module")
def int8_folder(fp32: Fp32, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("d4-int8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle_module, "median_latencies_us", lambda *_: [100.0, 95.0])
        made = write_int8(fp32.source, fp32.manifest, fp32.folder, folder, fp32.calibration)
    assert made is not None
    return folder


def test_images_go_into_the_graph_as_they_are(fp32: Fp32) -> None:
    assert fp32.manifest.input.dtype == "uint8"
    session = Session(fp32.folder / "exit.onnx")
    assert session.inputs == {"x": np.dtype(np.uint8)}
    x = fp32.source.held_out.x[:1]
    (logits,) = session.run(["logits"], {"x": x})
    np.testing.assert_allclose(logits, fp32.source.exit_logits[:1], atol=1e-4)


def test_int8_bundle_is_a_bundle_of_its_own(fp32: Fp32, int8_folder: Path) -> None:
    manifest = BundleManifest.load(int8_folder)
    assert manifest.bundle == "fashion/1/d4-int8"
    assert manifest.graphs["exit"].precision == "int8"
    assert manifest.gate == fp32.manifest.gate
    assert {path.name for path in int8_folder.iterdir()} == {*manifest.files, "manifest.json"}
    assert (manifest.parity["latency_us"], manifest.parity["fp32_latency_us"]) == (95.0, 100.0)


def test_int8_answers_as_torch_does(fp32: Fp32, int8_folder: Path) -> None:
    x = fp32.source.held_out.x
    expected = fp32.source.exit_logits.argmax(axis=1)
    session = Session(int8_folder / "exit.onnx")
    given = [session.run(["logits"], {"x": x[i : i + 1]})[0].argmax() for i in range(len(x))]
    changed = int((np.array(given) != expected).sum())
    parity = BundleManifest.load(int8_folder).parity
    assert changed == parity["label_changes"] <= 2  # 0.5 % of 400
    assert parity["gate_changes"] <= 2


def test_int8_holds_integer_weights_in_a_quarter_of_the_space(
    fp32: Fp32, int8_folder: Path
) -> None:
    model = onnx.load(int8_folder / "exit.onnx")
    weights = [item for item in model.graph.initializer if item.name.endswith("_quantized")]
    assert sum(item.data_type == onnx.TensorProto.INT8 for item in weights) == 4
    ratio = (int8_folder / "exit.onnx").stat().st_size / (fp32.folder / "exit.onnx").stat().st_size
    assert ratio < 0.35  # the head's 92 kB of 1.6 MB stay float


def test_int8_answers_alike_on_processors_that_add_products_in_16_bits(
    fp32: Fp32, int8_folder: Path
) -> None:
    """Two products of a byte and a weight fit into 16 bits; as floats they are never too large."""
    graph = onnx.load(int8_folder / "exit.onnx").graph
    largest = max(
        np.abs(onnx.numpy_helper.to_array(item).astype(int)).max()
        for item in graph.initializer
        if item.name.endswith("_quantized") and item.data_type == onnx.TensorProto.INT8
    )
    assert largest > 32
    assert 2 * 255 * largest < 2**15
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    as_floats = onnxruntime.InferenceSession(int8_folder / "exit.onnx", options)
    session = Session(int8_folder / "exit.onnx")
    for sample in fp32.source.held_out.x[:40]:
        feed = {"x": sample[None]}
        np.testing.assert_allclose(
            session.run(["logits"], feed)[0], as_floats.run(["logits"], feed)[0], atol=1e-3
        )


def test_head_of_the_int8_graph_stays_float_and_overridable(
    cnn8: Supernet, fp32: Fp32, int8_folder: Path
) -> None:
    manifest = BundleManifest.load(int8_folder)
    own = cnn8.exit_head(DEPTH).state_dict()
    session = Session(int8_folder / "exit.onnx")
    assert set(manifest.graphs["exit"].overridable) == {f"head.{name}" for name in own}
    assert set(session.overridable) == {f"head.{name}" for name in own}
    weight, bias = np.zeros((10, 2304), np.float32), np.arange(10, dtype=np.float32)
    session.override({"head.2.weight": weight, "head.2.bias": bias})
    (logits,) = session.run(["logits"], {"x": fp32.source.held_out.x[:1]})
    np.testing.assert_array_equal(logits[0], bias)


def test_int8_that_is_hardly_faster_is_not_published(
    fp32: Fp32, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_module, "median_latencies_us", lambda *_: [100.0, 95.1])
    made = write_int8(fp32.source, fp32.manifest, fp32.folder, tmp_path, fp32.calibration)
    assert made is None
    assert not (tmp_path / "manifest.json").exists()


def test_int8_that_was_calibrated_on_other_data_is_refused(
    fp32: Fp32, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_module, "median_latencies_us", lambda *_: [100.0, 50.0])
    black = np.zeros_like(fp32.calibration)
    with pytest.raises(ParityError, match="d4-int8: expected at most 2 of 400"):
        write_int8(fp32.source, fp32.manifest, fp32.folder, tmp_path, black)
    assert not (tmp_path / "manifest.json").exists()


def test_both_bundles_of_a_depth_are_published_side_by_side(
    fp32: Fp32, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_module, "median_latencies_us", lambda *_: [100.0, 50.0])
    lines: list[str] = []
    variants = model_module.write_bundles(fp32.source, tmp_path, fp32.calibration, lines.append)
    assert variants == ["d4", "d4-int8"]
    assert sorted(path.name for path in tmp_path.iterdir()) == variants
    assert lines[-1] == "d4-int8: 50 us a run, fp32 100"
