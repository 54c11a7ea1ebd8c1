from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import helper
from PIL import Image
from torch import nn
from typer.testing import CliRunner, Result

from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.errors import SplitedgeError
from edge_sdk.gate_form import read_gate
from edge_sdk.manifest import BundleManifest, ModelManifest, TensorSpec
from edge_sdk.training.data.load import Dataset
from edge_sdk.wire.codecs import decode, encode
from exporters.adopt.cli import app
from exporters.adopt.graph.preprocess import Preprocessing
from exporters.adopt.inputs import as_inputs, doubts, open_inputs, origin_of_names
from exporters.errors import ExportError
from profiles.cost import CostTable
from server.backend.ladder import Entry, LadderEngine
from tests.exporting.adopt.conftest import export, recurrent

Array = NDArray[Any]
ROOT = Path(__file__).parents[3]


def run(model: Path, data: object, out: Path, *more: str) -> Result:
    words = [str(model), "--data", str(data), "--name", "digits", "--out", str(out), *more]
    return CliRunner().invoke(app, words)


def refused(model: Path, data: object, out: Path, *more: str) -> str:
    result = run(model, data, out, *more)
    assert isinstance(result.exception, SplitedgeError), result.output
    assert not list(out.glob("digits/*"))
    text = str(result.exception)
    assert len(text.splitlines()) == 1
    return text


@pytest.fixture(scope="module")
def adopted(
    small_onnx: Path, unlabelled: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Result, dict[str, Any]]:
    """The folder of the model, what the command printed, and its report."""
    out = tmp_path_factory.mktemp("models")
    report = out / "report.json"
    result = run(small_onnx, unlabelled, out, "--report", str(report))
    assert result.exit_code == 0, result.output + str(result.exception)
    return out / "digits" / "1", result, json.loads(report.read_bytes())


def test_folder_is_that_of_any_export(adopted: Any) -> None:
    folder, _, report = adopted
    manifest = ModelManifest.load(folder)
    depths = [cut["depth"] for cut in report["cuts"]]
    assert list(manifest.cuts) == depths
    assert (manifest.input.dtype, manifest.input.shape) == ("float32", (1, 8, 8))
    assert {path.name for path in folder.iterdir()} == {"model.json", "segments", "bundles"}
    assert {path.name for path in (folder / "bundles").iterdir()} == set(manifest.variants)
    assert {f"d{depth}" for depth in depths} <= set(manifest.variants)
    files = {path.name for path in (folder / "segments").iterdir()}
    assert files == {segment.file for segment in manifest.segments}
    cost = CostTable.from_dict(manifest.cost)
    assert cost.depths == tuple(depths)
    assert len(cost.stages) == manifest.stages
    for variant in manifest.variants:
        bundle = BundleManifest.load(folder / "bundles" / variant)
        assert bundle.graphs["exit"].overridable == ("head.weight", "head.bias")
        assert any(point.threshold == bundle.gate.threshold for point in bundle.gate.curve)


def test_report_has_the_fixed_keys(adopted: Any) -> None:
    _, _, report = adopted
    assert report["model"] == "digits"
    assert report["classes"] == 10
    assert report["labelled"] is False
    assert report["seconds"] > 0
    for cut in report["cuts"]:
        fixed = {
            "depth", "tensor", "z_bytes", "x_bytes", "device_share", "exit_rate", "agreement",
            "hybrid_agreement",
        }  # fmt: skip
        assert fixed <= set(cut)
        assert not {"accuracy", "hybrid_accuracy", "whole_accuracy"} & set(cut)
        assert cut["x_bytes"] == 256
        assert 0 < cut["device_share"] < 1


