"""Offloads as they are deployed: z by a bundle's graph, its codec, and the server's segments."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.manifest import FEATURE_CODECS, BundleManifest, Codec, ModelManifest
from edge_sdk.session import Session
from edge_sdk.wire.codecs import decode, encode

Array = NDArray[Any]

_BATCH: Final = 64


class DeployedOffload:
    """The final answers of offloads of one depth.

    Args:
        model: folder of the published model.
        threads: of onnxruntime.
        variant: of the bundle; by default that of fp32.
    """

    def __init__(
        self,
        model: Path,
        manifest: ModelManifest,
        depth: int,
        *,
        threads: int,
        variant: str | None = None,
    ) -> None:
        folder = model / "bundles" / (variant or f"d{depth}")
        self._bundle = BundleManifest.load(folder)
        self._device = Session(folder / self._bundle.graphs["exit"].file, threads=threads)
        graphs = self._bundle.graphs
        self._prefix = self._graph(folder, "prefix", threads) or self._device
        self._narrow = self._graph(folder, "bottleneck", threads)
        self._back = self._graph(folder, "back", threads)
        decoders = [each.file for each in manifest.decoders if each.depth == depth]
        files = decoders if "bottleneck" in graphs else []
        files += [segment.file for segment in manifest.segments if segment.entry >= depth]
        self._segments = [Session(model / "segments" / file, threads=threads) for file in files]

    @property
    def codec(self) -> Codec:
        """The codec of z."""
        return self._bundle.smashed.codec

    @property
    def bottleneck(self) -> tuple[int, ...] | None:
        """Shape of what is sent in place of z; None without a bottleneck."""
        return None if self._narrow is None else self._bundle.sent[1]

    @property
    def offload_bytes(self) -> float:
        """Bytes of one sample's tensor in that codec: the mean of the held-out samples."""
        return float(self._bundle.parity["offload_bytes"][self.codec])

    def _graph(self, folder: Path, name: str, threads: int) -> Session | None:
        graph = self._bundle.graphs.get(name)
        return None if graph is None else Session(folder / graph.file, threads=threads)

    def __call__(self, x: Array) -> NDArray[np.integer[Any]]:
        """Labels of raw inputs (n, ...) by the server: (n,)."""
        batches = (self._answer(x[start : start + _BATCH]) for start in range(0, len(x), _BATCH))
        return np.concatenate([np.zeros(0, np.int64), *batches])

    def _answer(self, x: Array) -> NDArray[np.integer[Any]]:
        rows = [self._prefix.run(["z"], {"x": x[row : row + 1]})[0] for row in range(len(x))]
        if self._narrow is not None:
            rows = [self._narrow.run(["b"], {"z": z})[0] for z in rows]
        given: Array = np.concatenate([decode(*encode(z, self.codec), z.shape[1:]) for z in rows])
        for session in self._segments:
            (name,) = session.inputs
            (given,) = session.run(None, {name: given})
        if self._back is not None:
            (name,) = (each for each in self._back.inputs)
            back = self._back
            given = np.concatenate([back.run(["logits"], {name: row[None]})[0] for row in given])
        labels: NDArray[np.integer[Any]] = given.argmax(axis=1)
        return labels


def deployed_answers(model: Path, manifest: ModelManifest, variant: str) -> DeployedOffload | None:
    """The offloads of a bundle that sends less than the codecs of 0.1.0; None for one of those.

    Their answers are the whole model's, but for 0.5 % that the export allows.
    """
    bundle = BundleManifest.load(model / "bundles" / variant)
    if bundle.smashed.codec in FEATURE_CODECS and "bottleneck" not in bundle.graphs:
        return None
    return DeployedOffload(model, manifest, bundle.depth, threads=1, variant=variant)
