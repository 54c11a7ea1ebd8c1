"""`predict` that exits on the device, against a bare onnxruntime run of the same graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime

from edge_sdk import AgentSettings, EdgeAgent
from server.bench.measure import Row, at_most, take_turns
from server.bench.models import export_random

# every answer exits: the largest threshold there is
ALWAYS = 1e9


def run(work: Path, *, quick: bool) -> list[Row]:
    """Ratio (goal 1.25) and difference (goal 20 us) for a small and a very small network."""
    rows = []
    for backbone in ("cnn8", "cnn6"):
        bare_us, ours_us = _measure(work, backbone, quick)
        name = f"predict that exits on the device, {backbone} depth 2"
        rows += [
            at_most(f"{name}: ratio to onnxruntime", ours_us / bare_us, "x", 1.25, bare_us),
            at_most(f"{name}: more than onnxruntime", ours_us - bare_us, "us", 20.0, bare_us),
        ]
    return rows


def _measure(work: Path, backbone: str, quick: bool) -> tuple[float, float]:
    """Microseconds of the bare run and of `predict`."""
    folder, _ = export_random(backbone, (1, 28, 28), (2,), work)
    bundle = folder / "bundles" / "d2"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    bare = onnxruntime.InferenceSession(
        str(bundle / "exit.onnx"), options, providers=["CPUExecutionProvider"]
    )
    x = np.random.default_rng(1).normal(size=(1, 28, 28)).astype(np.float32)
    feeds = {"x": x[None]}
    settings = AgentSettings(threshold=ALWAYS, offload=False)
    with EdgeAgent.from_bundle(bundle, settings) as agent:
        bare_s, ours_s = take_turns(
            [lambda: bare.run(None, feeds), lambda: agent.predict(x)],
            rounds=7 if quick else 31,
            calls=300,
        )
    return bare_s * 1e6, ours_s * 1e6
