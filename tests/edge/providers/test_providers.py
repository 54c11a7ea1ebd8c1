"""Execution providers: what is there, what passes its trial, and who answers in the end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.bundles import lifecycle
from edge_sdk.bundles.golden import takes_overrides
from edge_sdk.bundles.lifecycle import _provider
from edge_sdk.bundles.store import ActiveBundle
from edge_sdk.bundles.trial import run_trial
from edge_sdk.errors import BundleError, ConfigurationError, UpdateRefusedError
from edge_sdk.manifest import BundleManifest
from edge_sdk.providers.choice import FILE_NAME, KeptTrials, ProviderTrial, fastest
from edge_sdk.session import Array, Session, available_providers, onnxruntime_version
from edge_sdk.settings import Learn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.edge.digits import Digits


@pytest.fixture
def active(digits: Digits) -> ActiveBundle:
    folder = digits.models / "digits" / "1" / "bundles" / "d2"
    return ActiveBundle("a", folder, BundleManifest.load(folder), "digest")


def missing() -> str:
    """A provider that this onnxruntime does not have."""
    return next(name for name in ("xnnpack", "tensorrt") if name not in available_providers())


def test_the_fastest_that_passed_is_taken_if_it_is_clearly_faster() -> None:
    cpu = ProviderTrial(1.0)
    assert fastest({"cpu": cpu, "openvino": ProviderTrial(0.8)}) == "openvino"
    assert fastest({"cpu": cpu, "openvino": ProviderTrial(0.95)}) == "cpu"
    assert fastest({"cpu": cpu, "cuda": ProviderTrial(None, "golden logits missed")}) == "cpu"
    three = {"cpu": cpu, "cuda": ProviderTrial(0.2), "openvino": ProviderTrial(0.5)}
    assert fastest(three) == "cuda"
    assert fastest({"cpu": ProviderTrial(None, "out of memory"), "cuda": ProviderTrial(9.0)}) == (
        "cuda"
    )


def test_a_provider_that_is_not_there_is_refused_with_what_is(
    active: ActiveBundle, tmp_path: Path
) -> None:
    name = missing()
    with pytest.raises(ConfigurationError, match=f"provider {name}: this onnxruntime has cpu"):
        _provider(active, AgentSettings(provider=name), tmp_path)
    with pytest.raises(ConfigurationError, match=f"provider {name}"):
        EdgeAgent.from_bundle(active.folder, AgentSettings(offload=False, provider=name))
    with pytest.raises(ConfigurationError, match="provider: expected one of auto, cpu"):
        AgentSettings(provider="gpu")
    with pytest.raises(BundleError, match=f"provider {name} does not start here"):
        Session(active.folder / active.manifest.graphs["exit"].file, provider=name, quiet=True)


def test_a_provider_that_fails_its_trial_leaves_the_answers_to_the_cpu(
    active: ActiveBundle,
    digits: Digits,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The child of the trial finds that the provider's library is not there, as it is where
    onnxruntime was built with a driver that the machine lacks.
    """
    name = missing()
    monkeypatch.setattr(lifecycle, "available_providers", lambda: ("cpu", name))
    with pytest.raises(UpdateRefusedError, match="does not start here"):
        run_trial(active.folder, provider=name)
    monkeypatch.setattr("edge_sdk.providers.choice.NOT_AUTOMATIC", ())
    assert _provider(active, AgentSettings(), tmp_path) == "cpu"
    kept = json.loads((tmp_path / FILE_NAME).read_text())["digest"]["trials"]
    assert kept["cpu"]["latency_ms"] > 0
    assert list(kept) == ["cpu"]  # it may be there at the next start
    assert _provider(active, AgentSettings(provider=name), tmp_path) == "cpu"
    assert "; the CPU answers" in caplog.text
    with EdgeAgent.from_bundle(active.folder) as agent:
        assert agent.status().provider == "cpu"
        agent.predict(digits.x[0])


