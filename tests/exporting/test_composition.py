"""Networks of two halves that were trained apart, and networks that end on the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from edge_sdk.manifest import BundleManifest, ModelManifest
from edge_sdk.nets import Supernet
from edge_sdk.session import Session
from edge_sdk.training.data.load import Dataset
from exporters.graphs import DeviceGraphs, shared_exit
from exporters.model import export_model
from server.backend.ladder import Entry, LadderEngine
from tests.exporting.conftest import trained

CUTS = (1, 3)


@pytest.fixture(scope="module")
def other(digits: Dataset) -> Supernet:
    """The server's own stages: trained on other samples, so they differ everywhere."""
    return trained("tiny", digits, samples=300, epochs=1).eval()


def answer(device: Supernet, server: Supernet, depth: int, x: np.ndarray) -> np.ndarray:
    """Stages 1..depth of one network and the others of the second, written out."""
    with torch.no_grad():
        z = device.normalise(torch.from_numpy(x))
        for stage in range(device.L):
            z = (device if stage < depth else server).stages[stage](z)
        logits: np.ndarray = server.head(z).numpy()
    return logits


def test_each_depth_is_served_by_its_own_composition(
    tiny: Supernet, other: Supernet, digits: Dataset, tmp_path: Path
) -> None:
    tiny.eval()
    manifest = export_model(
        tiny,
        digits.x_test,
        digits.y_test,
        tmp_path,
        name="halves",
        version=1,
        class_names=digits.class_names,
        depths=CUTS,
        int8="never",
        server=other,
    )
    x = digits.x_test[:50]
    engine = LadderEngine(tmp_path / "halves" / "1", manifest)
    entries, expected = [Entry(0, x)], [answer(tiny, other, CUTS[0], x)]
    for depth in CUTS:
        folder = tmp_path / "halves" / "1" / "bundles" / f"d{depth}"
        session = Session(folder / "exit.onnx")
        rows = [session.run(["z"], {"x": x[i : i + 1]})[0] for i in range(len(x))]
        entries.append(Entry(depth, np.concatenate(rows)))
        expected.append(answer(tiny, other, depth, x))
    assert np.abs(expected[1] - expected[2]).max() > 0.1  # two networks, in one chain of segments
    for got, wanted in zip(engine.run(entries), expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    for depth in CUTS:
        curve = BundleManifest.load(tmp_path / f"halves/1/bundles/d{depth}").gate.curve
        labels = answer(tiny, other, depth, digits.x_test).argmax(1)
        with torch.no_grad():
            exits = tiny.exit_head(depth)(tiny.prefix(depth)(torch.from_numpy(digits.x_test)))
        # at the lowest threshold few exit: the curve's accuracy is that composition's
        low, logits = curve[0], exits.numpy()
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        out = -(p * np.log(np.maximum(p, 1e-30))).sum(1) < low.threshold
        right = np.where(out, logits.argmax(1), labels) == digits.y_test
        assert low.accuracy == pytest.approx(right.mean(), abs=0.006)  # two samples of 360


def test_segments_end_in_front_of_a_last_layer_that_is_on_the_device(
    tiny: Supernet, digits: Dataset, tmp_path: Path
) -> None:
    tiny.eval()

    def graphs(net: Supernet, depth: int) -> DeviceGraphs:
        near = shared_exit(net, depth)
        back = net.suffix(depth).classifier
        return DeviceGraphs(near.exit, back=back, features=(back.in_features,))

    manifest = export_model(
        tiny,
        digits.x_test,
        digits.y_test,
        tmp_path,
        name="u-shape",
        version=1,
        class_names=digits.class_names,
        depths=(2,),
        int8="never",
        device=graphs,
    )
    folder = tmp_path / "u-shape" / "1"
    assert manifest.segments[-1].output.shape == (64,)
    assert manifest == ModelManifest.load(folder)
    engine = LadderEngine(folder, manifest)
    assert engine.output == "features"
    x = digits.x_test[:40]
    bundle = BundleManifest.load(folder / "bundles" / "d2")
    assert set(bundle.graphs["back"].overridable) == {"back.weight", "back.bias"}
    back = Session(folder / "bundles" / "d2" / bundle.graphs["back"].file)
    (features,) = engine.run([Entry(0, x)])
    rows = [back.run(["logits"], {"features": row[None]})[0] for row in features]
    np.testing.assert_allclose(np.concatenate(rows), answer(tiny, tiny, 2, x), atol=1e-4)
