"""A learnt bottleneck at the cut: few channels cross the wire, and the server's answers stay."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edge_sdk.bundles.golden import check_golden
from edge_sdk.bundles.runner import BundleRunner
from edge_sdk.manifest import BundleManifest, ModelManifest
from edge_sdk.nets import Supernet
from edge_sdk.settings import AgentSettings
from edge_sdk.training.data.load import Dataset
from edge_sdk.wire.frames import Tensor, unpack
from edge_sdk.wire.messages import Query, pack_query, read_query
from exporters.model import export_model
from exporters.offloads.bottleneck import train_bottleneck, widths_of
from server.backend.inference import _decoded
from server.backend.ladder import Entry, LadderEngine
from server.errors import BadRequestError
from tests.exporting.conftest import Tree, tiny_export

CHANNELS = 6  # of 16 at depth 2


@pytest.fixture(scope="module")
def narrow(tiny: Supernet, digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    out = tmp_path_factory.mktemp("narrow")
    return tiny_export(tiny, digits, out, bottleneck=CHANNELS, unlabelled_x=digits.x_train)


def smashed(net: Supernet, x: NDArray[np.float32]) -> NDArray[np.float32]:
    with torch.inference_mode():
        z: NDArray[np.float32] = net.eval().prefix(2)(torch.from_numpy(x)).numpy()
    return z


def test_without_distillation_it_is_the_best_linear_pair(tiny: Supernet, digits: Dataset) -> None:
    """Eckart and Young: the squared error left is that of the singular values left out."""
    z = smashed(tiny, digits.x_train[:200])
    z = z - z.mean()  # below zero too, so that the decoder ends in no ReLU
    pair = train_bottleneck(z, 1, CHANNELS, None)
    with torch.inference_mode():
        back = pair.decoder(pair.encoder(torch.from_numpy(z))).numpy()
    rows = np.moveaxis(z, 1, -1).reshape(-1, z.shape[1]).astype(np.float64)
    values = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False)
    np.testing.assert_allclose(
        ((z - back).astype(np.float64) ** 2).sum(), (values[CHANNELS:] ** 2).sum(), rtol=1e-3
    )


def test_distillation_keeps_more_answers_than_the_principal_components(
    tiny: Supernet, digits: Dataset
) -> None:
    z, held = smashed(tiny, digits.x_train), smashed(tiny, digits.x_test)
    suffix = tiny.eval().suffix(2)
    before = deepcopy(suffix.state_dict())
    kept = []
    for learns in (None, suffix):
        pair = train_bottleneck(z, 1, 3, learns, steps=300)
        with torch.inference_mode():
            z_held = torch.from_numpy(held)
            got = suffix(pair.decoder(pair.encoder(z_held))).argmax(dim=1)
            kept.append(float((got == suffix(z_held).argmax(dim=1)).float().mean()))
    assert kept[1] > kept[0]
    for name, weight in suffix.state_dict().items():
        assert torch.equal(weight, before[name])  # it learnt nothing itself


def test_widths_that_are_tried() -> None:
    assert widths_of(16) == (8, 4, 2)
    assert widths_of(3) == (1,)
    assert widths_of(1) == ()


def test_the_bundle_says_what_it_sends_and_passes_its_trial(narrow: Tree) -> None:
    bundle = narrow.bundle("d2")
    assert bundle.sent == ("b2", (CHANNELS, *bundle.smashed.shape[1:]))
    check_golden(narrow.folder / "bundles" / "d2")
    assert [decoder.depth for decoder in narrow.manifest.decoders] == [2, 4]
    assert ModelManifest.from_json(narrow.manifest.to_json()) == narrow.manifest
    assert BundleManifest.from_json(bundle.to_json()) == bundle
    codec = bundle.smashed.codec
    assert bundle.parity["offload_bytes"][codec] < 0.25 * 2 * np.prod(bundle.smashed.shape)
    assert any("of the final labels are kept" in line for line in narrow.lines)


def sent_by(runner: BundleRunner, x: NDArray[np.float32]) -> Tensor:
    """What the server reads of one offload."""
    _, z, _ = runner.exit(runner.check(x))
    query = Query("q", "digits", "1", runner.smashed(x, z))
    tensor = read_query(unpack(pack_query(query))).tensor
    assert tensor is not None
    return tensor


def test_the_server_widens_it_and_answers_beside_other_depths(narrow: Tree) -> None:
    folder, x = narrow.folder / "bundles" / "d2", narrow.data.x_test[:40]
    runner = BundleRunner(folder, narrow.bundle("d2"), AgentSettings(codec="fp32"))
    engine = LadderEngine(narrow.folder, narrow.manifest)
    entries = [_decoded(sent_by(runner, one), engine) for one in x]
    for entry in entries:
        engine.check(entry)
        assert entry.narrow
    mixed = [Entry(0, x[:2]), *entries, Entry(2, smashed(narrow.net, x[:3]))]
    answers = engine.run(mixed)
    with torch.inference_mode():
        whole = narrow.net.eval()(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(answers[0], whole[:2], atol=1e-3)
    np.testing.assert_allclose(answers[-1], whole[:3], atol=1e-3)
    got = np.concatenate(answers[1:-1])
    alone = np.concatenate([engine.run([entry])[0] for entry in entries])
    np.testing.assert_allclose(got, alone, atol=1e-4)  # a batch adds in another order
    assert (got.argmax(axis=1) == whole.argmax(axis=1)).mean() > 0.9


def test_the_curve_is_of_the_answers_that_offloads_get(narrow: Tree) -> None:
    """The first point of the curve at which hardly anything exits has the offloads' accuracy."""
    bundle, x, y = narrow.bundle("d2"), narrow.data.x_test, narrow.data.y_test
    runner = BundleRunner(narrow.folder / "bundles" / "d2", bundle, AgentSettings())
    engine = LadderEngine(narrow.folder, narrow.manifest)
    labels = [engine.run([_decoded(sent_by(runner, one), engine)])[0].argmax() for one in x]
    first = bundle.gate.curve[0]
    decisions = [runner.exit(one)[0] for one in x]
    exits = np.array([one.uncertainty < first.threshold for one in decisions])
    own = np.array([one.label for one in decisions])
    right = np.where(exits, own, np.array(labels)) == y
    # batches of the export add in another order than single samples here
    assert float(right.mean()) == pytest.approx(first.accuracy, abs=2.5 / len(y))


