"""Bottlenecks of adopted models: what is learnt through the graph against closed forms.

    python -m benchmarks.load.adopted_bottlenecks cnn6             on Fashion-MNIST
    python -m benchmarks.load.adopted_bottlenecks text-direction   PP-OCR's MobileNetV3

At cuts that `splitedge adopt` offers, a bottleneck of half, a quarter and an eighth of the channels
is made in three ways, from images without labels:

    components   principal components of z
    weighted     principal components of z under the metric of the server's answer: M is the mean of
                 J^T F J over samples and positions, J the derivative of the logits by the channels
                 (central differences by onnxruntime, one random pattern of signs over the positions
                 a sample), F = diag(p) - p p^T; they are the best pair to second order, without
                 gradients
    learnt       as `splitedge adopt --bottleneck` learns it: the graph in torch, by its gradients

Agreement: share of test samples whose label is the whole model's. Writes
benchmarks/results/adopted-bottlenecks-MODEL.json and .md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from benchmarks.adopt_models import SUBJECTS
from benchmarks.reports import Data, Results, made_by, provenance, write
from edge_sdk.wire.codecs import decode, encode
from exporters.adopt.classifier import Classifier, checked, load_classifier
from exporters.adopt.graph.cuts import Cut, choose_cuts, find_cuts
from exporters.adopt.graph.gradients import torch_suffix
from exporters.adopt.graph.graph import part
from exporters.adopt.graph.split import open_session, segment_model
from exporters.adopt.narrowing import narrowed_axis
from exporters.offloads.bottleneck import STEPS, Bottleneck, train_bottleneck, widths_of
from exporters.parity import run_torch

Floats = NDArray[np.float32]
Run = Callable[[NDArray[Any]], Floats]

LEARNT: Final = 4_000
TESTED: Final = 2_000
PROBED: Final = 300  # samples of the metric
STEP: Final = 0.05  # of a difference, as a share of z's deviation
RIDGE: Final = 1e-2  # of the metric's mean, on its diagonal
CODECS: Final = ("fp32", "int8-zstd", "int4-zstd")
BATCH: Final = 64

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: python -m benchmarks.load.adopted_bottlenecks cnn6")
def main(
    model: Annotated[str, typer.Argument(help="cnn6 or text-direction.")] = "cnn6",
    *,
    keep: Annotated[Path | None, typer.Option(help="Folder with, or for, the model.")] = None,
    cuts: Annotated[int, typer.Option(help="Number of cuts, the shallowest that pay.")] = 2,
    steps: Annotated[int, typer.Option(help="Steps of learning.")] = STEPS,
    data: Data = None,
    results: Results = Path(__file__).parents[1] / "results",
) -> None:
    """Compare three ways to a bottleneck and write the report."""
    shared = os.environ.get("SPLITEDGE_SHARED", Path(__file__).parents[3] / "shared")
    folder = data or Path(shared) / "data"
    with TemporaryDirectory() as work:
        path = SUBJECTS[model].model(folder, keep or Path(work))
        shape = (3, 48, 192) if model == "text-direction" else None
        classifier = load_classifier(path, shape=shape)
        arrays = SUBJECTS[model].samples(folder)
    learn, test = arrays["x_train"][:LEARNT], arrays["x_test"][:TESTED]
    classifier = checked(classifier, learn[:8])
    offer = choose_cuts(find_cuts(classifier.graph), learn[0].nbytes, None)
    rows: list[dict[str, Any]] = []
    for cut in offer.cuts[:cuts]:
        rows += _rows(classifier, cut, learn, test, steps)
    report = {
        "command": f"python -m benchmarks.load.adopted_bottlenecks {model}",
        **provenance(),
        "steps": steps,
        "learnt": len(learn),
        "tested": len(test),
        "rows": rows,
    }
    blocks = _blocks(model, report)
    write(results / f"adopted-bottlenecks-{model}", report, blocks)
    print("\n\n".join(blocks))


def _rows(
    classifier: Classifier, cut: Cut, learn: Floats, test: Floats, steps: int
) -> list[dict[str, Any]]:
    graph, by_sample = classifier.graph, not classifier.batches
    model = part(graph, ("x", graph.input), {"z": cut.tensor}, batch=1 if by_sample else None)
    prefix = _batched(open_session(model), "x", 1 if by_sample else BATCH)
    suffix_model = segment_model(graph, cut, None, by_sample=by_sample)
    suffix = _batched(open_session(suffix_model), f"z{cut.depth}", BATCH)
    z, z_test = prefix(learn), prefix(test)
    axis = narrowed_axis(classifier, cut)
    answer = torch_suffix(graph, cut, z, by_sample=by_sample)
    whole = suffix(z_test).argmax(axis=1)
    started = time.perf_counter()
    metric = answer_metric(z, axis, suffix)
    probed_s = time.perf_counter() - started
    rows = []
    for channels in widths_of(z.shape[axis]):
        started = time.perf_counter()
        learnt = train_bottleneck(z, axis, channels, answer, steps=steps)
        learnt_s = time.perf_counter() - started
        ways = {
            "components": (train_bottleneck(z, axis, channels, None), 0.0),
            "weighted": (weighted_components(z, axis, channels, metric), probed_s),
            "learnt": (learnt, learnt_s),
        }
        for way, (pair, seconds) in ways.items():
            row: dict[str, Any] = {
                "depth": cut.depth,
                "z": list(cut.shape),
                "channels": channels,
                "way": way,
                "seconds": round(seconds, 1),
            }
            for codec in CODECS:
                kept, size = _kept(pair, z_test, codec, suffix, whole)
                row[codec] = {"agreement": kept, "bytes": size}
            print(row, flush=True)
            rows.append(row)
    return rows


def _batched(session: Any, name: str, batch: int) -> Run:
    def run(x: NDArray[Any]) -> Floats:
        parts = (x[start : start + batch] for start in range(0, len(x), batch))
        return np.concatenate(
            [session.run(None, {name: np.ascontiguousarray(p)})[0] for p in parts]
        )

    return run


def answer_metric(z: Floats, axis: int, suffix: Run, *, seed: int = 0) -> NDArray[np.float64]:
    """M (C, C), the mean of J^T F J: how much the answer moves with z's channels."""
    random = np.random.default_rng(seed)
    channels = z.shape[axis]
    metric = np.zeros((channels, channels))
    step = np.float32(STEP * z.std())
    some = random.choice(len(z), min(PROBED, len(z)), replace=False)
    for one in z[some]:
        last = np.moveaxis(one, axis - 1, -1)
        signs = random.choice([-1.0, 1.0], last.shape[:-1]).astype(np.float32)
        moves = step * np.eye(channels, dtype=np.float32).reshape(
            channels, *(1 for _ in signs.shape), channels
        ) * signs[None, ..., None]  # fmt: skip
        moves = np.moveaxis(moves, -1, axis)
        jacobian = (suffix(one + moves) - suffix(one - moves)).astype(np.float64) / (2 * step)
        logits = suffix(one[None])[0].astype(np.float64)
        p = np.exp(logits - logits.max())
        p /= p.sum()
        metric += jacobian @ (np.diag(p) - np.outer(p, p)) @ jacobian.T
    return metric / len(some)