def test_smallest_codec_keeps_the_answers_in_fewer_bytes(
    adopted: Any, small_onnx: Path, unlabelled: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    words = "--codec", "smallest", "--int8", "never", "--report", str(report)
    result = run(small_onnx, unlabelled, tmp_path / "models", *words)
    assert result.exit_code == 0, result.output + str(result.exception)
    _, _, before = adopted
    cuts = json.loads(report.read_bytes())["cuts"]
    for cut, default in zip(cuts, before["cuts"], strict=True):
        folder = tmp_path / "models" / "digits" / "1" / "bundles" / f"d{cut['depth']}"
        bundle = BundleManifest.load(folder)
        assert bundle.smashed.codec == cut["codec"] != default["codec"]
        assert cut["z_bytes"] < default["z_bytes"]
        assert bundle.parity["offload_changes"][cut["codec"]] <= 0.005 * bundle.parity["samples"]
        assert cut["hybrid_agreement"] > default["hybrid_agreement"] - 0.02


def test_bytes_of_a_plain_codec_are_those_of_its_values(adopted: Any) -> None:
    widths = {"fp32": 4, "fp16": 2, "int8": 1}
    for cut in adopted[2]["cuts"]:
        assert cut["z_bytes"] == widths[cut["codec"]] * np.prod(cut["z_shape"])


def test_unknown_codec_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    text = refused(tmp_path / "no.onnx", tmp_path / "no", tmp_path, "--codec", "gzip")
    assert text.startswith("--codec: expected one of auto, smallest, fp32"), text


def test_figures_are_those_of_the_published_graphs_on_the_test_part(
    adopted: Any, small_onnx: Path, digits: Dataset
) -> None:
    folder, _, report = adopted
    whole = oracle(small_onnx, digits.x_test).argmax(axis=1)
    for cut in report["cuts"]:
        bundle = folder / "bundles" / f"d{cut['depth']}"
        with EdgeAgent.from_bundle(bundle, AgentSettings(offload=False)) as agent:
            answers = [agent.predict(x) for x in digits.x_test]
        exits = np.array([each.uncertainty < each.threshold for each in answers])
        same = np.array([each.label for each in answers]) == whole
        assert exits.mean() == pytest.approx(cut["exit_rate"], abs=1 / len(exits))
        assert same[exits].mean() == pytest.approx(cut["agreement"], abs=2 / exits.sum())
        # what the server answers to the others: decoded z through the published segments
        manifest = ModelManifest.load(folder)
        engine = LadderEngine(folder, manifest)
        codec = BundleManifest.load(bundle).smashed.codec
        session = onnxruntime.InferenceSession(bundle / "exit.onnx")
        final = np.array([each.label for each in answers])
        for row in np.flatnonzero(~exits):
            (z,) = session.run(["z"], {"x": digits.x_test[row : row + 1]})
            (logits,) = engine.run([Entry(cut["depth"], decode(*encode(z, codec)))])
            final[row] = logits.argmax()
        assert (final == whole).mean() == pytest.approx(cut["hybrid_agreement"], abs=2 / len(exits))


def test_exits_answer_most_inputs_and_mostly_as_the_whole_model(adopted: Any) -> None:
    _, _, report = adopted
    assert report["cuts"][-1]["exit_rate"] > 0.5
    assert all(cut["agreement"] > 0.95 for cut in report["cuts"])


def test_served_answers_are_those_of_the_file(
    adopted: Any, small_onnx: Path, digits: Dataset
) -> None:
    folder, _, _ = adopted
    expected = oracle(small_onnx, digits.x_test[:33])
    engine = LadderEngine(folder, ModelManifest.load(folder))
    (logits,) = engine.run([Entry(0, digits.x_test[:33])])
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())


def test_it_says_what_it_read_and_ends_with_the_next_command(adopted: Any) -> None:
    _, result, _ = adopted
    assert "1,150 train, 288 held-out, 359 test" in result.stderr
    assert "raw input float32 (1, 8, 8), 10 classes" in result.stderr
    assert "classes: 0, 1, 2, 3, 4, ..., 9" in result.stderr
    last = result.stdout.strip().splitlines()[-1]
    assert last.startswith("Next: ")
    assert "splitedge server run --state" in last


def test_labels_add_accuracies(small_onnx: Path, tmp_path: Path) -> None:
    options = ("--labels", "--json", "--depth", "3", "--int8", "never")
    result = run(small_onnx, "digits", tmp_path / "models", *options)
    assert result.exit_code == 0, str(result.exception)
    report = json.loads(result.stdout)
    (cut,) = report["cuts"]
    assert report["labelled"]
    assert report["path"].endswith("models/digits/1")
    assert cut["whole_accuracy"] > 0.9
    assert cut["hybrid_accuracy"] > cut["whole_accuracy"] - 0.03


