"""The device's graph in int8 beside fp32, at every depth: bytes, latency, accuracy, agreement.

    python -m benchmarks.device.int8_depths --data DIR

Two networks with an exit head at each cut are trained for a minute: cnn6 on Fashion-MNIST, and the
network of the digits. At each depth the exit graph is exported as a bundle's is, and quantised as
the export does. Both graphs run in turns with one thread; test images that took no part in training
or calibration give accuracy and agreement. Writes benchmarks/results/int8-depths.json and .md.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import typer

from benchmarks.reports import RESULTS, Data, Results, made_by, provenance, write
from edge_sdk.manifest import TensorSpec
from edge_sdk.nets import Supernet, build
from edge_sdk.session import Array, Session
from edge_sdk.training.data.load import Dataset, load_dataset
from exporters.bundle import FASTER_THAN, spread_rows
from exporters.graphs import shared_exit, write_device_graphs
from exporters.parity import CHANGED_AT_MOST
from exporters.quantize import CALIBRATION_SAMPLES, quantize
from server.bench.measure import take_turns

NAME: Final = "int8-depths"
TESTED: Final = 2_000
BATCH: Final = 64
ROUNDS: Final = 21
CALLS: Final = 200


@dataclass(frozen=True, slots=True)
class Subject:
    """A network, its data, and its training."""

    backbone: str
    dataset: str
    images: int
    epochs: int


SUBJECTS: Final = (
    Subject("tiny", "digits", 1_400, 12),
    Subject("cnn6", "fashion-mnist", 12_000, 3),
)


@dataclass(frozen=True, slots=True)
class Row:
    """The exit graph of one depth in both forms.

    Attributes:
        fp32_us: median of a run. ratio: int8's median over it.
        agreement: share of the test images with the same label.
        published: whether the export would publish it: it is faster, and changes few labels.
    """

    backbone: str
    depth: int
    fp32_bytes: int
    int8_bytes: int
    fp32_us: float
    ratio: float
    fp32_accuracy: float
    int8_accuracy: float
    agreement: float
    published: bool


def main(*, data: Data = None, results: Results = RESULTS) -> None:
    """Measure both forms at every depth of two networks."""
    torch.set_num_threads(1)
    shared = os.environ.get("SPLITEDGE_SHARED", Path(__file__).parents[3] / "shared")
    load = os.getloadavg()[0]
    rows = [row for one in SUBJECTS for row in _rows(one, data or Path(shared) / "data")]
    report = {
        "command": "python -m benchmarks.device.int8_depths --data DIR",
        **provenance(),
        "load_before": load,
        "rows": [asdict(row) for row in rows],
    }
    blocks = _blocks(report, rows)
    write(results / NAME, report, blocks)
    typer.echo("\n\n".join(blocks))


def _rows(subject: Subject, folder: Path) -> Iterator[Row]:
    data = load_dataset(subject.dataset, None if subject.dataset == "digits" else folder)
    net = _trained(subject, data)
    x = np.ascontiguousarray(data.x_test[:TESTED])
    rest = data.x_train[-(len(data.x_train) - subject.images) :]
    calibration = rest[spread_rows(len(rest), CALIBRATION_SAMPLES)]
    sample = TensorSpec(str(x.dtype), x.shape[1:])
    for depth in net.cuts:
        with tempfile.TemporaryDirectory(prefix="splitedge-int8-") as text:
            work = Path(text)
            (spec,) = write_device_graphs(shared_exit(net, depth), sample, work).values()
            quantised = work / "int8.onnx"
            quantize(work / spec.file, quantised, calibration, spec.overridable)
            yield _compared(subject, depth, (work / spec.file, quantised), x, data.y_test[:TESTED])


def _compared(subject: Subject, depth: int, paths: tuple[Path, Path], x: Array, y: Array) -> Row:
    fp32, int8 = (Session(path) for path in paths)
    outputs, feeds = ["logits", "z"], {"x": x[:1]}
    times = take_turns(
        [lambda: fp32.run(outputs, feeds), lambda: int8.run(outputs, feeds)],
        rounds=ROUNDS,
        calls=CALLS,
    )
    labels = [_labels(session, x) for session in (fp32, int8)]
    agreement = float((labels[0] == labels[1]).mean())
    return Row(
        subject.backbone,
        depth,
        paths[0].stat().st_size,
        paths[1].stat().st_size,
        1e6 * times[0],
        times[1] / times[0],
        float((labels[0] == y).mean()),
        float((labels[1] == y).mean()),
        agreement,
        times[1] <= FASTER_THAN * times[0] and 1 - agreement <= CHANGED_AT_MOST,
    )


def _labels(session: Session, x: Array) -> Array:
    """The label of each image; the graph takes one at a time."""
    logits = [session.run(["logits"], {"x": x[at : at + 1]})[0] for at in range(len(x))]
    labels: Array = np.concatenate(logits).argmax(axis=1)
    return labels


def _trained(subject: Subject, data: Dataset) -> Supernet:
    """The network, trained with all of its exits."""
    torch.manual_seed(0)
    shape = data.x_train.shape[1:]
    classes = int(data.y_train.max()) + 1
    net = build(
        subject.backbone, classes=classes, input_shape=shape, mean=data.mean, std=data.std, seed=0
    )
    optimiser = torch.optim.Adam(net.parameters(), lr=2e-3)
    x = torch.as_tensor(data.x_train[: subject.images])
    y = torch.as_tensor(data.y_train[: subject.images])
    net.train()
    for epoch in range(subject.epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for at in torch.split(order, BATCH):
            exits, final = net.forward_exits(x[at])
            outputs = (*exits.values(), final)
            losses = [torch.nn.functional.cross_entropy(logits, y[at]) for logits in outputs]
            optimiser.zero_grad()
            torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]  # torch's
            optimiser.step()
    return net.eval()


def _blocks(report: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """The report's text."""
    lines = [
        (
            "| network | depth | fp32, kB | int8, kB | fp32, us | int8 to fp32, latency |"
            " accuracy fp32, % | int8, % | same label, % | published |"
        ),
        "|" + " --- |" * 10,
    ]
    lines += [
        f"| {row.backbone} | {row.depth} | {row.fp32_bytes / 1e3:.1f} |"
        f" {row.int8_bytes / 1e3:.1f} | {row.fp32_us:.1f} | {row.ratio:.2f} |"
        f" {100 * row.fp32_accuracy:.2f} | {100 * row.int8_accuracy:.2f} |"
        f" {100 * row.agreement:.2f} | {'yes' if row.published else 'no'} |"
        for row in rows
    ]
    return [
        "# int8 beside fp32 at every depth",
        made_by(report),
        (
            f"Exit graphs with one thread, in turns, {ROUNDS} rounds of {CALLS} runs each, medians;"
            f" accuracy of the exit head and agreement on {TESTED:,} test images or fewer. An"
            f" export publishes int8 where it takes at most {FASTER_THAN} of the time, and changes"
            f" at most {100 * CHANGED_AT_MOST:g} % of the labels. Load of the machine before it"
            f" began: {report['load_before']:.2f}."
        ),
        "\n".join(lines),
    ]


if __name__ == "__main__":
    typer.run(main)
