"""Networks to time: random weights, exported like a real model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edge_sdk.manifest import ModelManifest

CLASSES = 10


def export_random(
    backbone: str, input_shape: tuple[int, ...], depths: Sequence[int], out: Path
) -> tuple[Path, ModelManifest]:
    """Export `backbone` with random weights into `out`; returns folder and manifest."""
    from edge_sdk.nets import build  # noqa: PLC0415 - torch, so only where it is needed
    from exporters.model import export_model  # noqa: PLC0415

    net = build(backbone, input_shape=input_shape, classes=CLASSES, seed=0)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(64, *input_shape)).astype(np.float32)
    y = generator.integers(0, CLASSES, 64)
    name = f"bench-{backbone}"
    class_names = [str(index) for index in range(CLASSES)]
    manifest = export_model(
        net, x, y, out, name=name, version=1, class_names=class_names, depths=depths, int8="never"
    )
    return out / name / "1", manifest
