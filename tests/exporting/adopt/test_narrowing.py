"""`splitedge adopt --bottleneck`: fewer channels on the wire, learnt without labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from onnx import helper
from torch import nn
from typer.testing import CliRunner

from edge_sdk.bundles.golden import check_golden
from edge_sdk.bundles.runner import BundleRunner
from edge_sdk.errors import SplitedgeError
from edge_sdk.gate.gate import uncertainties
from edge_sdk.manifest import BundleManifest, GatePoint, GateSpec, ModelManifest
from edge_sdk.settings import AgentSettings
from edge_sdk.training.data.load import Dataset
from exporters.adopt.classifier import load_classifier
from exporters.adopt.cli import app
from exporters.adopt.graph.cuts import find_cuts
from exporters.adopt.graph.gradients import torch_suffix
from exporters.adopt.graph.graph import part
from exporters.adopt.graph.split import open_session
from exporters.adopt.operating import Judged, deployed_curve
from exporters.offloads.bottleneck import train_bottleneck
from server.backend.inference import _decoded
from server.backend.ladder import Entry, LadderEngine
from tests.exporting.adopt.conftest import build, convolution
from tests.exporting.test_narrow_offloads import sent_by

Array = NDArray[Any]

DEPTH = 5  # (16, 4, 4), behind the second convolution's ReLU
CHANNELS = 6


def adopt(model: Path, data: Path, out: Path, *more: str) -> tuple[dict[str, Any], str]:
    """The report, and the lines that were told."""
    words = [str(model), "--data", str(data), "--name", "digits", "--out", str(out), *more]
    run = CliRunner().invoke(app, [*words, "--int8", "never", "--json"])
    assert run.exit_code == 0, run.output + str(run.exception)
    return json.loads(run.stdout), run.stderr


@pytest.fixture(scope="module")
def narrow(
    small_onnx: Path, unlabelled: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], str]:
    """The model's folder, the report of its one cut, and the lines that were told."""
    out = tmp_path_factory.mktemp("narrow")
    words = "--depth", str(DEPTH), "--bottleneck", str(CHANNELS)
    report, lines = adopt(small_onnx, unlabelled, out, *words)
    (cut,) = report["cuts"]
    return out / "digits" / "1", cut, lines


def test_the_files_are_those_of_an_export(narrow: Any) -> None:
    folder, cut, lines = narrow
    bundle = BundleManifest.load(folder / "bundles" / f"d{DEPTH}")
    assert bundle.sent == (f"b{DEPTH}", (CHANNELS, *cut["z_shape"][1:]))
    assert cut["bottleneck"] == list(bundle.sent[1])
    check_golden(folder / "bundles" / f"d{DEPTH}")
    (decoder,) = ModelManifest.load(folder).decoders
    assert decoder.depth == DEPTH
    assert cut["z_bytes"] < np.prod(cut["z_shape"]) / 2
    assert f"d{DEPTH}: bottleneck of {CHANNELS} channels: " in lines


def test_the_server_widens_what_a_device_sends(
    narrow: Any, small: nn.Module, digits: Dataset
) -> None:
    folder, cut, _ = narrow
    manifest = ModelManifest.load(folder)
    bundle = BundleManifest.load(folder / "bundles" / f"d{DEPTH}")
    runner = BundleRunner(folder / "bundles" / f"d{DEPTH}", bundle, AgentSettings())
    engine = LadderEngine(folder, manifest)
    x = digits.x_test
    with torch.inference_mode():
        whole = small(torch.from_numpy(x)).numpy().argmax(axis=1)
    entries = [_decoded(sent_by(runner, one), engine) for one in x]
    beside = Entry(0, x[:3])
    answers = engine.run([beside, *entries])
    got = np.concatenate(answers[1:]).argmax(axis=1)
    assert (got == whole).mean() > 0.97
    assert cut["hybrid_agreement"] > 0.97
    # the first threshold of the curve lets hardly anything exit: its accuracy is the offloads'
    first = bundle.gate.curve[0]
    assert first.exit_rate < 0.06
    assert first.accuracy == pytest.approx(float((got == whole).mean()), abs=0.02)


def test_the_curve_is_corrected_by_what_offloads_lose() -> None:
    """Four samples, two classes; the exit is sure of the first two, and wrong about the second.

    The offload of the last is wrong. With nothing exiting 3 of 4 are right; with the first two
    exiting 1 of 2 by the exit and 1 of 2 by offloads; with all exiting, no offload counts.
    """
    whole = np.array([[4, 0], [4, 0], [0, 4], [4, 0]], np.float32)
    exits = np.array([[9, 0], [0, 8], [0, 1], [1, 0]], np.float32)
    offloaded = np.array([[4, 0], [4, 0], [0, 4], [0, 4]], np.float32)
    sure = float(uncertainties("entropy", exits)[1]) + 0.01
    points = [
        GatePoint(0.0, 0.0, 1.0, 1.0),
        GatePoint(sure, 0.5, 0.5, 0.75),
        GatePoint(1.0, 1.0, 0.75, 0.75),
    ]
    gate = GateSpec("entropy", 0.0, tuple(points))
    judged = Judged(exits, whole, None)
    curve = deployed_curve(gate, judged, np.arange(4), offloaded).curve
    assert [point.accuracy for point in curve] == [0.75, 0.5, 0.75]


