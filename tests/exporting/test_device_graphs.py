from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from edge_sdk.bundles.initialisers import read_initialisers, with_values
from edge_sdk.errors import BundleError
from edge_sdk.manifest import BundleManifest, TensorSpec
from edge_sdk.nets import Supernet, build
from edge_sdk.session import Session
from edge_sdk.training.data.load import Dataset
from exporters.errors import ExportError
from exporters.graphs import (
    DeviceGraphs,
    make_overridable,
    own_exit,
    save,
    shared_exit,
    write_device_graphs,
)
from exporters.model import export_model

DIGIT = TensorSpec("float32", (1, 8, 8))


def test_raw_input_is_all_that_must_be_fed(tiny_tree: Any) -> None:
    session = Session(tiny_tree.path("d2"))
    assert list(session.inputs) == ["x"]
    assert set(session.outputs) == {"logits", "z"}


def test_head_is_overridable_under_its_own_names(tiny_tree: Any) -> None:
    own = tiny_tree.net.exit_head(2).state_dict()
    graph = tiny_tree.bundle("d2").graphs["exit"]
    assert set(graph.overridable) == {f"head.{name}" for name in own}
    session = Session(tiny_tree.path("d2"))
    assert session.overridable == {
        f"head.{name}": tuple(value.shape) for name, value in own.items()
    }


def test_overridable_weights_are_initialisers_and_inputs(tiny_tree: Any) -> None:
    model = onnx.load(tiny_tree.path("d2"))
    initialisers = {item.name for item in model.graph.initializer}
    inputs = {item.name for item in model.graph.input}
    overridable = set(tiny_tree.bundle("d2").graphs["exit"].overridable)
    assert overridable
    assert overridable == initialisers & inputs
    assert model.ir_version >= 4  # from 4 on an initialiser need not be an input: the rest is fixed


def test_other_head_weights_give_other_logits(tiny_tree: Any) -> None:
    session = Session(tiny_tree.path("d2"))
    x = tiny_tree.data.x_test[:1]
    own, z = session.run(["logits", "z"], {"x": x})
    rng = np.random.default_rng(0)
    weight = rng.normal(size=session.overridable["head.2.weight"]).astype(np.float32)
    bias = rng.normal(size=10).astype(np.float32)
    session.override({"head.2.weight": weight, "head.2.bias": bias})
    other, z_again = session.run(["logits", "z"], {"x": x})
    # the head of tiny at depth 2: averages of 2x2 windows of the 4x4 map, flattened, linear
    pooled = z.reshape(1, 16, 2, 2, 2, 2).mean(axis=(3, 5)).reshape(1, -1)
    np.testing.assert_allclose(other, pooled @ weight.T + bias, atol=1e-4)
    np.testing.assert_array_equal(z_again, z)
    session.override({})
    np.testing.assert_array_equal(session.run(["logits"], {"x": x})[0], own)


