"""The ladder engine, against one onnxruntime batch per depth on full suffixes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from edge_sdk.manifest import ModelManifest, TensorSpec
from edge_sdk.session import Array
from server.backend.ladder import Entry, LadderEngine
from server.bench.measure import Row, at_least, at_most, take_turns
from server.bench.models import export_random

DEPTHS = (2, 4, 6, 8)
QUERIES = 16


def run(work: Path, *, quick: bool) -> list[Row]:
    """Throughput ratio (goal 1.05), and weights in memory (goal: each weight once)."""
    folder, manifest = export_random("resnet18", (3, 64, 64), DEPTHS, work)
    engine = LadderEngine(folder, manifest, threads=1)
    entries = queries(manifest)
    separate, suffix_bytes = _separate_batches(work, entries)
    ours_s, theirs_s = take_turns(
        [lambda: engine.run(entries), separate], rounds=5 if quick else 15, calls=3
    )
    held = sum(_weight_bytes(path) for path in (folder / "segments").glob("*.onnx"))
    ours, theirs = QUERIES / ours_s, QUERIES / theirs_s
    name = f"ladder engine, resnet18, {QUERIES} queries at {len(DEPTHS)} depths"
    whole = _whole_bytes()
    return [
        at_least(f"{name}: throughput to a batch per depth", ours / theirs, "x", 1.05, theirs),
        at_most(f"{name}: weights held to the network's", held / whole, "x", 1.001, whole),
        Row(f"{name}: weights of full suffixes", suffix_bytes / whole, "x", None, True, whole),
    ]


def queries(manifest: ModelManifest, count: int = QUERIES) -> list[Entry]:
    """Random smashed data, at each depth in turn."""
    generator = np.random.default_rng(2)
    shapes = {segment.entry: segment.input.shape for segment in manifest.segments}
    depths = [DEPTHS[index % len(DEPTHS)] for index in range(count)]
    return [
        Entry(depth, np.abs(generator.normal(size=(1, *shapes[depth]))).astype(np.float32))
        for depth in depths
    ]


def _separate_batches(work: Path, entries: list[Entry]) -> tuple[Callable[[], object], int]:
    """The solution without a ladder: for each depth a session with the full suffix."""
    from edge_sdk.nets import build  # noqa: PLC0415 - torch
    from exporters.composition import Composition  # noqa: PLC0415
    from exporters.graphs import write_segments  # noqa: PLC0415

    net = build("resnet18", input_shape=(3, 64, 64), classes=10, seed=0).eval()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    runs: list[Callable[[], object]] = []
    held = 0
    for depth in DEPTHS:
        rows: list[Array] = [entry.array for entry in entries if entry.depth == depth]
        folder = work / f"suffix-{depth}"
        folder.mkdir()
        # with one cut, the last segment is the full suffix
        *_, suffix = write_segments(
            Composition.of(net), TensorSpec("float32", (3, 64, 64)), folder, (depth,)
        )
        path = folder / suffix.file
        held += _weight_bytes(path)
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )

        def one(
            session: onnxruntime.InferenceSession = session,
            rows: list[Array] = rows,
            name: str = session.get_inputs()[0].name,
        ) -> None:
            session.run(None, {name: np.concatenate(rows)})

        runs.append(one)

    def all_depths() -> None:
        for one_depth in runs:
            one_depth()

    return all_depths, held


def _weight_bytes(path: Path) -> int:
    """Bytes of the large initialisers: shapes and scalars are not weights."""
    graph = onnx.load(str(path)).graph
    sizes = [onnx.numpy_helper.to_array(item).nbytes for item in graph.initializer]
    return sum(size for size in sizes if size > 64)


def _whole_bytes() -> int:
    from edge_sdk.nets import build  # noqa: PLC0415 - torch

    net = build("resnet18", input_shape=(3, 64, 64), classes=10, seed=0)
    # batch norm is folded: its two parameters a channel become the convolution's bias
    exits = sum(p.numel() for head in net.exits.values() for p in head.parameters())
    return 4 * (sum(p.numel() for p in net.parameters()) - exits)
