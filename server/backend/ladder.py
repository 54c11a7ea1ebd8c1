"""The ladder engine: queries that enter a network at different depths, run as one batch.

The suffix is held once, as segments between the depths at which a device may be cut. A batch climbs
from its shallowest entry. At each joint the queries that enter there are appended, so every segment
runs once over all queries that need it:

    x ──[0-2]──┬──[2-4]──┬──[4-end]── logits
         z2 ───┘   z4 ───┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_sdk.manifest import ModelManifest, SegmentSpec, TensorSpec
from edge_sdk.session import Array, Session
from server.errors import BadRequestError


@dataclass(frozen=True, slots=True)
class Entry:
    """One query's samples, (n, ...), at the depth where they enter: 0 for raw input."""

    depth: int
    array: Array


class LadderEngine:
    """A model's segments, loaded once.

    Args:
        folder: the model's folder, with its `segments/`.
        threads: compute threads of one onnxruntime run.
    Raises: BundleError if a segment cannot be loaded.
    """

    def __init__(self, folder: Path, manifest: ModelManifest, *, threads: int = 1) -> None:
        self.manifest = manifest
        self._rungs = [
            _Rung(segment, Session(folder / "segments" / segment.file, threads=threads))
            for segment in manifest.segments
        ]
        self._rung_at = {segment.entry: at for at, segment in enumerate(manifest.segments)}
        self.output = self._rungs[-1].output

    def input_at(self, depth: int) -> TensorSpec:
        """Dtype and shape of one sample that enters at a depth, 0 for raw input.

        Raises: BadRequestError naming the depths at which samples enter.
        """
        at = self._rung_at.get(depth)
        if at is None:
            known = ", ".join("x" if depth == 0 else f"z{depth}" for depth in self._rung_at)
            raise BadRequestError(f"input z{depth}: this model takes {known}")
        return self._rungs[at].spec.input

    def check(self, entry: Entry) -> None:
        """Check that `entry` can be run.

        Raises: BadRequestError naming expected and got.
        """
        expected = self.input_at(entry.depth)
        if entry.array.shape[1:] != expected.shape or not entry.array.shape:
            shape = ", ".join(map(str, ("n", *expected.shape)))
            got = list(entry.array.shape)
            raise BadRequestError(f"input: expected shape [{shape}], got {got}")
        if entry.array.dtype != expected.dtype:
            raise BadRequestError(f"input: expected {expected.dtype}, got {entry.array.dtype}")

    def run(self, entries: Sequence[Entry]) -> list[Array]:
        """The network's outputs of each entry, in the order given.

        Args:
            entries: at least one, each of which passed `check`.
        """
        if len(entries) == 1:  # no joint, and nothing to part: an idle engine runs no other batch
            array = entries[0].array
            for rung in self._rungs[self._rung_at[entries[0].depth] :]:
                array = rung.run([array])
            return [array]
        order = sorted(range(len(entries)), key=lambda index: entries[index].depth)
        climbing: list[Array] = []
        waiting = 0
        for rung in self._rungs[self._rung_at[entries[order[0]].depth] :]:
            while waiting < len(order) and entries[order[waiting]].depth == rung.spec.entry:
                climbing.append(entries[order[waiting]].array)
                waiting += 1
            climbing = [rung.run(climbing)]
        return _split(climbing[0], [len(entries[index].array) for index in order], order)


class _Rung:
    """One segment and its session."""

    def __init__(self, spec: SegmentSpec, session: Session) -> None:
        self.spec = spec
        self._session = session
        self._input = next(iter(session.inputs))
        self.output = session.outputs[0]

    def run(self, parts: Sequence[Array]) -> Array:
        rows = sum(len(part) for part in parts)
        if len(parts) == 1 and rows == padded(rows):
            batch = parts[0]
        else:
            batch = np.zeros((padded(rows), *parts[0].shape[1:]), parts[0].dtype)
            np.concatenate(parts, out=batch[:rows])
        output: Array = self._session.run([self.output], {self._input: batch})[0]
        return output[:rows]


def padded(rows: int) -> int:
    """The batch size that `rows` samples run at: 1, 2, 3, 4, 6, 8, 12, 16, 24, ...

    Few sizes keep onnxruntime's memory flat; powers of two alone would waste up to half the work,
    these at most a third.
    """
    power = 1 << max(rows - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and rows <= power * 3 // 4 else power


def _split(outputs: Array, sizes: Sequence[int], order: Sequence[int]) -> list[Array]:
    starts = np.cumsum([0, *sizes])
    answers: list[Array] = [outputs] * len(order)
    for position, index in enumerate(order):
        answers[index] = outputs[starts[position] : starts[position + 1]]
    return answers