def test_auto_keeps_the_answers_or_writes_none(
    small_onnx: Path, unlabelled: Path, tmp_path: Path
) -> None:
    smallest, _ = adopt(
        small_onnx, unlabelled, tmp_path / "z", "--depth", str(DEPTH), "--codec", "smallest"
    )
    report, lines = adopt(
        small_onnx, unlabelled, tmp_path / "b", "--depth", str(DEPTH), "--bottleneck", "auto"
    )
    (cut,), (before,) = report["cuts"], smallest["cuts"]
    folder = tmp_path / "b" / "digits" / "1"
    parity = BundleManifest.load(folder / "bundles" / f"d{DEPTH}").parity
    assert parity["offload_changes"][cut["codec"]] <= 0.005 * parity["samples"]
    assert f"d{DEPTH}: bottleneck of 8 channels: " in lines
    if cut["bottleneck"] is None:
        assert "no bottleneck has fewer bytes and keeps the answers; none is used" in lines
        assert not ModelManifest.load(folder).decoders
    else:
        assert cut["z_bytes"] < before["z_bytes"]


def test_auto_says_that_none_keeps_the_answers(tmp_path: Path) -> None:
    """Random weights, and every channel counts: half of them cannot carry what four did."""
    nodes, weights = convolution()
    weights["v"] *= 30
    nodes.append(helper.make_node("Identity", ["scores"], ["y"]))
    model = build(nodes, tmp_path / "m.onnx", weights=weights)
    x = np.random.default_rng(0).normal(size=(600, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x_train=x)
    words = "--depth", "2", "--bottleneck", "auto"
    report, lines = adopt(model, tmp_path / "x.npz", tmp_path / "out", *words)
    assert report["cuts"][0]["bottleneck"] is None
    assert "d2: no bottleneck has fewer bytes and keeps the answers; none is used" in lines
    assert not ModelManifest.load(tmp_path / "out" / "digits" / "1").decoders


def test_an_operator_without_gradients_leaves_the_principal_components(tmp_path: Path) -> None:
    nodes, weights = convolution()
    nodes.insert(2, helper.make_node("Celu", ["h"], ["bent"]))
    nodes[3].input[0] = "bent"
    nodes.append(helper.make_node("Identity", ["scores"], ["y"]))
    model = build(nodes, tmp_path / "m.onnx", weights=weights)
    x = np.random.default_rng(0).normal(size=(600, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x_train=x)
    words = "--depth", "2", "--bottleneck", "3"
    report, lines = adopt(model, tmp_path / "x.npz", tmp_path / "out", *words)
    assert report["cuts"][0]["bottleneck"] == [3, 8, 8]
    assert "d2: no gradients of the operator Celu; the bottleneck is the principal" in lines
    assert "learning a bottleneck" not in lines


def test_learning_keeps_more_answers_than_the_principal_components(
    small_onnx: Path, digits: Dataset
) -> None:
    classifier = load_classifier(small_onnx)
    graph = classifier.graph
    cut = find_cuts(graph).at(DEPTH)
    prefix = open_session(part(graph, ("x", graph.input), {"z": cut.tensor}, batch=None))
    z, held = (prefix.run(None, {"x": x})[0] for x in (digits.x_train, digits.x_test))
    suffix = torch_suffix(graph, cut, z, by_sample=False)
    whole = suffix(torch.from_numpy(held)).argmax(dim=1)
    kept = []
    for learns in (None, suffix):
        pair = train_bottleneck(z, 1, 3, learns, steps=300)
        with torch.inference_mode():
            got = suffix(pair.decoder(pair.encoder(torch.from_numpy(held)))).argmax(dim=1)
        kept.append(float((got == whole).float().mean()))
    assert kept[1] > kept[0]


@pytest.mark.parametrize(
    ("width", "message"),
    [
        ("99", f"--bottleneck: expected 1 to 15 channels at depth {DEPTH}, got 99"),
        ("wide", "--bottleneck: expected a number of channels, auto or never, got 'wide'"),
    ],
)
def test_a_width_that_cannot_be_is_refused(
    width: str, message: str, small_onnx: Path, unlabelled: Path, tmp_path: Path
) -> None:
    words = [str(small_onnx), "--data", str(unlabelled), "--name", "digits", "--out", str(tmp_path)]
    run = CliRunner().invoke(app, [*words, "--depth", str(DEPTH), "--bottleneck", width])
    assert isinstance(run.exception, SplitedgeError), run.output
    assert str(run.exception) == message
    assert not list(tmp_path.glob("digits/*"))
