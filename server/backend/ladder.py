"""The ladder engine: queries that enter a network at different depths, run as one batch.

The suffix is held once, as segments between the depths at which a device may be cut. A batch climbs
from its shallowest entry. At each joint the queries that enter there are appended, so every segment
runs once over all queries that need it:

    x ──[0-2]──┬──[2-4]──┬──[4-end]── logits
         z2 ───┘   z4 ───┘

Samples that passed a bottleneck (`b2`) are widened to z first, by the decoder of their depth. From
the last joint on, a small model runs as one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from edge_sdk.manifest import ModelManifest, TensorSpec
from edge_sdk.providers.names import CPU
from edge_sdk.session import Array, Session
from server.backend.joined import joined_suffixes
from server.errors import BadRequestError

# the leading binary digits in which sizes of batches differ
SIZE_BITS: Final = 4


@dataclass(frozen=True, slots=True)
class Entry:
    """One query's samples, (n, ...), at the depth where they enter: 0 for raw input.

    Attributes:
        narrow: whether they passed a bottleneck of that depth.
    """

    depth: int
    array: Array
    narrow: bool = False


class LadderEngine:
    """A model's segments, loaded once.

    Args:
        folder: the model's folder, with its `segments/`.
        threads: compute threads of one onnxruntime run.
        provider: runs the segments; what it cannot run, the CPU does.
    Raises: BundleError if a segment cannot be loaded.
    """

    def __init__(
        self, folder: Path, manifest: ModelManifest, *, threads: int = 1, provider: str = CPU
    ) -> None:
        self.manifest = manifest

        def session(file: str, content: bytes | None = None) -> Session:
            path = folder / "segments" / file
            return Session(path, content=content, threads=threads, provider=provider)

        self._rungs = [_Rung(segment.input, session(segment.file)) for segment in manifest.segments]
        joined = joined_suffixes(folder, manifest)
        # from each entry to the end
        self._suffixes = [
            [_Rung(rung.input, session(f"from-{segment.entry}", joined[segment.entry]))]
            if segment.entry in joined
            else self._rungs[at:]
            for at, (segment, rung) in enumerate(zip(manifest.segments, self._rungs, strict=True))
        ]
        self._decoders = {
            decoder.depth: _Rung(decoder.input, session(decoder.file))
            for decoder in manifest.decoders
        }
        self._rung_at = {segment.entry: at for at, segment in enumerate(manifest.segments)}
        self._entries = list(self._rung_at)
        self.output = self._rungs[-1].output

    def input_at(self, depth: int, *, narrow: bool = False) -> TensorSpec:
        """Dtype and shape of one sample that enters at a depth, 0 for raw input.

        Args:
            narrow: behind the bottleneck of that depth.
        Raises: BadRequestError naming the depths at which samples enter.
        """
        if narrow and depth in self._decoders:
            return self._decoders[depth].input
        at = self._rung_at.get(depth)
        if at is None or narrow:
            names = ["x" if entry == 0 else f"z{entry}" for entry in self._rung_at]
            known = ", ".join([*names, *(f"b{entry}" for entry in self._decoders)])
            raise BadRequestError(
                f"input {'b' if narrow else 'z'}{depth}: this model takes {known}"
            )
        return self._rungs[at].input

    def check(self, entry: Entry) -> None:
        """Check that `entry` can be run.

        Raises: BadRequestError naming expected and got.
        """
        expected = self.input_at(entry.depth, narrow=entry.narrow)
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
        entries = self._widened(entries)
        if len(entries) == 1:  # no joint, and nothing to part: an idle engine runs no other batch
            array = entries[0].array
            whole = len(array) == padded(len(array))
            for rung in self._suffixes[self._rung_at[entries[0].depth]]:
                array = rung.run_whole(array) if whole else rung.run([array])
            return [array]
        order = sorted(range(len(entries)), key=lambda index: entries[index].depth)
        last = entries[order[-1]].depth
        climbing: list[Array] = []
        waiting = 0
        first = self._rung_at[entries[order[0]].depth]
        for depth, rung in zip(self._entries[first:], self._rungs[first:], strict=True):
            while waiting < len(order) and entries[order[waiting]].depth == depth:
                climbing.append(entries[order[waiting]].array)
                waiting += 1
            if depth == last:
                break
            climbing = [rung.run(climbing)]
        for rung in self._suffixes[self._rung_at[last]]:
            climbing = [rung.run(climbing)]
        return _split(climbing[0], [len(entries[index].array) for index in order], order)

    def _widened(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """The entries with z in place of what passed a bottleneck: one run for each depth."""
        narrow = sorted({entry.depth for entry in entries if entry.narrow})
        if not narrow:
            return entries
        made = list(entries)
        for depth in narrow:
            places = [
                at for at, entry in enumerate(entries) if entry.narrow and entry.depth == depth
            ]
            z = self._decoders[depth].run([entries[at].array for at in places])
            sizes = [len(entries[at].array) for at in places]
            for at, part in zip(places, _split(z, sizes, range(len(sizes))), strict=True):
                made[at] = Entry(depth, part)
        return made


class _Rung:
    """One segment, or the decoder of a bottleneck, and its session."""

    def __init__(self, given: TensorSpec, session: Session) -> None:
        self.input = given
        self._session = session
        self._name = next(iter(session.inputs))
        self.output = session.outputs[0]
        self._outputs = [self.output]

    def run(self, parts: Sequence[Array]) -> Array:
        rows = sum(map(len, parts))
        size = padded(rows)
        if len(parts) == 1 and rows == size:
            return self.run_whole(parts[0])
        batch = np.zeros((size, *parts[0].shape[1:]), parts[0].dtype)
        np.concatenate(parts, out=batch[:rows])
        return self.run_whole(batch)[:rows]

    def run_whole(self, batch: Array) -> Array:
        """The outputs of a batch of a size that `padded` gives."""
        return self._session.run(self._outputs, {self._name: batch})[0]


def padded(rows: int) -> int:
    """The batch size that `rows` samples run at: 1, 2, ... 16, 18, 20, ... 32, 36, ... 64, 72, ...

    Few sizes keep onnxruntime's memory flat. Powers of two alone would waste up to half the work,
    these at most a ninth: one row beyond 16 runs as 18, one beyond 128 as 144.
    """
    step = 1 << max((rows - 1).bit_length() - SIZE_BITS, 0)
    return -(-rows // step) * step


def _split(outputs: Array, sizes: Sequence[int], order: Sequence[int]) -> list[Array]:
    starts = np.cumsum([0, *sizes])
    answers: list[Array] = [outputs] * len(order)
    for position, index in enumerate(order):
        answers[index] = outputs[starts[position] : starts[position + 1]]
    return answers
