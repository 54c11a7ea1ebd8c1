"""Early exits for a classifier from unlabelled images: what they answer, lose and cost.

    python -m benchmarks.adopt                  cnn6 on Fashion-MNIST
    python -m benchmarks.adopt resnet18         on CIFAR-10; it trains for an hour on one core
    python -m benchmarks.adopt mobilenetv2      on CIFAR-10; the same
    python -m benchmarks.adopt text-direction   PP-OCR's classifier, from the package index

`splitedge adopt` sees the model's file and images without labels, as a user would call it. Figures
are of test images, which chose nothing. The report goes to benchmarks/results/.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import numpy as np
import orjson
import typer

from benchmarks.adopt_models import SUBJECTS, Subject, sha256
from benchmarks.reports import RESULTS, child_environment, made_by, provenance, write

# a first trial of adopt: exit rates after the first and the second pool, and hybrid accuracies
PROTOTYPE: Final = {"exit_rates": [0.44, 0.63], "hybrid": [0.831, 0.829]}

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: python -m benchmarks.adopt resnet18 --keep models")
def main(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(SUBJECTS)}.")] = "cnn6",
    *,
    agreement: Annotated[float, typer.Option(help="How often exits answer as the whole.")] = 0.98,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the model there, and take it from there if it is."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of the data sets.", show_default="SPLITEDGE_SHARED"),
    ] = None,
    results: Path = RESULTS,
) -> None:
    """Adopt a model and write the report."""
    if model not in SUBJECTS:
        raise typer.BadParameter(f"expected one of {', '.join(SUBJECTS)}, got {model!r}")
    subject = SUBJECTS[model]
    shared = os.environ.get("SPLITEDGE_SHARED", Path(__file__).parents[2] / "shared")
    folder = data or Path(shared) / "data"
    with TemporaryDirectory() as name:
        work = Path(name)
        path = subject.model(folder, keep or work)
        arrays = subject.samples(folder)
        np.savez(work / "samples.npz", **arrays)  # type: ignore[arg-type]  # numpy types them as bool
        options = ["--labels", "--agreement", str(agreement)]
        if model == "text-direction":
            options += ["--shape", "3,48,192"]
        report = _adopt(model, path, work, options)
        report["model_sha256"] = sha256(path)
    about = {"command": f"python -m benchmarks.adopt {model}", **provenance()}
    about |= {"onnx": version("onnx"), "onnxruntime": version("onnxruntime")}
    about |= {"load": [round(value, 1) for value in os.getloadavg()]}
    about |= {"subject": asdict(subject)}
    if model == "cnn6":
        about["prototype"] = PROTOTYPE
    blocks = _blocks(model, subject, report | about, agreement)
    write(results / f"adopt-{model}", report | about, blocks)
    print("\n\n".join(blocks))


def _adopt(name: str, model: Path, work: Path, options: list[str]) -> dict[str, Any]:
    """Run `splitedge adopt` on the file and the samples; return its report."""
    report = work / "report.json"
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "adopt", str(model)]
    command += ["--data", str(work / "samples.npz"), "--name", name, "--out", str(work / "out")]
    command += ["--report", str(report), *options]
    subprocess.run(command, check=True, env=child_environment())
    made: dict[str, Any] = orjson.loads(report.read_bytes())
    del made["path"]
    return made


def _blocks(model: str, subject: Subject, report: Mapping[str, Any], agreement: float) -> list[str]:
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
        f" | {_percent(cut['agreement'])} | {cut['hybrid_accuracy']:.2%}"
        f" | {cut['whole_accuracy']:.2%} | {cut['accuracy']:.1%} | {cut['z_bytes']}"
        f" | {cut['x_bytes']} | {cut['bytes_per_query']:.0f} |"
        for cut in report["cuts"]
    ]
    took = (
        f"A head takes {report['head_seconds']} s; {report['seconds']} s pass from the first"
        " feature to the published bundles."
    )
    if "prototype" in report:
        rates = " and ".join(f"{rate:.0%}" for rate in PROTOTYPE["exit_rates"])
        took += (
            f" The prototype let {rates} exit after the first and the second pool, with 0.0 and"
            " 0.2 points lost."
        )
    return [
        f"# Adopting {model} without labels ({subject.dataset})",
        (
            f"{made_by(report)} onnx {report['onnx']}, onnxruntime {report['onnxruntime']}. Load"
            f" {report['load'][0]}: other jobs ran at the same time."
        ),
        (
            f"{subject.about} Heads learnt from {samples['train']} images without labels, which"
            f" the model did not learn from. Thresholds for {agreement:.0%} agreement were chosen"
            f" on {samples['held_out']} more. All figures are of {samples['test']} test images,"
            " which chose nothing; accuracy is against labels."
        ),
        "\n".join(table),
        took,
    ]


def _percent(share: float | None) -> str:
    return "none exit" if share is None else f"{share:.1%}"


if __name__ == "__main__":
    app()