@pytest.fixture(scope="module")
def two_graphs(tiny: Supernet, digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with an exit model of its own, and the prefix."""

    def device(net: Supernet, depth: int) -> DeviceGraphs:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            extractor = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
            head = nn.Sequential(nn.Flatten(), nn.Linear(6, 10))
        return own_exit(net, depth, extractor.eval(), head.eval())

    out = tmp_path_factory.mktemp("models")
    export_model(
        tiny,
        digits.x_test,
        digits.y_test,
        out,
        name="auxiliary",
        version=7,
        class_names=digits.class_names,
        depths=(2,),
        int8="never",
        device=device,
    )
    return out / "auxiliary" / "7" / "bundles" / "d2"


def test_bundle_may_answer_with_a_model_of_its_own(
    two_graphs: Path, tiny: Supernet, digits: Dataset
) -> None:
    manifest = BundleManifest.load(two_graphs)
    assert set(manifest.graphs) == {"exit", "prefix"}
    assert set(manifest.graphs["exit"].outputs) == {"logits"}
    assert set(manifest.graphs["prefix"].outputs) == {"z"}
    assert sorted(manifest.graphs["exit"].overridable) == [
        "extractor.0.bias",
        "extractor.0.weight",
        "head.1.bias",
        "head.1.weight",
    ]
    assert manifest.graphs["prefix"].overridable == ()
    assert set(manifest.files) == {path.name for path in two_graphs.iterdir()} - {"manifest.json"}

    x = digits.x_test[:1]
    (z,) = Session(two_graphs / manifest.graphs["prefix"].file).run(["z"], {"x": x})
    with torch.no_grad():
        expected = tiny.prefix(2)(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(z, expected, atol=1e-5)
    assert z.shape[1:] == manifest.smashed.shape


def test_back_of_a_u_shaped_method_is_all_personal(tmp_path: Path, tiny: Supernet) -> None:
    back = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 10)).eval()
    prefix = shared_exit(tiny.eval(), 1)
    graphs = DeviceGraphs(exit=prefix.exit, back=back, features=(64,))
    specs = write_device_graphs(graphs, DIGIT, tmp_path)
    assert set(specs) == {"exit", "back"}
    assert specs["back"].inputs == {"features": TensorSpec("float32", (64,))}
    assert specs["back"].overridable == ("back.1.weight", "back.1.bias")
    session = Session(tmp_path / "back.onnx")
    features = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)
    (logits,) = session.run(["logits"], {"features": features})
    with torch.no_grad():
        np.testing.assert_allclose(logits, back(torch.from_numpy(features)), atol=1e-5)


def test_back_without_the_shape_of_its_features_is_refused(tiny: Supernet) -> None:
    with pytest.raises(ExportError, match="together"):
        DeviceGraphs(exit=tiny, back=nn.Linear(64, 10))


def test_whole_prefix_may_be_personal_with_batch_norm_folded(tmp_path: Path) -> None:
    net = build("resnet18", classes=10, input_shape=(1, 28, 28), seed=0)
    x = torch.rand(16, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        net.train()(x)  # statistics other than 0 and 1
    net.eval()
    graphs = shared_exit(net, 2, own_prefix=True)
    with torch.no_grad():
        folded, plain = graphs.exit(x)[1], net.prefix(2)(x)
    np.testing.assert_allclose(folded, plain, atol=1e-4)
    sample = TensorSpec("float32", (1, 28, 28))
    spec = write_device_graphs(graphs, sample, tmp_path)["exit"]
    kinds = [node.op_type for node in onnx.load(tmp_path / "exit.onnx").graph.node]
    assert "BatchNormalization" not in kinds
    # stem and two convolutions, each with the bias that its BatchNorm became; the head
    convolutions = kinds.count("Conv")
    assert convolutions == 3
    assert set(spec.overridable) == {"head.2.weight", "head.2.bias"}
    values = {n: p.detach().numpy() for n, p in graphs.exit.named_parameters()}
    stages = {n: value for n, value in values.items() if n not in spec.overridable}
    assert len(stages) == 2 * convolutions
    kept = read_initialisers(tmp_path / "exit.onnx", stages)
    for name, value in stages.items():
        np.testing.assert_array_equal(kept[name], value)

    session = Session(tmp_path / "exit.onnx")
    one = x[:1]
    logits, z = session.run(["logits", "z"], {"x": one.numpy()})
    with torch.no_grad():
        expected = graphs.exit(one)
    np.testing.assert_allclose(logits, expected[0], atol=1e-4)
    np.testing.assert_allclose(z, expected[1], atol=1e-4)
    zeros = {name: np.zeros_like(value) for name, value in values.items()}
    content = with_values(tmp_path / "exit.onnx", {name: zeros[name] for name in stages})
    session = Session(tmp_path / "exit.onnx", content=content)
    session.override({name: zeros[name] for name in spec.overridable})
    logits, z = session.run(["logits", "z"], {"x": one.numpy()})
    assert not logits.any()
    assert not z.any()


def test_stages_that_a_graph_keeps_in_another_form_are_not_personal(tmp_path: Path) -> None:
    net = build("vit_s", classes=10, input_shape=(3, 32, 32), seed=0).eval()
    graphs = shared_exit(net, 1, own_prefix=True)
    spec = write_device_graphs(graphs, TensorSpec("float32", (3, 32, 32)), tmp_path)["exit"]
    assert all(name.startswith("head.") for name in spec.overridable)
    stages = [n for n, _ in graphs.exit.named_parameters() if n.startswith("prefix.")]
    with pytest.raises(BundleError, match=r"expected the float32 weight prefix\.stage1"):
        read_initialisers(tmp_path / "exit.onnx", stages)


@pytest.mark.parametrize("count", [1, 7, 64])
def test_segments_take_batches_of_any_size(tiny_tree: Any, count: int) -> None:
    x = batch = tiny_tree.data.x_test[:count]
    for segment in tiny_tree.manifest.segments:
        session = Session(tiny_tree.folder / "segments" / segment.file)
        (name,) = session.inputs
        assert name == ("x" if segment.entry == 0 else f"z{segment.entry}")
        (batch,) = session.run(None, {name: batch})
        assert batch.shape == (count, *segment.output.shape)
    with torch.no_grad():
        expected = tiny_tree.net.eval()(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(batch, expected, atol=1e-4)


def test_initialiser_that_is_not_there_cannot_be_overridable(tiny_tree: Any) -> None:
    model = onnx.load(tiny_tree.path("d2"))
    with pytest.raises(ExportError, match=r"head\.9\.weight"):
        make_overridable(model, ["head.9.weight"])


def test_unsound_graph_is_not_saved(tiny_tree: Any, tmp_path: Path) -> None:
    model = onnx.load(tiny_tree.path("d2"))
    model.graph.node[0].input[0] = "nowhere"
    with pytest.raises(ExportError, match="unsound"):
        save(model, tmp_path / "exit.onnx")
    assert list(tmp_path.iterdir()) == []


def test_weights_outside_the_file_are_refused(tiny_tree: Any, tmp_path: Path) -> None:
    model = onnx.load(tiny_tree.path("d2"))
    weight = next(item for item in model.graph.initializer if item.name == "head.2.weight")
    onnx.external_data_helper.set_external_data(weight, "elsewhere.bin")
    with pytest.raises(ExportError, match=r"head\.2\.weight"):
        save(model, tmp_path / "exit.onnx")


def test_module_that_cannot_be_traced_is_named(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (x, x) if x.sum() > 0 else (x, -x)

    with pytest.raises(ExportError, match="x to logits"):
        write_device_graphs(DeviceGraphs(exit=Branching()), DIGIT, tmp_path)
