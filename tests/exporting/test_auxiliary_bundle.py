"""BESplit's auxiliary model on a device: it answers by its evidence, the prefix by offloading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from edge_sdk.bundles.namespaces import AUXILIARY
from edge_sdk.bundles.runner import BundleRunner
from edge_sdk.gate.gate import vacuity_exp
from edge_sdk.manifest import BundleManifest
from edge_sdk.nets import Supernet
from edge_sdk.session import Session
from edge_sdk.settings import AgentSettings
from edge_sdk.training.client.auxiliary import Auxiliary, build_auxiliary
from edge_sdk.training.data.load import Dataset
from edge_sdk.training.formulas.evidence import evidential_losses
from edge_sdk.training.protocol.client_part import ClientPart, Distillation
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.protocol.training import Training
from exporters.graphs import own_exit
from exporters.model import export_model


def taught(data: Dataset, seed: int) -> Auxiliary:
    """W_A of a client that has seen some samples."""
    plan = Plan(
        backbone="tiny",
        input_shape=(1, 8, 8),
        classes=10,
        mean=data.mean,
        std=data.std,
        depth=2,
        training=Training(0.1, 32),
        part=ClientPart(distil=Distillation(head="exit")),
        seed=seed,
    )
    model = build_auxiliary(plan)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(60):
        rows = torch.randperm(len(data.x_train), generator=generator)[:64].numpy()
        x, y = torch.from_numpy(data.x_train[rows]), torch.from_numpy(data.y_train[rows])
        optimiser.zero_grad()
        evidential_losses(model(x), y, 0.01).mean().backward()  # type: ignore[no-untyped-call]  # torch
        optimiser.step()
    return model.eval()


@pytest.fixture(scope="module")
def model(digits: Dataset) -> Auxiliary:
    return taught(digits, 0)


@pytest.fixture(scope="module")
def bundle(
    tiny: Supernet, model: Auxiliary, digits: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("models")
    export_model(
        tiny,
        digits.x_test,
        digits.y_test,
        out,
        name="besplit",
        version=1,
        class_names=digits.class_names,
        depths=(2,),
        int8="never",
        device=lambda net, depth: own_exit(net, depth, model.extractor, model.head),
    )
    return out / "besplit" / "1" / "bundles" / "d2"


def test_the_device_answers_by_the_evidence_of_its_auxiliary_model(
    bundle: Path, model: Auxiliary, digits: Dataset
) -> None:
    manifest = BundleManifest.load(bundle)
    assert manifest.gate.policy == "vacuity-exp"
    runner = BundleRunner(bundle, manifest, AgentSettings())
    with torch.no_grad():
        logits = model(torch.from_numpy(digits.x_test[:100])).numpy()
    left = 0
    for x, row in zip(digits.x_test[:100], logits, strict=True):
        decision, z, _ = runner.exit(runner.check(x))
        label, _, uncertainty = vacuity_exp(row)
        assert z is None  # the prefix runs for an offload alone
        assert decision.label == label
        assert decision.uncertainty == pytest.approx(uncertainty, abs=1e-5)
        assert decision.exit == (decision.uncertainty < manifest.gate.threshold)
        left += decision.exit
    assert left > 0


def test_an_offload_sends_the_prefix_s_features(
    bundle: Path, tiny: Supernet, digits: Dataset
) -> None:
    manifest = BundleManifest.load(bundle)
    runner = BundleRunner(bundle, manifest, AgentSettings(codec="fp32"))
    x = digits.x_test[0]
    sent = runner.smashed(x, None)
    with torch.no_grad():
        expected = tiny.eval().prefix(2)(torch.from_numpy(x[None])).numpy()
    assert sent.name == "z2"
    np.testing.assert_allclose(sent.array, expected, atol=1e-5)


def test_another_client_s_own_weights_fit_the_same_bundle(bundle: Path, digits: Dataset) -> None:
    manifest = BundleManifest.load(bundle)
    other = taught(digits, 1)
    kept = {k: tensor.numpy() for k, tensor in AUXILIARY.select(other.read()).items()}
    assert set(manifest.graphs["exit"].overridable) == set(kept)
    session = Session(bundle / manifest.graphs["exit"].file)
    x = digits.x_test[:1]
    (before,) = session.run(["logits"], {"x": x})
    session.override(kept)
    (after,) = session.run(["logits"], {"x": x})
    with torch.no_grad():
        np.testing.assert_allclose(after, other(torch.from_numpy(x)).numpy(), atol=1e-4)
    assert np.abs(after - before).max() > 0.1


def test_the_curve_is_measured_on_vacuity(bundle: Path, model: Auxiliary, digits: Dataset) -> None:
    gate = BundleManifest.load(bundle).gate
    with torch.no_grad():
        logits = model(torch.from_numpy(np.ascontiguousarray(digits.x_test))).numpy()
    uncertain = np.array([vacuity_exp(row)[2] for row in logits])
    right = logits.argmax(1) == digits.y_test
    for point in gate.curve:
        exits = uncertain < point.threshold
        assert point.exit_rate == pytest.approx(exits.mean(), abs=2 / len(right))
        assert point.exit_accuracy == pytest.approx(right[exits].mean(), abs=0.02)
    assert gate.curve[-1].exit_rate == 1
