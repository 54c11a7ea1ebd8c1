"""Answers from personal weights: against torch and by hand, and weights that do not fit."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.bundles.personal_weights import PersonalWeights
from edge_sdk.bundles.runner import BundleRunner
from edge_sdk.bundles.store import BundleRecord, BundleStore, FileRecord
from edge_sdk.cli.main import main
from edge_sdk.errors import ConfigurationError, SplitedgeError
from edge_sdk.identity import Identity
from edge_sdk.manifest import BundleManifest
from edge_sdk.wire.messages import Reply

if TYPE_CHECKING:
    from tests.edge.digits import Digits

Array = NDArray[Any]
RUN = "0123456789abcdef"
ALONE = AgentSettings(offload=False, personal="home")
TOLERANCE = 1e-4  # float32 kernels of onnxruntime and torch add in other orders


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def bundle(digits: Digits, folder: Path, name: str = "digits", run: str = RUN) -> Path:
    """A copy of an export's bundle that says which run it is of."""
    copy = folder / f"bundle-{name}-{run}"
    shutil.copytree(digits.models / name / "1" / "bundles" / "d2", copy)
    fields = orjson.loads((copy / "manifest.json").read_bytes())
    (copy / "manifest.json").write_bytes(orjson.dumps(fields | {"run": run}))
    return copy


def install(state: Path, folder: Path) -> None:
    """Have the bundle in `folder` be the active one."""
    store = BundleStore(state)
    slot = store.inactive_slot()
    store.clear(slot)
    target = store.folder(slot)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    files = {
        path.name: FileRecord(hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size)
        for path in target.iterdir()
    }
    store.commit(slot, BundleRecord(BundleManifest.load(target).bundle, files))


def keep(state: Path, tensors: Mapping[str, Array], run: str = RUN, name: str = "home") -> None:
    """Save weights as a training does."""
    folder = state / "training"
    folder.mkdir(exist_ok=True)
    save_file(dict(tensors), folder / f"{name}.safetensors", metadata={"run": run})


@pytest.fixture
def device(digits: Digits, tmp_path: Path) -> Path:
    """A device with a bundle of run RUN."""
    state = tmp_path / "device"
    Identity("http://127.0.0.1:9", "pi-4", "default", "c0ffee" * 10).save(state)
    install(state, bundle(digits, tmp_path))
    return state


def own_head(digits: Digits) -> tuple[Any, dict[str, Array]]:
    """Another head for depth 2, and what a device that learnt it keeps."""
    head = deepcopy(digits.net.exit_head(2))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head, {f"exit2.{name}": tensor.numpy() for name, tensor in head.state_dict().items()}


def test_the_exit_head_is_the_devices_own(digits: Digits, device: Path) -> None:
    head, kept = own_head(digits)
    keep(device, kept | {"exit4.2.bias": np.zeros(10, np.float32)})  # of an earlier depth
    with torch.no_grad():
        logits = head(digits.net.prefix(2)(torch.from_numpy(digits.x[:20]))).numpy()
    assert (logits.argmax(1) != digits.exit_logits[:20].argmax(1)).any()
    with EdgeAgent.open(device, ALONE) as agent:
        for x, expected in zip(digits.x[:20], logits, strict=True):
            answer = agent.predict(x)
            assert answer.label == int(expected.argmax())
            np.testing.assert_allclose(answer.probabilities, softmax(expected), atol=TOLERANCE)
    with EdgeAgent.open(device, AgentSettings(offload=False)) as agent:  # the bundle's own again
        got = [agent.predict(x).label for x in digits.x[:20]]
    assert got == digits.exit_logits[:20].argmax(1).tolist()


def overridable(folder: Path, graph: str) -> dict[str, tuple[int, ...]]:
    from edge_sdk.session import Session

    return Session(folder / BundleManifest.load(folder).graphs[graph].file).overridable


