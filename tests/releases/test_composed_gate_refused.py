"""Bundles with gates that a device of the release before does not know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest

from edge_sdk.manifest import BundleManifest, GateSpec, GraphSpec, SmashedSpec, TensorSpec

if TYPE_CHECKING:
    from tests.releases.conftest import Release

READ = """
import sys
from edge_sdk.errors import ManifestError
from edge_sdk.manifest import BundleManifest
try:
    print(BundleManifest.from_json(sys.stdin.buffer.read()).gate.policy)
except ManifestError as err:
    print(err)
"""


def manifest(gate: str) -> bytes:
    x, z = TensorSpec("float32", (1, 8, 8)), TensorSpec("float32", (4,))
    logits = TensorSpec("float32", (2,))
    graph = GraphSpec("exit.onnx", "fp32", {"x": x}, {"logits": logits, "z": z})
    return BundleManifest(
        bundle="things/1/d2",
        backbone="tiny",
        depth=2,
        class_names=("a", "b"),
        input=x,
        graphs={"exit": graph},
        smashed=SmashedSpec("z2", (4,), "fp16"),
        gate=GateSpec(gate, 0.5),
        golden="golden.bin",
        parity={},
    ).to_json()


@pytest.mark.parametrize("unknown", ["all(entropy:0.3, margin:0.2)", "vacuity-exp"])
def test_it_is_refused_with_a_sentence_and_a_single_measure_is_read(
    before: Release, unknown: str
) -> None:
    assert orjson.loads(manifest("margin"))["gate"]["policy"] == "margin"
    assert read_by(before.path, manifest("margin")) == "margin"
    refusal = read_by(before.path, manifest(unknown))
    assert refusal == f"gate policy: expected one of entropy, margin, vacuity, got {unknown!r}"


def read_by(packages: Path, raw: bytes) -> str:
    """What the packages in that folder read in a manifest, or say of it."""
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", READ],
        input=raw,
        env=environment,
        capture_output=True,
        check=True,
        timeout=60,
    )
    return done.stdout.decode().strip()