def test_only_what_another_trial_would_not_change_is_kept(tmp_path: Path) -> None:
    outcomes = {
        "cpu": ProviderTrial(2.0),
        "cuda": ProviderTrial(None, "out of memory", lasting=False),
        "openvino": ProviderTrial(None, "golden logits missed"),
        "xnnpack": ProviderTrial(1.0, overrides=False),
    }
    tried: list[str] = []

    def attempt(name: str) -> ProviderTrial:
        if tried:  # what was tried before is on the disk already
            assert "digest" in json.loads((tmp_path / FILE_NAME).read_text())
        tried.append(name)
        return outcomes[name]

    def tries(asked: str = "auto") -> list[str]:
        tried.clear()
        found = KeptTrials(tmp_path, "digest", "1.0", attempt, asked=asked).of(list(outcomes))
        assert found == outcomes
        return list(tried)

    assert tries() == list(outcomes)
    assert tries() == ["cuda"]
    assert tries(asked="openvino") == ["cuda", "openvino"]
    assert tries(asked="xnnpack") == ["cuda"]
    written = json.loads((tmp_path / FILE_NAME).read_text())
    shapes: list[Any] = [[], {"digest": []}, {"digest": {"onnxruntime": "1.0", "trials": [1]}}]
    for wrong in shapes:
        (tmp_path / FILE_NAME).write_text(json.dumps(wrong))
        assert tries() == list(outcomes), wrong
    shapes = [None, [], {}, {"latency_ms": "fast"}, {"latency_ms": None, "why": 3}]
    for trial in shapes:
        written["digest"]["trials"]["cpu"] = trial
        (tmp_path / FILE_NAME).write_text(json.dumps(written))
        assert tries() == ["cpu", "cuda"], trial


def test_a_trial_that_was_not_finished_in_its_time_is_made_again_after_a_day(
    active: ActiveBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that hangs would else cost a minute before the first answer of each start."""
    name = missing()
    settings = AgentSettings(provider=name)
    monkeypatch.setattr(lifecycle, "available_providers", lambda: ("cpu", name))
    with monkeypatch.context() as short:
        short.setattr("edge_sdk.bundles.trial.TIMEOUT_S", 0.01)
        assert _provider(active, settings, tmp_path) == "cpu"
    before = (tmp_path / FILE_NAME).read_text()
    assert _provider(active, settings, tmp_path) == "cpu"
    assert (tmp_path / FILE_NAME).read_text() == before
    kept = json.loads(before)["digest"]["trials"][name]
    assert kept["why"] == "trial: not finished after 0.01 s"

    tried: list[str] = []

    def attempt(provider: str) -> ProviderTrial:
        tried.append(provider)
        return ProviderTrial(None, "golden logits missed")

    def tries(now: float) -> list[str]:
        tried.clear()
        (tmp_path / FILE_NAME).write_text(before)
        version = json.loads(before)["digest"]["onnxruntime"]
        KeptTrials(tmp_path, "digest", version, attempt, asked=name, clock=lambda: now).of([name])
        return list(tried)

    assert tries(kept["again_at"] - 1) == []
    assert tries(kept["again_at"]) == [name]
    assert tries(0.0) == [name], "a clock that was set back must not keep it for years"


def test_a_provider_that_takes_weights_for_constants_serves_fixed_weights_alone(
    active: ActiveBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As OpenVINO 1.24 does: nothing is said, and personal weights have no effect."""

    class Constant(Session):
        """A session as of a compiler that has folded the weights into its code."""

        def override(self, values: Mapping[str, Array]) -> None:
            super().override({})

    path = active.folder / active.manifest.graphs["exit"].file
    x = np.zeros((1, *active.manifest.input.shape), np.float32)
    assert takes_overrides(active.folder, active.manifest, {"exit": Session(path)}, x)
    assert not takes_overrides(active.folder, active.manifest, {"exit": Constant(path)}, x)

    trials = {
        "cpu": {"latency_ms": 1.0, "why": "", "overrides": True},
        "openvino": {"latency_ms": 0.5, "why": "", "overrides": False},
    }
    entry = {"onnxruntime": onnxruntime_version(), "trials": trials}
    (tmp_path / FILE_NAME).write_text(json.dumps({active.digest: entry}))
    monkeypatch.setattr(lifecycle, "available_providers", lambda: ("cpu", "openvino"))
    for wanted in ("auto", "openvino"):
        fixed = AgentSettings(provider=wanted)
        assert _provider(active, fixed, tmp_path) == "openvino"
        assert _provider(active, replace(fixed, learn=Learn()), tmp_path) == "cpu"