def loaded(folder: Path, state: Path) -> BundleRunner:
    return BundleRunner(
        folder, BundleManifest.load(folder), ALONE, PersonalWeights.load(state, "home")
    )


def test_an_auxiliary_model_is_the_devices_own(
    digits: Digits, device: Path, tmp_path: Path
) -> None:
    """All zeros but for the last biases, so these are the logits of any input: by vacuity
    p = (1 + exp(b)) / S.
    """
    folder = bundle(digits, tmp_path, "pair")
    kept = {
        f"auxiliary.{name}": np.zeros(shape, np.float32)
        for name, shape in overridable(folder, "exit").items()
    }
    bias = np.linspace(-3, 3, 10).astype(np.float32)
    kept["auxiliary.head.bias"] = bias
    keep(device, kept)
    runner = loaded(folder, device)
    decision, z, _ = runner.exit(digits.x[0])
    assert z is None
    assert decision.label == 9
    if runner.manifest.gate.policy == "vacuity-exp":
        alpha = 1 + np.exp(bias)
        np.testing.assert_allclose(decision.probabilities, alpha / alpha.sum(), atol=TOLERANCE)
    else:
        np.testing.assert_allclose(decision.probabilities, softmax(bias), atol=TOLERANCE)


def test_a_last_layer_is_the_devices_own(digits: Digits, device: Path, tmp_path: Path) -> None:
    folder = bundle(digits, tmp_path, "triple")
    shapes = overridable(folder, "back")
    bias = np.linspace(3, -3, 10).astype(np.float32)
    kept = {"back.weight": np.zeros(shapes["back.weight"], np.float32), "back.bias": bias}
    keep(device, kept | {"back.accuracy": np.array(0.5, np.float32)})
    features = np.ones((1, shapes["back.weight"][1]), np.float32)
    reply = Reply("1" * 16, {"features": features})
    label, probabilities = loaded(folder, device).read(reply)
    assert label == 0
    np.testing.assert_allclose(probabilities, softmax(bias), atol=TOLERANCE)
    # a layer that was refitted when training ended comes first; another depth's does not count
    refitted = {f"answers2.{name}": value for name, value in kept.items()}
    refitted["answers2.back.bias"] = bias[::-1].copy()
    elsewhere = {"answers4.back.bias": np.zeros(10, np.float32)}
    keep(device, kept | refitted | elsewhere)
    label, probabilities = loaded(folder, device).read(reply)
    assert label == 9
    np.testing.assert_allclose(probabilities, softmax(bias[::-1]), atol=TOLERANCE)


def spoilt(kept: dict[str, Array], how: str) -> dict[str, Array]:
    match how:
        case "nan":
            kept["exit2.2.bias"][3] = np.nan
        case "part":
            del kept["exit2.2.bias"]
        case "depth":
            return {name.replace("exit2", "exit3"): value for name, value in kept.items()}
        case "shape":
            kept["exit2.2.bias"] = np.zeros(7, np.float32)
        case "nothing":
            return {"accuracy": np.zeros(1, np.float32)}
    return kept


@pytest.mark.parametrize(
    ("how", "warning"),
    [
        ("nan", "exit2.2.bias is not finite; train again"),
        ("part", "head.2.bias of exit.onnx is missing"),
        ("depth", "are exit3, but digits/1/d2 takes exit2"),
        ("shape", r"override head.2.bias \(7,\): this graph takes .*head.2.bias \(10,\)"),
        ("nothing", "are accuracy, but digits/1/d2 takes exit2"),
    ],
)
def test_weights_that_do_not_go_with_the_bundle_are_left_out(
    digits: Digits, device: Path, caplog: pytest.LogCaptureFixture, how: str, warning: str
) -> None:
    keep(device, spoilt(own_head(digits)[1], how))
    with caplog.at_level(logging.WARNING), EdgeAgent.open(device, ALONE) as agent:
        assert agent.status().personal is None
        assert agent.predict(digits.x[0]).label == int(digits.exit_logits[0].argmax())
    assert re.search(warning, caplog.text)


