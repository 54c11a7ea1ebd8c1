from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from edge_sdk import EdgeAgent
from edge_sdk.errors import SplitedgeError
from edge_sdk.gate_form import read_gate
from edge_sdk.manifest import BundleManifest, ModelManifest
from edge_sdk.nets import Supernet
from edge_sdk.training.data.load import load_dataset
from exporters.cli import app
from server.training.report.uncertainty import uncertainty_of


@pytest.fixture(scope="module")
def weights(tiny: Supernet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_file(tiny.state_dict(), path)
    return path


def arguments(trained: Path, out: Path, **changed: str) -> list[str]:
    options = {
        "backbone": "tiny",
        "weights": str(trained),
        "data": "digits",
        "out": str(out),
        "name": "digits",
        "depth": "1",
    } | changed
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def test_command_publishes_a_model_and_prints_it_as_json(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "digits" / "4").mkdir(parents=True)
    run = CliRunner().invoke(app, [*arguments(weights, tmp_path), "--json"])
    assert run.exit_code == 0, run.stderr
    result = json.loads(run.stdout)
    assert (result["name"], result["version"]) == ("digits", "5")
    assert result["bundles"][0]["variant"] == "d1"
    assert result["bundles"][0]["bytes"] > 3000
    manifest = ModelManifest.load(Path(result["path"]))
    assert manifest.cuts == (1,)
    # int8 may be faster on this machine or not: the list must agree with the files
    folders = {path.name for path in (Path(result["path"]) / "bundles").iterdir()}
    assert folders == set(manifest.variants)
    assert ("left out: d1-int8" in run.stderr) == ("d1-int8" not in manifest.variants)
    assert "published" in run.stderr


@pytest.mark.parametrize("gate", ["all(entropy, margin)", "any(vacuity:0.5, entropy)"])
def test_gate_is_measured_fitted_and_the_devices_gate(
    weights: Path, tmp_path: Path, gate: str
) -> None:
    run = CliRunner().invoke(
        app, [*arguments(weights, tmp_path, gate=gate, int8="never"), "--json"]
    )
    assert run.exit_code == 0, run.output + str(run.exception)
    folder = Path(json.loads(run.stdout)["path"]) / "bundles" / "d1"
    manifest = BundleManifest.load(folder)
    published = read_gate(manifest.gate.policy)
    asked = read_gate(gate)
    assert [term.kind for term in published.terms] == [term.kind for term in asked.terms]
    for term, wanted in zip(published.terms, asked.terms, strict=True):
        assert term.scale is not None
        assert wanted.scale in (None, term.scale)
    data = load_dataset("digits")
    with EdgeAgent.from_bundle(folder) as agent:
        answers = [agent.predict(x) for x in data.x_test[:200]]
    logits = exit_logits(folder, data.x_test[:200])
    torch_u = uncertainty_of(published, torch.from_numpy(logits)).numpy()
    np.testing.assert_allclose([answer.uncertainty for answer in answers], torch_u, rtol=1e-6)
    assert {answer.threshold for answer in answers} == {manifest.gate.threshold}
    # 0 where no threshold is as accurate as the server alone
    assert manifest.gate.threshold in {0.0, *(point.threshold for point in manifest.gate.curve)}
    assert manifest.parity["gate_changes"] == 0


def exit_logits(folder: Path, x: Any) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "exit.onnx")
    return np.concatenate([session.run(["logits"], {"x": row[None]})[0] for row in x])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gate": "all(entropy)"}, "--gate 'all(entropy)': expected two or more measures"),
        ({"weights": "nowhere.safetensors"}, "nowhere.safetensors: expected a .safetensors"),
        ({"weights": __file__}, "expected a safetensors file"),
        ({"backbone": "cnn6", "data": "FIXTURE"}, "expected the weights of cnn6"),
        ({"backbone": "giant"}, "giant"),
        ({"data": "moons"}, "digits"),
        ({"name": "My Model"}, "a-z, 0-9"),
        ({"depth": "9"}, "some of 1, 2, 3, 4"),
    ],
)
def test_mistakes_are_told_in_one_line(
    weights: Path,
    tmp_path: Path,
    fashion_mnist_fixture: Path,
    changed: dict[str, str],
    message: str,
) -> None:
    if "data" in changed:
        changed["data"] = changed["data"].replace("FIXTURE", str(fashion_mnist_fixture))
    run = CliRunner().invoke(app, arguments(weights, tmp_path, **changed))
    assert isinstance(run.exception, SplitedgeError)  # `splitedge` shows these as one line
    assert message in str(run.exception)
    assert len(str(run.exception).splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.deadline
def test_help_shows_an_example_without_loading_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from exporters.cli import app\n"
        "run = CliRunner().invoke(app, ['--help'])\n"
        "assert run.exit_code == 0\n"
        "assert 'splitedge export --backbone tiny' in ' '.join(run.stdout.split())\n"
        "assert not {'torch', 'onnx', 'onnxruntime'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)