def test_a_model_without_a_decoder_refuses_a_narrow_query(tiny_tree: Tree) -> None:
    engine = LadderEngine(tiny_tree.folder, tiny_tree.manifest)
    with pytest.raises(BadRequestError, match="input b2: this model takes x, z2, z4"):
        _decoded(Tensor("b2", np.zeros((1, 6, 4, 4), np.float32)), engine)


def test_a_model_of_before_names_no_decoders(tiny_tree: Tree) -> None:
    raw = tiny_tree.manifest.to_json().replace(b'"decoders": [],', b"")
    assert b"decoders" not in raw
    assert ModelManifest.from_json(raw) == tiny_tree.manifest


def test_the_smallest_codec_is_tried_by_bytes(
    tiny: Supernet, digits: Dataset, tmp_path: Path
) -> None:
    export_model(
        tiny,
        digits.x_test,
        digits.y_test,
        tmp_path,
        name="digits",
        version=1,
        class_names=digits.class_names,
        depths=(2,),
        int8="never",
        codec="smallest",
    )
    bundle = BundleManifest.load(tmp_path / "digits" / "1" / "bundles" / "d2")
    sizes, codec = bundle.parity["offload_bytes"], bundle.smashed.codec
    assert sizes[codec] == max(sizes.values())  # all smaller ones were tried before
    allowed = int(0.005 * len(digits.x_test))
    changes = bundle.parity["offload_changes"]
    assert [tried for tried in changes if changes[tried] <= allowed] == [codec]
