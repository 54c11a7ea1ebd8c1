"""Stages that a device adapted to its own data, in the graph that it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edge_sdk.bundles.personal_weights import PersonalWeights
from edge_sdk.bundles.runner import BundleRunner
from edge_sdk.errors import ConfigurationError
from edge_sdk.manifest import BundleManifest
from edge_sdk.nets import build
from edge_sdk.settings import AgentSettings
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.client_part import ClientPart, Distillation
from edge_sdk.training.protocol.fine_tuning import FineTuning
from edge_sdk.training.protocol.messages import Evaluate, Scores
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.weights import read_weights
from exporters.graphs import own_exit, shared_exit
from exporters.model import export_model

DEPTH = 2
CLASSES = 4
SHARED = ClientPart(exit_head=True, fusion="fixed")


def plan_of(part: ClientPart) -> Plan:
    return Plan(
        backbone="har_cnn",  # with BatchNorm
        input_shape=(9, 128),
        classes=CLASSES,
        mean=(0.0,) * 9,
        std=(1.0,) * 9,
        depth=DEPTH,
        training=Training(0.05, 16),
        part=part,
    )


@pytest.fixture(scope="module")
def samples() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    y = np.arange(120) % CLASSES
    x = random.normal(size=(120, 9, 128)) + y[:, None, None] * np.linspace(-1, 1, 9)[:, None]
    return x.astype(np.float32), y


def scored(
    part: ClientPart, samples: Any, how: FineTuning, *, personal: dict[str, torch.Tensor]
) -> tuple[TrainingClient, Scores]:
    """A client that training has ended for."""
    x, y = samples
    client = TrainingClient("pi", x[:60], y[:60], held_out=(x[60:], y[60:]))
    client.fine_tuning = how
    client.personal |= personal
    plan = plan_of(part)
    net = network_of(plan)
    weights = read_weights(net.segment(0, None))
    head = read_weights(net.exit_head(DEPTH))
    weights |= {f"exit{DEPTH}.{name}": tensor for name, tensor in head.items()}
    reply = client.handle(Evaluate(3, plan, weights))
    assert isinstance(reply, Scores)
    return client, reply


def runner_of(
    folder: Path, samples: Any, personal: dict[str, torch.Tensor] | None, device: Any
) -> BundleRunner:
    """The bundle of the shared network, on a device with these weights of its own."""
    x, y = samples
    net = build("har_cnn", classes=CLASSES, input_shape=(9, 128), seed=0).eval()
    if not folder.exists():
        names = [str(label) for label in range(CLASSES)]
        export_model(
            net, x, y, folder, name="har", version=1, class_names=names,
            depths=(DEPTH,), int8="never", device=device,
        )  # fmt: skip
    bundle = folder / "har" / "1" / "bundles" / f"d{DEPTH}"
    own = None
    if personal is not None:
        own = PersonalWeights("run", "abc", {k: t.cpu().numpy() for k, t in personal.items()})
    return BundleRunner(bundle, BundleManifest.load(bundle), AgentSettings(), own)


def right(runner: BundleRunner, samples: Any) -> int:
    x, y = samples[0][60:], samples[1][60:]
    return sum(runner.exit(row)[0].label == label for row, label in zip(x, y, strict=True))


def test_a_device_answers_with_the_stages_that_it_was_scored_with(
    samples: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def device(net: Any, depth: int) -> Any:
        return replace(shared_exit(net, depth, own_prefix=True), run="abc")

    client, scores = scored(SHARED, samples, FineTuning(40, 0.1), personal={})
    assert scores.right_exit is not None
    models = tmp_path / "models"
    plain = right(runner_of(models, samples, None, device), samples)
    assert right(runner_of(models, samples, client.personal, device), samples) == scores.right_exit
    assert scores.right_exit > plain + 10  # it did adapt
    # stages of another network do not fit: then the head of the device's last round answers
    head = {f"exit{DEPTH}.{n}": t for n, t in read_weights(build_head()).items()}
    alone = right(runner_of(models, samples, head, device), samples)
    other = dict(client.personal)
    other[f"answers{DEPTH}.prefix.stage1.0.bias"] = torch.zeros(7)
    caplog.clear()
    assert right(runner_of(models, samples, other | head, device), samples) == alone
    assert "keeps its own stages" in caplog.text
    damaged = dict(client.personal)
    damaged[f"answers{DEPTH}.prefix.stage1.0.bias"] = torch.full((32,), torch.nan)
    with pytest.raises(ConfigurationError, match=r"stage1\.0\.bias is not finite"):
        runner_of(models, samples, damaged, device)


def test_an_auxiliary_model_with_batch_norm_answers_as_it_was_scored(
    samples: Any, tmp_path: Path
) -> None:
    part = ClientPart(distil=Distillation(head="exit"))
    net = build("har_cnn", classes=CLASSES, input_shape=(9, 128), seed=5)
    x, y = (torch.from_numpy(values[:60]) for values in samples)
    model = torch.nn.Sequential(net.prefix(DEPTH), net.exit_head(DEPTH)).train()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimiser.step()
    kept = {f"auxiliary.extractor.{n}": t for n, t in read_weights(net.prefix(DEPTH)).items()}
    kept |= {f"auxiliary.head.{n}": t for n, t in read_weights(net.exit_head(DEPTH)).items()}
    client, scores = scored(part, samples, FineTuning(), personal=kept)

    def device(net: Any, depth: int) -> Any:
        return own_exit(net, depth, net.prefix(depth), net.exit_head(depth), run="abc")

    found = right(runner_of(tmp_path / "models", samples, client.personal, device), samples)
    assert found == scores.right_exit
    assert found > 45  # of 60: it knows its task


def build_head() -> torch.nn.Module:
    return build("har_cnn", classes=CLASSES, input_shape=(9, 128), seed=3).exit_head(DEPTH)