def test_gate_of_several_measures_keeps_the_agreement(
    small_onnx: Path, unlabelled: Path, tmp_path: Path
) -> None:
    gate = "any(vacuity, margin)"
    report = tmp_path / "report.json"
    more = ("--gate", gate, "--report", str(report), "--depth", "2", "--int8", "never")
    assert run(small_onnx, unlabelled, tmp_path, *more).exit_code == 0
    [cut] = json.loads(report.read_bytes())["cuts"]
    bundle = BundleManifest.load(tmp_path / "digits" / "1" / "bundles" / "d2")
    assert bundle.gate.policy == cut["gate"]
    form = read_gate(cut["gate"])
    assert [term.kind for term in form.terms] == ["vacuity", "margin"]
    assert all(term.scale is not None for term in form.terms)
    assert cut["exit_rate"] > 0.3
    assert cut["agreement"] > 0.95


def test_depth_that_was_asked_for_is_published_though_z_is_larger(
    small_onnx: Path, unlabelled: Path, tmp_path: Path
) -> None:
    result = run(small_onnx, unlabelled, tmp_path, "--depth", "1", "--int8", "never")
    assert result.exit_code == 0, str(result.exception)
    assert ModelManifest.load(tmp_path / "digits" / "1").cuts == (1,)
    assert "warning: depth 1: an offload takes 512 bytes, the input itself 256" in result.stderr


def test_versions_follow_and_are_never_overwritten(
    small_onnx: Path, unlabelled: Path, tmp_path: Path
) -> None:
    (tmp_path / "digits" / "4").mkdir(parents=True)
    options = ("--depth", "7", "--int8", "never")
    assert run(small_onnx, unlabelled, tmp_path, *options).exit_code == 0
    assert (tmp_path / "digits" / "5" / "model.json").is_file()
    again = run(small_onnx, unlabelled, tmp_path, *options, "--version", "5")
    assert "exists already" in str(again.exception)


def test_few_samples_warn_and_are_enough(small_onnx: Path, digits: Dataset, tmp_path: Path) -> None:
    np.savez(tmp_path / "few.npz", x_train=digits.x_train[:48])
    result = run(small_onnx, tmp_path / "few.npz", tmp_path, "--depth", "7", "--int8", "never")
    assert result.exit_code == 0, str(result.exception)
    assert result.output.count("48 samples are few") == 1
    assert "pixels reach the model" not in result.output  # arrays are as their maker wants them


def test_few_of_many_samples_warn_and_name_the_option(
    small_onnx: Path, unlabelled: Path, tmp_path: Path
) -> None:
    """The test part is as large as ever: the total is no measure of what heads learn from."""
    options = ("--depth", "7", "--int8", "never", "--samples")
    result = run(small_onnx, unlabelled, tmp_path, *options, "40")
    assert result.exit_code == 0, str(result.exception)
    assert "40 samples for heads and thresholds are few, 8 of them for the" in result.output
    assert "400 or more (--samples)" in result.output
    result = run(small_onnx, unlabelled, tmp_path, *options, "5")
    assert result.exit_code == 2
    assert "--samples" in result.output


