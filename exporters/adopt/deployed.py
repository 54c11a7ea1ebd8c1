"""Offloads as they are deployed: z by a bundle's graph, its codec, and the server's segments."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.manifest import BundleManifest, Codec, ModelManifest
from edge_sdk.session import Session
from edge_sdk.wire.codecs import decode, encode

Array = NDArray[Any]

_BATCH: Final = 64


class DeployedOffload:
    """The final answers of offloads of one depth.

    Args:
        model: folder of the published model.
        threads: of onnxruntime.
    """

    def __init__(self, model: Path, manifest: ModelManifest, depth: int, *, threads: int) -> None:
        folder = model / "bundles" / f"d{depth}"
        self._bundle = BundleManifest.load(folder)
        self._device = Session(folder / self._bundle.graphs["exit"].file, threads=threads)
        self._segments = [
            Session(model / "segments" / segment.file, threads=threads)
            for segment in manifest.segments
            if segment.entry >= depth
        ]

    @property
    def codec(self) -> Codec:
        """The codec of z."""
        return self._bundle.smashed.codec

    def __call__(self, x: Array) -> NDArray[np.integer[Any]]:
        """Labels of raw inputs (n, ...) by the server: (n,)."""
        batches = (self._answer(x[start : start + _BATCH]) for start in range(0, len(x), _BATCH))
        return np.concatenate([np.zeros(0, np.int64), *batches])

    def _answer(self, x: Array) -> NDArray[np.integer[Any]]:
        rows = [self._device.run(["z"], {"x": x[row : row + 1]})[0] for row in range(len(x))]
        given: Array = np.concatenate([decode(*encode(z, self.codec), z.shape[1:]) for z in rows])
        for session in self._segments:
            (name,) = session.inputs
            (given,) = session.run(None, {name: given})
        labels: NDArray[np.integer[Any]] = given.argmax(axis=1)
        return labels
