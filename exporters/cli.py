"""`splitedge export`: from trained weights to the files that a server and its devices run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import orjson
import typer
from rich.console import Console
from rich.table import Table

from edge_sdk.gate_form import read_gate
from edge_sdk.manifest import BundleManifest, ModelManifest

if TYPE_CHECKING:  # torch takes seconds to import, which --help must not
    from edge_sdk.nets import Supernet
    from edge_sdk.training.data.load import Dataset

_EPILOG = (
    "Example: splitedge export --backbone tiny --weights tiny.safetensors --data digits"
    " --out models --name digits"
)

app = typer.Typer(add_completion=False)


@app.command(epilog=_EPILOG)
def export(
    *,
    backbone: Annotated[
        str,
        typer.Option(
            help="Name of the network, such as tiny, cnn8 or resnet18, or package.module:function"
            " of your own, with the module in the current folder (docs/own-network.md)."
        ),
    ],
    weights: Annotated[
        Path, typer.Option(help="Trained weights of that network, a .safetensors file.")
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME_OR_DIR",
            help="'digits', or a folder with the four IDX files of an image set. The test part"
            " sets the gate and checks every graph.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of models; this writes OUT/NAME/VERSION.")],
    name: Annotated[str, typer.Option(help="Name of the model: a-z, 0-9 and '-'.")],
    version: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Version number; a published version never changes.",
            show_default="the next free",
        ),
    ] = None,
    depth: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Number of stages on the device; give it again for more depths.",
            show_default="all depths with trained exit heads",
        ),
    ] = None,
    int8: Annotated[
        Literal["auto", "never"],
        typer.Option(help="auto: also publish an int8 bundle where it agrees and runs faster."),
    ] = "auto",
    gate: Annotated[
        str | None,
        typer.Option(
            metavar="GATE",
            help="Uncertainty that exits are judged by: entropy, margin, vacuity, or several:"
            " 'all(entropy, margin)', 'any(...)'. Scales, as in 'all(entropy:0.3, margin:0.2)', are"
            " fitted where they are left out.",
            show_default="what the exits were trained for",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Export a trained network: ONNX graphs for devices, segments for the server.

    Every graph must give the answers of the torch model; otherwise nothing is published.
    """
    manifest = _export(
        backbone=backbone,
        weights=weights,
        data=data,
        out=out,
        name=name,
        version=version,
        depths=depth,
        int8=int8,
        gate=None if gate is None else str(read_gate(gate, "--gate")),
    )
    target = out / name / manifest.version
    bundles = [BundleManifest.load(target / "bundles" / variant) for variant in manifest.variants]
    if as_json:
        typer.echo(_json(target, manifest, bundles))
    else:
        Console().print(_table(target, bundles))


def _export(
    *,
    backbone: str,
    weights: Path,
    data: str,
    out: Path,
    name: str,
    version: int | None,
    depths: list[int] | None,
    int8: Literal["auto", "never"],
    gate: str | None,
) -> ModelManifest:
    console = Console(stderr=True)
    with console.status("loading torch") as status:
        from exporters.graphs import shared_exit
        from exporters.model import export_model, next_version
        from exporters.weights import check_depths, load_weights, read_origin

        def progress(line: str) -> None:
            status.update(line)
            console.print(line, highlight=False, markup=False, soft_wrap=True)

        status.update("loading data and weights")
        dataset = _dataset(data)
        net = _network(backbone, dataset)
        trained = load_weights(net, weights)
        check_depths(weights, net, trained, depths or ())
        origin = read_origin(weights)
        status.update("tracing the network")
        return export_model(
            net,
            dataset.x_test,
            dataset.y_test,
            out,
            name=name,
            version=next_version(out, name) if version is None else version,
            class_names=dataset.class_names,
            calibration_x=dataset.x_train,
            depths=depths or trained,
            int8=int8,
            device=partial(shared_exit, gate=gate or origin.gate, run=origin.run),
            progress=progress,
        )


def _dataset(data: str) -> Dataset:
    from edge_sdk.training.data.load import load_dataset

    folder = Path(data)
    if folder.is_dir():
        return load_dataset("fashion-mnist", folder)
    return load_dataset(data)


def _network(backbone: str, dataset: Dataset) -> Supernet:
    from edge_sdk.nets import build, use_network

    use_network(backbone)
    return build(
        backbone,
        classes=dataset.classes,
        input_shape=dataset.x_test.shape[1:],
        mean=dataset.mean,
        std=dataset.std,
    )


def _json(target: Path, manifest: ModelManifest, bundles: list[BundleManifest]) -> str:
    result = {
        "path": str(target),
        "name": manifest.name,
        "version": manifest.version,
        "bundles": [_row(target, bundle) for bundle in bundles],
    }
    return orjson.dumps(result, option=orjson.OPT_INDENT_2).decode()


def _table(target: Path, bundles: list[BundleManifest]) -> Table:
    table = Table(title=str(target), title_justify="left")
    for heading in ("bundle", "kB", "us a run", "z as", "exit below", "exits", "accuracy"):
        table.add_column(heading, justify="left" if heading == "bundle" else "right")
    for bundle in bundles:
        row = _row(target, bundle)
        table.add_row(
            row["variant"],
            f"{row['bytes'] / 1e3:.0f}",
            f"{row['latency_us']:.0f}",
            row["codec"],
            f"{row['threshold']:.3g} {row['measure']}",
            f"{row['exit_rate']:.1%}",
            "" if row["accuracy"] is None else f"{row['accuracy']:.1%}",
        )
    return table


def _row(target: Path, bundle: BundleManifest) -> dict[str, Any]:
    """Figures of a bundle; no accuracy at a threshold below which nothing exits."""
    variant = bundle.bundle.rpartition("/")[2]
    folder = target / "bundles" / variant
    points = [point for point in bundle.gate.curve if point.threshold == bundle.gate.threshold]
    return {
        "variant": variant,
        "bytes": sum((folder / file).stat().st_size for file in bundle.files),
        "latency_us": bundle.parity["latency_us"],
        "codec": bundle.smashed.codec,
        "threshold": bundle.gate.threshold,
        "measure": "nats" if bundle.gate.policy == "entropy" else bundle.gate.policy,
        "exit_rate": points[0].exit_rate if points else 0.0,
        "accuracy": points[0].accuracy if points else None,
    }
