"""Early exits for a classifier from unlabelled images: what they answer, lose and cost.

    python -m benchmarks.adopt            cnn6 on Fashion-MNIST, 12,000 unlabelled images

`cnn6` is trained on 12,000 labelled images without exits and written by torch.onnx, as a user's
own training would leave it. `adopt` then sees 12,000 other images without labels. Figures are of
the 10,000 test images, which chose nothing. The report goes to benchmarks/results/.
"""

from __future__ import annotations

import os
import warnings
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer
from torch import nn

from benchmarks.reports import RESULTS, made_by, provenance, write
from edge_sdk.nets import build
from edge_sdk.training.data.load import Dataset, load_dataset
from edge_sdk.training.data.samples import Part, Samples, split_samples
from exporters.adopt.adoption import adopt
from exporters.adopt.classifier import load_classifier
from exporters.adopt.report import report_of
from exporters.adopt.settings import Settings

IMAGES: Final = 12_000
# the prototype of issue 9: exits after the first and the second pool, and the hybrid's accuracy
PROTOTYPE: Final = {"exit_rates": [0.44, 0.63], "hybrid": [0.831, 0.829]}

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: python -m benchmarks.adopt --epochs 3")
def main(
    epochs: Annotated[int, typer.Option(min=1, help="Of the model that is adopted.")] = 3,
    agreement: Annotated[float, typer.Option(help="How often exits answer as the whole.")] = 0.98,
    data: Annotated[
        Path | None, typer.Option(help="Folder of Fashion-MNIST.", show_default="SPLITEDGE_SHARED")
    ] = None,
    results: Path = RESULTS,
) -> None:
    """Adopt cnn6 and write the report."""
    shared = os.environ.get("SPLITEDGE_SHARED", Path(__file__).parents[2] / "shared")
    folder = data or Path(shared) / "data"
    dataset = load_dataset("fashion-mnist", folder)
    with TemporaryDirectory() as work:
        model = _train(dataset, Path(work) / "cnn6.onnx", epochs)
        classifier = load_classifier(model)
        unlabelled = Part(_floats(dataset.x_train[IMAGES : 2 * IMAGES]), None)
        test = Part(_floats(dataset.x_test), dataset.y_test)
        parts = split_samples(Samples("fashion-mnist", unlabelled, test), seed=0)
        settings = Settings(
            "cnn6", 1, Path(work), dataset.class_names, agreement=agreement, threads=2
        )
        made = adopt(classifier, parts, settings, print)
        report = report_of(made)
    del report["path"]
    about = {"command": f"python -m benchmarks.adopt --epochs {epochs}", **provenance()}
    about |= {"onnx": version("onnx"), "onnxruntime": version("onnxruntime")}
    about |= {"load": [round(value, 1) for value in os.getloadavg()]}
    blocks = _blocks(report, about, agreement)
    write(results / "adopt-fashion-mnist", report | about | {"prototype": PROTOTYPE}, blocks)
    print("\n\n".join(blocks))


def _train(dataset: Dataset, path: Path, epochs: int) -> Path:
    """cnn6 without exits, trained by cross-entropy, as a file with an open batch axis."""
    net = build("cnn6", mean=dataset.mean, std=dataset.std, seed=0)
    whole = net.segment(0, None).train()
    x = torch.from_numpy(_floats(dataset.x_train[:IMAGES]))
    y = torch.from_numpy(np.array(dataset.y_train[:IMAGES]))
    optimiser = torch.optim.Adam(whole.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(y), generator=generator), 64):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(whole(x[rows]), y[rows])
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimiser.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            whole.eval(),
            (x[:2],),
            dynamo=True,
            verbose=False,
            dynamic_shapes=({0: torch.export.Dim("b", min=1, max=256)},),
        )
    assert program is not None
    program.save(str(path))
    return path


def _floats(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(x, np.float32)


def _blocks(report: dict[str, Any], about: dict[str, Any], agreement: float) -> list[str]:
    samples = report["samples"]
    table = [
        (
            "| depth | tensor | device's work | exits | agreement | hybrid | whole | head alone"
            " | z bytes | x bytes | bytes a query |"
        ),
        "| --- " * 11 + "|",
    ]
    table += [
        f"| {cut['depth']} | {cut['tensor']} | {cut['device_share']:.1%} | {cut['exit_rate']:.1%}"
        f" | {cut['agreement']:.1%} | {cut['hybrid_accuracy']:.2%}"
        f" | {cut['whole_accuracy']:.2%} | {cut['accuracy']:.1%} | {cut['z_bytes']}"
        f" | {cut['x_bytes']} | {cut['bytes_per_query']:.0f} |"
        for cut in report["cuts"]
    ]
    rates = " and ".join(f"{rate:.0%}" for rate in PROTOTYPE["exit_rates"])
    return [
        "# Adopting cnn6 on Fashion-MNIST without labels",
        (
            f"{made_by(about)} onnx {about['onnx']}, onnxruntime {about['onnxruntime']}. Load"
            f" {about['load'][0]}: other jobs ran at the same time."
        ),
        (
            f"The model learnt from {IMAGES} labelled images and knows of no exits. Heads learnt"
            f" from {samples['train']} other images without labels. Thresholds for {agreement:.0%}"
            f" agreement were chosen on {samples['held_out']} more. All figures are of"
            f" {samples['test']} test images, which chose nothing; accuracy is against labels."
        ),
        "\n".join(table),
        (
            f"A head takes {report['head_seconds']} s; {report['seconds']} s pass from the first"
            f" feature to the published bundles. The prototype let {rates} exit after the first and"
            " the second pool, with 0.0 and 0.2 points lost."
        ),
    ]


if __name__ == "__main__":
    app()