def weighted_components(
    z: Floats, axis: int, channels: int, metric: NDArray[np.float64]
) -> Bottleneck:
    """The pair of least (z - z')^T M (z - z'): principal components of M^(1/2) z."""
    size = len(metric)
    ridge = metric + RIDGE * np.trace(metric) / size * np.eye(size)
    values, vectors = np.linalg.eigh(ridge)
    root, back = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    rows = np.moveaxis(z, axis, -1).reshape(-1, size)[:: max(1, z.size // size // 200_000)]
    mean = rows.mean(axis=0, dtype=np.float64)
    spread = np.cov(rows.T.astype(np.float64))
    basis = np.linalg.eigh(root @ spread @ root)[1][:, ::-1][:, :channels]
    into, out_of = basis.T @ root, back @ basis
    # each component on the scale that it has among plain ones: one codec rounds them all
    norms = np.linalg.norm(into, axis=1, keepdims=True)
    into, out_of = into / norms, out_of * norms.T
    pair = train_bottleneck(z, axis, channels, None)
    decoder = pair.decoder[0] if isinstance(pair.decoder, torch.nn.Sequential) else pair.decoder
    for layer, weight, bias in (
        (pair.encoder, into, -into @ mean),
        (decoder, out_of, mean),
    ):
        state = layer.state_dict()
        layer.load_state_dict(
            {
                "weight": torch.from_numpy(weight).float().reshape(state["weight"].shape),
                "bias": torch.from_numpy(bias).float(),
            }
        )
    return pair


def _kept(
    pair: Bottleneck, z: Floats, codec: Any, suffix: Run, whole: NDArray[Any]
) -> tuple[float, float]:
    b = run_torch(pair.encoder, z)[0]
    encoded = [encode(b[row : row + 1], codec) for row in range(len(b))]
    got = np.concatenate([decode(*each, b.shape[1:]) for each in encoded])
    labels = suffix(run_torch(pair.decoder, got)[0]).argmax(axis=1)
    size = float(np.mean([array.nbytes for array, _ in encoded]))
    return float((labels == whole).mean()), round(size, 1)


def _blocks(model: str, report: Mapping[str, Any]) -> list[str]:
    lines = [
        "| depth | z | channels | way | seconds | "
        + " | ".join(f"{codec}: agreement | bytes" for codec in CODECS)
        + " |",
        "| --- " * (5 + 2 * len(CODECS)) + "|",
    ]
    lines += [_line(row) for row in report["rows"]]
    return [
        f"# Bottlenecks of an adopted {model}: learnt and in closed form",
        (
            f"{made_by(report)} Bottlenecks from {report['learnt']} samples without labels,"
            f" {report['steps']} steps of learning; agreement of {report['tested']} test samples"
            " with the whole model. The ways are those of the command's docstring: `components`,"
            " principal components; `weighted`, under the metric of the answer; `learnt`, what"
            " `splitedge adopt --bottleneck` makes."
        ),
        "\n".join(lines),
    ]


def _line(row: Mapping[str, Any]) -> str:
    cells: Sequence[str] = [
        f"{row[codec]['agreement']:.2%} | {row[codec]['bytes']:.0f}" for codec in CODECS
    ]
    shape = "x".join(map(str, row["z"]))
    return (
        f"| {row['depth']} | {shape} | {row['channels']} | {row['way']} | {row['seconds']} | "
        + " | ".join(cells)
        + " |"
    )


if __name__ == "__main__":
    app()
