"""Manifests: what is written is read back; what does not say what it must is a ManifestError."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from edge_sdk.errors import ManifestError
from edge_sdk.manifest import BundleManifest, ModelManifest

Manifest = BundleManifest | ModelManifest

X = {"dtype": "uint8", "shape": [1, 28, 28]}
Z = {"dtype": "float32", "shape": [16, 14, 14]}
LOGITS = {"dtype": "float32", "shape": [10]}
CLASSES = [f"class {number}" for number in range(10)]

BUNDLE: dict[str, Any] = {
    "format": 1,
    "bundle": "fashion/3/d2-int8",
    "backbone": "cnn8",
    "depth": 2,
    "class_names": CLASSES,
    "input": X,
    "graphs": {
        "exit": {
            "file": "exit.ort",
            "precision": "int8",
            "inputs": {"x": X},
            "outputs": {"z2": Z, "logits": LOGITS},
            "overridable": ["head.weight", "head.bias"],
        },
        "back": {
            "file": "back.ort",
            "precision": "fp32",
            "inputs": {"features": LOGITS},
            "outputs": {"logits": LOGITS},
            "overridable": [],
        },
    },
    "smashed": {
        "name": "z2",
        "shape": [16, 14, 14],
        "codec": "fp16",
        "raw_input": False,
    },
    "gate": {
        "policy": "entropy",
        "threshold": 0.5,
        "curve": [
            {"threshold": 0.5, "exit_rate": 0.75, "exit_accuracy": 0.95, "accuracy": 0.9},
            {"threshold": 2, "exit_rate": 1, "exit_accuracy": 0.8, "accuracy": 0.8},
        ],
    },
    "golden": "golden.frame",
    "parity": {"logits_max_abs": 1e-5, "samples": 500, "more": [1, {"a": None}]},
}
MODEL: dict[str, Any] = {
    "format": 1,
    "name": "fashion",
    "version": "3",
    "backbone": "cnn8",
    "stages": 4,
    "cuts": [2, 3],
    "class_names": CLASSES,
    "input": X,
    "segments": [
        {"file": "0-2.onnx", "entry": 0, "exit": 2, "input": X, "output": Z},
        {"file": "2-3.onnx", "entry": 2, "exit": 3, "input": Z, "output": Z},
        {"file": "3-end.onnx", "entry": 3, "exit": None, "input": Z, "output": LOGITS},
    ],
    "decoders": [],
    "variants": ["d2", "d2-int8", "d3"],
    "cost": {"stages": []},
}
BOTH = [
    pytest.param(BUNDLE, BundleManifest.from_json, id="bundle"),
    pytest.param(MODEL, ModelManifest.from_json, id="model"),
]
Read = Callable[[bytes], Manifest]

DEEP: Any = []
for _ in range(900):
    DEEP = [DEEP]
JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3.7, 1e308, -(2**63), 2**64 - 1, "", "7", "x", "../../etc/passwd",
    "a/b/c", "float64", "x" * 5000, [], [[]], ["x"], [1], [1.5], [True], [-1], [2**62] * 2, [1] * 9,
    {}, {"x": 1}, {"dtype": "float32", "shape": "12"}, DEEP, {"a": DEEP},
)  # fmt: skip


def encoded(data: object) -> bytes:
    """JSON of anything: written piece by piece, because json.dumps exhausts the stack on DEEP."""
    if isinstance(data, dict):
        members = (json.dumps(key).encode() + b":" + encoded(value) for key, value in data.items())
        return b"{" + b",".join(members) + b"}"
    if data is DEEP:
        return b"[" * 901 + b"]" * 901
    if isinstance(data, list):
        return b"[" + b",".join(map(encoded, data)) + b"]"
    return json.dumps(data).encode()


def changed(source: dict[str, Any], path: str, value: object) -> bytes:
    """The manifest with the member at `path` (dotted, list places as numbers) set."""
    data = copy.deepcopy(source)
    *parents, last = (int(step) if step.isdigit() else step for step in path.split("."))
    at: Any = data
    for step in parents:
        at = at[step]
    at[last] = value
    return encoded(data)


def places(data: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every member and item."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    paths = []
    for step, value in items:
        paths.append((*above, step))
        if isinstance(value, dict | list):
            paths += places(value, (*above, step))
    return paths


@pytest.mark.parametrize(("source", "read"), BOTH)
def test_a_manifest_is_written_as_it_was_read(source: dict[str, Any], read: Read) -> None:
    manifest = read(json.dumps(source).encode())
    newer = {"run": ""} if source is BUNDLE else {}  # which older exports do not have
    assert json.loads(manifest.to_json()) == newer | source
    assert read(manifest.to_json()) == manifest


def test_a_bundle_may_say_which_run_of_a_training_it_is_of() -> None:
    source = BUNDLE | {"run": "c0ffee"}
    manifest = BundleManifest.from_json(json.dumps(source).encode())
    assert manifest.run == "c0ffee"
    assert json.loads(manifest.to_json()) == source


@pytest.mark.parametrize(("source", "read"), BOTH)
def test_the_order_of_members_does_not_change_the_bytes(source: dict[str, Any], read: Read) -> None:
    turned = dict(reversed(source.items()))
    assert (
        read(json.dumps(turned).encode()).to_json() == read(json.dumps(source).encode()).to_json()
    )


def test_a_bundle_manifest_says_what_the_device_needs() -> None:
    manifest = BundleManifest.from_json(json.dumps(BUNDLE).encode())
    assert (manifest.model, manifest.version) == ("fashion", "3")
    assert manifest.files == ("exit.ort", "back.ort", "golden.frame")
    assert manifest.graphs["exit"].outputs["z2"].shape == (16, 14, 14)
    assert manifest.gate.curve[1].threshold == 2.0


@pytest.mark.parametrize(("source", "read"), BOTH)
def test_every_missing_member_is_named(source: dict[str, Any], read: Read) -> None:
    for key in source.keys() - {"decoders"}:  # which 0.1.0 did not write
        data = {name: value for name, value in source.items() if name != key}
        with pytest.raises(ManifestError, match=f"'{key}' is missing"):
            read(json.dumps(data).encode())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", 2, "update splitedge"),
        ("format", "1", "format: expected a whole number, got '1'"),
        ("bundle", "fashion/3", "bundle: expected MODEL/VERSION"),
        ("bundle", "../3/d2", "bundle"),
        ("bundle", "fashion/3/d2\n", "bundle"),
        ("bundle", 3, "bundle: expected a string"),
        ("backbone", ["cnn8"], "backbone: expected a string"),
        ("depth", 0, "depth: expected at least 1, got 0"),
        ("depth", 2.0, "depth: expected a whole number, got 2.0"),
        ("depth", True, "depth"),
        ("class_names", ["one"], "class_names: expected at least 2"),
        ("class_names", "ab", "class_names: expected a list of strings"),
        ("class_names.0", 7, "class_names: expected a list of strings"),
        ("input", None, "input: expected an object, got None"),
        ("input.dtype", "float64", "dtype: expected one of float32"),
        ("input.shape", "12", "shape: expected a list of whole numbers, got '12'"),
        ("input.shape.0", 0, "shape: expected at most 8 sizes above 0"),
        ("input.shape", [2**24 + 1], "shape"),
        ("input.shape", [1] * 9, "shape"),
        ("graphs", [], "graphs: expected an object"),
        ("graphs", {}, "graphs: expected exit"),
        ("graphs.tail", BUNDLE["graphs"]["back"], "graphs: expected exit"),
        ("graphs.exit.file", "../exit.ort", "file: expected a plain file name"),
        ("graphs.exit.file", "/etc/passwd", "file"),
        ("graphs.exit.file", ".hidden", "file"),
        ("graphs.exit.file", "exit.ort\n", "file"),
        ("graphs.exit.file", "x" * 101, "file"),
        ("graphs.exit.precision", "fp16", "precision: expected one of fp32, int8"),
        ("graphs.exit.overridable", "head", "overridable: expected a list of strings"),
        ("smashed.shape", [-1], "shape"),
        ("smashed.codec", "fp8", "codec: expected one of fp32, fp16, int8, .*, got 'fp8'"),
        (
            "gate.policy",
            "luck",
            "gate policy: expected entropy, margin, vacuity, vacuity-exp, or a composition",
        ),
        ("gate.threshold", "nan", "threshold: expected a number, got 'nan'"),
        ("gate.curve", {}, "curve: expected a list of objects"),
        ("gate.curve.0", {"threshold": 1}, "'exit_rate' is missing"),
        ("gate.curve.0.accuracy", None, "accuracy: expected a number, got None"),
        ("golden", "a/b", "file"),
        ("parity", [], "parity: expected an object"),
        ("run", 7, "run: expected a string"),
        ("parity", {"a": DEEP}, "parity: expected at most 16 levels"),
    ],
)
def test_a_wrong_bundle_manifest_is_refused_saying_why(
    path: str, value: object, message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        BundleManifest.from_json(changed(BUNDLE, path, value))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", 2, "export again"),
        ("name", "../x", "bundle: expected MODEL/VERSION"),
        ("version", "3/..", "bundle"),
        ("variants.0", "../d2", "bundle"),
        ("class_names", ["one"], "class_names: expected at least 2"),
        ("cuts", [3, 2], "cuts: expected ascending, from 1 to 4"),
        ("cuts", [2, 2], "cuts"),
        ("cuts", [0], "cuts"),
        ("cuts", [5], "cuts"),
        ("segments", [], "segments: expected a chain from 0 to the end"),
        ("segments", MODEL["segments"][1:], "segments"),
        ("segments", MODEL["segments"][:-1], "segments"),
        ("segments", MODEL["segments"][::-1], "segments"),
        ("segments", [MODEL["segments"][0], MODEL["segments"][2]], "segments"),
        ("segments.0.entry", -1, "segment entry: expected at least 0"),
        ("segments.0.exit", 0, "segment exit: expected above 0"),
        ("segments.0.exit", 2.5, "exit: expected a whole number"),
        ("segments.0.file", "..", "file"),
        ("cost", None, "cost: expected an object"),
    ],
)
def test_a_wrong_model_manifest_is_refused_saying_why(
    path: str, value: object, message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        ModelManifest.from_json(changed(MODEL, path, value))


def test_a_folder_without_a_manifest_is_a_manifest_error(tmp_path: Path) -> None:
    for load in (BundleManifest.load, ModelManifest.load):
        with pytest.raises(ManifestError, match="cannot be read"):
            load(tmp_path)


def test_a_manifest_is_found_under_its_name(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(BUNDLE))
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    assert BundleManifest.load(tmp_path).bundle == "fashion/3/d2-int8"
    assert ModelManifest.load(tmp_path).cuts == (2, 3)


@pytest.mark.parametrize(("source", "read"), BOTH)
def test_members_of_a_later_release_are_passed_over(source: dict[str, Any], read: Read) -> None:
    assert read(changed(source, "later", [1])) == read(encoded(source))


def read_or_refuse(raw: bytes, read: Read) -> None:
    """Either a ManifestError, or a manifest that can be written and read again."""
    try:
        manifest = read(raw)
    except ManifestError as err:
        assert len(str(err)) < 600  # noqa: PT017 - most are refused, some may be sound
        return
    assert read(manifest.to_json()) == manifest


@pytest.mark.parametrize(("source", "read"), BOTH)
def test_junk_at_any_place_gives_manifest_errors_only(source: dict[str, Any], read: Read) -> None:
    for path in places(source):
        for value in JUNK:
            read_or_refuse(changed(source, ".".join(map(str, path)), value), read)


@pytest.mark.parametrize(("source", "read"), BOTH)
@given(seed=st.integers(0, 2**32))
def test_damaged_manifests_give_manifest_errors_only(
    source: dict[str, Any], read: Read, seed: int
) -> None:
    chance, raw = random.Random(seed), encoded(source)
    for _ in range(20):
        at, end = sorted(chance.randrange(len(raw)) for _ in range(2))
        flipped = raw[:at] + bytes([raw[at] ^ 1 << chance.randrange(8)]) + raw[at + 1 :]
        junk = encoded(chance.choice(JUNK))
        for mutant in (raw[:at], flipped, raw[:at] + raw[end:], raw[:at] + junk + raw[at:]):
            note(repr(mutant[max(at - 40, 0) : at + 40]))
            read_or_refuse(mutant, read)


@pytest.mark.parametrize(("_source", "read"), BOTH)
@given(
    raw=st.binary(max_size=100)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=10,
    ).map(encoded)
)
def test_what_is_no_manifest_gives_manifest_errors_only(
    _source: dict[str, Any], read: Read, raw: bytes
) -> None:
    with pytest.raises(ManifestError):
        read(raw)