def test_pictures_for_floats_are_said_to_be_0_to_255(
    small_onnx: Path, digits: Dataset, tmp_path: Path
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for row in range(48):
        pixels = np.round(digits.x_test[row, 0] * 255 / 16).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{row}.png")
    options = ("--depth", "7", "--int8", "never")
    result = run(small_onnx, folder, tmp_path / "models", *options)
    assert result.exit_code == 0, str(result.exception)
    assert result.output.count("pixels reach the model as 0..255") == 1
    assert "(for 0..1: --mean 0 --std 255)" in result.output
    raw = TensorSpec("float32", (1, 8, 8))
    samples = as_inputs(open_inputs(str(folder), raw, most=48), raw)
    for told in (
        Preprocessing(mean=(0.0,), std=(255.0,)),
        Preprocessing(input="float32"),
        Preprocessing(graph=small_onnx),
    ):
        assert not doubts(str(folder), samples, raw, told)
    assert doubts(str(folder), samples, raw, Preprocessing(layout="nchw"))
    assert not doubts(str(folder), samples, replace(raw, dtype="uint8"), Preprocessing())


def test_windows_of_the_other_order_are_refused_with_the_option_that_turns_them(
    tmp_path: Path,
) -> None:
    np.savez(tmp_path / "windows.npz", x_train=np.zeros((8, 3, 16), np.float32))
    raw = TensorSpec("float32", (16, 3))
    windows = open_inputs(str(tmp_path / "windows.npz"), raw, most=8)
    with pytest.raises(ExportError, match=r"\(16, 3\).*got \(3, 16\).*--layout nchw if they are"):
        as_inputs(windows, raw)
    # three means told that the model has its channels last, and its windows were not turned
    with pytest.raises(ExportError, match=r"--layout nhwc is .* has itself; .* --layout nchw"):
        as_inputs(windows, raw, layout="nhwc")


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_windows_of_the_models_own_shape_are_not_turned(
    make_graph: Callable[..., Path], tmp_path: Path, layout: str
) -> None:
    random = np.random.default_rng(0)
    sizes = {"w": (4, 3, 5), "u": (8, 4, 3), "v": (8, 5)}
    weights = {name: random.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Relu", ["c"], ["h"]),
        helper.make_node("Conv", ["h", "u"], ["d"]),
        helper.make_node("GlobalAveragePool", ["d"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["y"]),
    ]
    model = make_graph(nodes, weights=weights, given=("n", 3, 16), made=("n", 5))
    data = tmp_path / "windows.npz"
    np.savez(data, x_train=random.normal(size=(60, 3, 16)).astype(np.float32))
    result = run(model, data, tmp_path / "models", "--layout", layout, "--int8", "never")
    assert result.exit_code == 0, str(result.exception)
    assert "raw input float32 (3, 16)" in result.output


def test_names_of_classes_are_told_with_where_they_come_from(digits: Dataset) -> None:
    samples = open_inputs("digits", TensorSpec("float32", (1, 8, 8)), most=100)
    letters = tuple("abcdefghij")
    assert origin_of_names(letters, letters, samples) == "classes: a, b, c, d, e, ..., j, as given"
    named = replace(samples, class_names=letters)
    assert "another order, give --class-names" in origin_of_names(letters, None, named)
    assert "--class-names gives them names" in origin_of_names(("0", "1"), None, samples)


class Tenths(nn.Module):
    """Takes pixels from 0 to 1, as many frameworks do, where the digits go from 0 to 16."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(16 * x)
        return logits


def test_folder_of_pictures_and_names_of_classes(
    small: nn.Module, digits: Dataset, tmp_path: Path
) -> None:
    example = torch.zeros(1, 1, 8, 8)
    model = export(Tenths(small), example, tmp_path / "tenths.onnx", batch=False)
    for row in range(80):
        folder = tmp_path / "pictures" / "abcdefghij"[digits.y_test[row]]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.round(digits.x_test[row, 0] * 255 / 16).astype(np.uint8)
        larger = Image.fromarray(pixels).resize((24, 24), Image.Resampling.NEAREST)
        larger.save(folder / f"{row}.png")
    (tmp_path / "pictures" / "a" / "broken.png").write_text("no picture")
    names = tmp_path / "names.txt"
    names.write_text("\n".join("abcdefghij") + "\n")
    options = (
        "--labels", "--class-names", str(names), "--input", "uint8", "--mean", "0", "--std", "255",
        "--json", "--int8", "never",
    )  # fmt: skip
    result = run(model, tmp_path / "pictures", tmp_path / "models", *options)
    assert result.exit_code == 0, str(result.exception)
    assert "51 train, 13 held-out, 16 test; 1 skipped (damaged files)" in result.stderr
    assert "batch" in result.stderr
    manifest = ModelManifest.load(tmp_path / "models" / "digits" / "1")
    assert manifest.class_names == tuple("abcdefghij")
    assert manifest.input.dtype == "uint8"
    assert json.loads(result.stdout)["cuts"][0]["whole_accuracy"] > 0.7


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("UNLABELLED", ("--labels",), "--labels: expected labels"),
        ("UNLABELLED", ("--agreement", "1.2"), "--agreement: expected above 0 to 1"),
        ("UNLABELLED", ("--depth", "99"), "--depth 99: expected 1 to"),
        ("UNLABELLED", ("--mean", "a,b", "--std", "1"), "--mean: expected numbers"),
        ("UNLABELLED", ("--resize", "9by9"), "--resize: expected"),
        ("UNLABELLED", ("--resize", "16x16"), "expected samples of shape (1, 16, 16)"),
        ("UNLABELLED", ("--shape", "3,8,8"), "--shape 3,8,8"),
        ("UNLABELLED", ("--class-names", "CLASSES"), "class names: expected 10 different"),
        ("HALVES", ("--input", "uint8"), "--input uint8: expected whole numbers"),
        ("nothing", (), "expected digits, fashion-mnist=DIR"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(
    small_onnx: Path,
    unlabelled: Path,
    tmp_path: Path,
    data: str,
    options: tuple[str, ...],
    message: str,
) -> None:
    (tmp_path / "classes.txt").write_text("one\ntwo\n")
    np.savez(tmp_path / "halves.npz", x_train=np.full((9, 1, 8, 8), 0.5))
    data = {"UNLABELLED": str(unlabelled), "HALVES": str(tmp_path / "halves.npz")}.get(data, data)
    words = [word.replace("CLASSES", str(tmp_path / "classes.txt")) for word in options]
    assert message in refused(small_onnx, data, tmp_path / "models", *words)


def test_values_that_are_not_finite_are_refused(
    make_graph: Callable[..., Path],
    convolution: tuple[list[Any], dict[str, Array]],
    unlabelled: Path,
    tmp_path: Path,
) -> None:
    nodes, weights = convolution
    nodes.append(helper.make_node("Sqrt", ["scores"], ["y"]))
    text = refused(make_graph(nodes, weights=weights), unlabelled, tmp_path / "models")
    assert "NaN or infinity" in text


def test_sample_by_sample_where_a_batch_changes_the_answers(
    make_graph: Callable[..., Path],
    convolution: tuple[list[Any], dict[str, Array]],
    unlabelled: Path,
    digits: Dataset,
    tmp_path: Path,
) -> None:
    nodes, weights = convolution
    nodes[1] = helper.make_node("Relu", ["c"], ["r"])
    nodes.insert(2, helper.make_node("ReduceMean", ["r"], ["h"], axes=[0], keepdims=1))
    nodes.append(helper.make_node("Identity", ["scores"], ["y"]))
    model = make_graph(nodes, weights=weights, given=(1, 1, 8, 8), made=(1, 10))
    result = run(model, unlabelled, tmp_path / "models", "--int8", "never", "--depth", "3")
    assert result.exit_code == 0, str(result.exception)
    assert "one by one" in " ".join(result.stderr.split())
    folder = tmp_path / "models" / "digits" / "1"
    (logits,) = LadderEngine(folder, ModelManifest.load(folder)).run([Entry(0, digits.x_test[:6])])
    expected = np.concatenate([oracle(model, digits.x_test[i : i + 1]) for i in range(6)])
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())


def test_recurrent_network_is_published_and_answers_as_the_file_does(
    make_graph: Callable[..., Path], tmp_path: Path
) -> None:
    nodes, weights = recurrent("LSTM")
    model = make_graph(nodes, weights=weights, given=("n", 8, 8))
    x = np.random.default_rng(0).normal(size=(100, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "windows.npz", x_train=x)
    result = run(model, tmp_path / "windows.npz", tmp_path / "models", "--int8", "never")
    assert result.exit_code == 0, str(result.exception)
    folder = tmp_path / "models" / "digits" / "1"
    engine = LadderEngine(folder, ModelManifest.load(folder))
    (logits,) = engine.run([Entry(0, x[:33])])
    expected = oracle(model, x[:33])
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())


def test_sigmoid_of_one_value_is_published_as_two_classes_with_their_names(
    make_graph: Callable[..., Path],
    convolution: tuple[list[Any], dict[str, Array]],
    digits: Dataset,
    tmp_path: Path,
) -> None:
    nodes, weights = convolution
    weights["v"] = weights["v"][:, :1] - weights["v"][:, :1].mean()
    nodes.append(helper.make_node("Sigmoid", ["scores"], ["y"]))
    model = make_graph(nodes, weights=weights, made=("n", 1))
    (tmp_path / "names.txt").write_text("no\nyes\n")
    yes = oracle(model, digits.x_train)[:, 0] > 0.5
    assert 0.05 < yes.mean() < 0.95
    np.savez(tmp_path / "two.npz", x_train=digits.x_train, y_train=yes.astype(np.int64))
    words = ["--int8", "never", "--labels", "--class-names", str(tmp_path / "names.txt"), "--json"]
    result = run(model, tmp_path / "two.npz", tmp_path / "models", *words)
    assert result.exit_code == 0, str(result.exception)
    assert json.loads(result.stdout)["cuts"][0]["whole_accuracy"] == 1
    manifest = ModelManifest.load(tmp_path / "models" / "digits" / "1")
    assert manifest.class_names == ("no", "yes")


def test_no_file_tells_of_the_machine_it_was_made_on(adopted: Any) -> None:
    folder, _, _ = adopted
    for path in folder.rglob("*.onnx"):
        raw = path.read_bytes()
        assert str(ROOT).encode() not in raw
        assert b"site-packages" not in raw
        onnx.checker.check_model(onnx.load(path), full_check=True)


def test_a_place_that_cannot_be_written_is_told_before_anything_takes_time(
    small_onnx: Path, unlabelled: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "models"):
        result = run(tmp_path / "no-model.onnx", unlabelled, out)
        assert isinstance(result.exception, SplitedgeError)
        assert f"--out {out / 'digits'}: expected a folder at {file}, got a file" in str(
            result.exception
        )
    more = ("--report", str(tmp_path))
    result = run(tmp_path / "no-model.onnx", unlabelled, tmp_path / "models", *more)
    assert f"--report {tmp_path}: expected a file at {tmp_path}, got a folder" in str(
        result.exception
    )
    assert file.read_text() == "mine"


@pytest.mark.deadline
def test_in_a_pipe_no_figure_is_cut_off_and_a_failed_probe_prints_nothing(
    make_graph: Callable[..., Path],
    convolution: tuple[list[Any], dict[str, Array]],
    tmp_path: Path,
) -> None:
    """A graph of batch 1 that no batch of 2 fits: onnxruntime would print its error in red."""
    nodes, weights = convolution
    nodes[2] = helper.make_node("Reshape", ["h", "one"], ["f"])
    weights["one"] = np.array([1, 256], np.int64)
    nodes.append(helper.make_node("Identity", ["scores"], ["y"]))
    model = make_graph(nodes, weights=weights, given=(1, 1, 8, 8), made=(1, 10))
    samples = tmp_path / "samples.npz"
    np.savez(samples, x_train=np.random.default_rng(0).normal(size=(60, 1, 8, 8)).astype("f4"))
    words = [str(model), "--data", str(samples), "--out", str(tmp_path / "models")]
    words += ["--name", "fixed", "--int8", "never"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "edge_sdk.cli", "adopt", *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert "onnxruntime" not in done.stderr.replace("loading torch and onnxruntime", "")
    assert "Non-zero status" not in done.stderr
    assert "…" not in done.stdout
    assert "hybrid" in done.stdout


@pytest.mark.deadline
def test_help_shows_an_example_without_loading_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner, Result\n"
        "from exporters.adopt.cli import app\n"
        "run = CliRunner().invoke(app, ['--help'])\n"
        "assert run.exit_code == 0\n"
        "assert 'splitedge adopt model.onnx --data pictures' in ' '.join(run.stdout.split())\n"
        "assert not {'torch', 'onnx', 'onnxruntime'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_command_is_one_of_splitedge() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    commands = project["project"]["entry-points"]["splitedge.commands"]
    assert commands["adopt"] == "exporters.adopt.cli:app"


def oracle(path: Path, x: Array) -> Array:
    """The file's answers, by onnxruntime."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    logits: Array = session.run(None, {session.get_inputs()[0].name: x})[0]
    return logits