def test_a_bundle_that_does_not_say_its_run_takes_none(
    digits: Digits, device: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(device, bundle(digits, tmp_path, run=""))
    keep(device, own_head(digits)[1])
    with caplog.at_level(logging.WARNING), EdgeAgent.open(device, ALONE) as agent:
        assert agent.status().personal is None
    assert "does not name the training run that it was exported from" in caplog.text


def test_a_training_that_left_nothing_here_is_refused(digits: Digits, device: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"this device took part in \(none\), got 'home'"):
        EdgeAgent.open(device, ALONE)
    keep(device, own_head(digits)[1], name="work")
    for name in ("home", "../work", ""):
        with pytest.raises(ConfigurationError, match=r"took part in \(work\), got"):
            EdgeAgent.open(device, AgentSettings(offload=False, personal=name))
    (device / "training" / "home.safetensors").write_bytes(b"worn card")
    with pytest.raises(ConfigurationError, match=r"home\.safetensors: cannot be read"):
        EdgeAgent.open(device, ALONE)


def test_a_folder_without_a_device_has_no_personal_weights(digits: Digits) -> None:
    folder = digits.models / "digits" / "1" / "bundles" / "d2"
    with pytest.raises(ConfigurationError, match="needs a state folder"):
        EdgeAgent.from_bundle(folder, ALONE)


@pytest.mark.parametrize("same", [True, False])
def test_a_bundle_that_comes_later_answers_whatever_the_device_has(
    digits: Digits, device: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, same: bool
) -> None:
    """From another run it answers without personal weights, after a restart too, and warns."""
    head, kept = own_head(digits)
    keep(device, kept)
    other = bundle(digits, tmp_path / "next", run=RUN if same else "fedcba")
    fields = orjson.loads((other / "manifest.json").read_bytes())
    (other / "manifest.json").write_bytes(orjson.dumps(fields | {"bundle": "digits/2/d2"}))
    with torch.no_grad():
        own = head(digits.net.prefix(2)(torch.from_numpy(digits.x[:20]))).numpy().argmax(1)
    expected = own if same else digits.exit_logits[:20].argmax(1)
    with EdgeAgent.open(device, ALONE) as agent:
        install(device, other)
        with caplog.at_level(logging.WARNING), pytest.raises(SplitedgeError):
            agent.refresh()  # the server is not there, the bundle is
        assert agent.manifest.bundle == "digits/2/d2"
        assert [agent.predict(x).label for x in digits.x[:20]] == expected.tolist()
        assert agent.status().personal == ("home" if same else None)
    assert ("are from run 0123456789abcdef, but digits/2/d2" in caplog.text) is not same
    caplog.clear()
    with caplog.at_level(logging.WARNING), EdgeAgent.open(device, ALONE) as agent:
        assert [agent.predict(x).label for x in digits.x[:20]] == expected.tolist()
        assert agent.status().personal == ("home" if same else None)
    assert ("are from run 0123456789abcdef, but digits/2/d2" in caplog.text) is not same


def test_predict_takes_the_trainings_name(
    digits: Digits,
    device: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = {name: np.zeros_like(value) for name, value in own_head(digits)[1].items()}
    kept["exit2.2.bias"][7] = 5.0
    keep(device, kept)
    np.save(tmp_path / "x.npy", digits.x[:3])
    command = ["splitedge", "agent", "predict", str(tmp_path / "x.npy"), "--state", str(device)]
    monkeypatch.setattr("sys.argv", [*command, "--local", "--personal", "home", "--json"])
    with suppress(SystemExit):
        main()
    assert [row["label"] for row in json.loads(capsys.readouterr().out)] == [7, 7, 7]
    monkeypatch.setattr("sys.argv", [*command, "--local", "--personal", "work"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "took part in (home), got 'work'" in " ".join(capsys.readouterr().err.split())
