"""Networks of random weights whose figures a plan is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from edge_sdk.manifest import ModelManifest
from edge_sdk.session import Array
from server.backend.ladder import Entry, LadderEngine
from server.bench.models import export_random


@dataclass(frozen=True, slots=True)
class Network:
    """One network.

    Attributes:
        backbone: as `edge_sdk.nets` names it. shape: of a sample.
        depths: cuts that are measured. depth: the one that a plan takes.
    """

    backbone: str
    shape: tuple[int, ...]
    depths: tuple[int, ...]
    depth: int

    def export(self, out: Path) -> tuple[Path, ModelManifest]:
        """Export it with random weights; its folder and manifest."""
        return export_random(self.backbone, self.shape, self.depths, out)


NETWORKS: Final = (
    Network("tiny", (1, 8, 8), (1, 2, 4), 2),
    Network("cnn6", (1, 28, 28), (2, 3), 2),
    Network("resnet18", (3, 64, 64), (2, 4, 6, 8), 4),
)


def smashed(folder: Path, manifest: ModelManifest, rows: int) -> Iterator[Entry]:
    """Smashed data of random inputs at each depth: entries of (rows, ...), shallowest first."""
    generator = np.random.default_rng(3)
    engine = _Prefixes(folder, manifest)
    shape = manifest.segments[0].input.shape
    array: Array = generator.normal(size=(rows, *shape)).astype(np.float32)
    for segment in manifest.segments:
        if segment.entry:
            yield Entry(segment.entry, array)
        array = engine.step(segment.entry, array)


class _Prefixes(LadderEngine):
    """A ladder engine whose segments are run one by one."""

    def step(self, entry: int, array: Array) -> Array:
        """The output of the segment that begins at a depth."""
        return self._rungs[self._rung_at[entry]].run([array])
