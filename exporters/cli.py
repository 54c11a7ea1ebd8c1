"""`splitedge export`: from trained weights to the files that a server and its devices run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import orjson
import typer
from rich.table import Table

from edge_sdk.cli.data_options import Resize
from edge_sdk.cli.output import print_table, progress
from edge_sdk.errors import ConfigurationError
from edge_sdk.gate_form import read_gate
from edge_sdk.manifest import BundleManifest, ModelManifest
from exporters.next_step import next_step
from exporters.options import (
    GATE_HELP,
    RunBottleneck,
    RunCodec,
    Version,
    read_bottleneck,
    read_codec,
)

if TYPE_CHECKING:  # torch takes seconds to import, which --help must not
    from edge_sdk.nets import Supernet
    from edge_sdk.training.data.load import Dataset
    from exporters.scores import BundleScore

    Scores = dict[str, BundleScore]

_EPILOG = (
    "Example: splitedge export --run splitedge-runs/supersfl-digits-0 --out server/models"
    " --name digits"
    "\n\nOr: splitedge export --backbone tiny --weights tiny.safetensors --data digits"
    " --out server/models --name digits"
)

app = typer.Typer(add_completion=False)


@app.command(epilog=_EPILOG)
def export(
    *,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of a finished run of `splitedge simulate` or `train`. Its record says all"
            " that --backbone, --weights and --data say otherwise.",
        ),
    ] = None,
    train_exits: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="With --run: train the exits that the run has none of on these samples, which"
            " need no labels.",
        ),
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            help="Name of the network, such as tiny, cnn8 or resnet18, or package.module:function"
            " of your own, with the module in the current folder (docs/own-network.md)."
        ),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Trained weights of that network, a .safetensors file.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Labelled samples: digits, fashion-mnist=DIR, a folder of pictures, FILE.npz, ..."
            " (docs/data.md). Held-out samples set the gate, and test samples give the figures.",
            show_default="the run's own",
        ),
    ] = None,
    resize: Resize = None,
    out: Annotated[Path, typer.Option(help="Folder of models; this writes OUT/NAME/VERSION.")],
    name: Annotated[str, typer.Option(help="Name of the model: a-z, 0-9 and '-'.")],
    version: Version = None,
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
            help=GATE_HELP,
            show_default="what the exits were trained for",
        ),
    ] = None,
    codec: RunCodec = None,
    bottleneck: RunBottleneck = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Export a trained network: ONNX graphs for devices, segments for the server.

    Every graph must give the answers of the torch model; otherwise nothing is published.
    """
    from edge_sdk.training.data.load import with_resize

    data = None if data is None else with_resize(data, resize)
    gate = None if gate is None else str(read_gate(gate, "--gate"))
    sent: dict[str, Any] = {}
    if codec is not None:
        sent["codec"] = read_codec(codec)
    if bottleneck is not None:
        sent["bottleneck"] = read_bottleneck(bottleneck)
    if run is not None:
        if backbone is not None or weights is not None:
            raise ConfigurationError(
                "--run: expected no --backbone and no --weights with it; the run's record and its"
                " weights say both"
            )
        manifest, scores = _export_run(
            run,
            train_exits=train_exits,
            data=data,
            out=out,
            name=name,
            version=version,
            depths=depth,
            int8=int8,
            gate=gate,
            sent=sent,
        )
    else:
        if backbone is None or weights is None or data is None or train_exits is not None:
            raise ConfigurationError(
                "export: expected --run DIR, or --backbone, --weights and --data together;"
                " --train-exits goes with --run"
            )
        manifest, scores = _export(
            backbone=backbone,
            weights=weights,
            data=data,
            out=out,
            name=name,
            version=version,
            depths=depth,
            int8=int8,
            gate=gate,
            sent=sent,
        )
    target = out / name / manifest.version
    bundles = [BundleManifest.load(target / "bundles" / variant) for variant in manifest.variants]
    if as_json:
        typer.echo(_json(target, manifest, bundles, scores))
    else:
        print_table(_table(target, bundles, scores))
        typer.echo(f"Next: {next_step(out)}")


def _export_run(
    run: Path,
    *,
    train_exits: str | None,
    data: str | None,
    out: Path,
    name: str,
    version: int | None,
    depths: list[int] | None,
    int8: Literal["auto", "never"],
    gate: str | None,
    sent: dict[str, Any],
) -> tuple[ModelManifest, Scores]:
    with progress("loading torch") as say:
        from exporters.run.export import RunExport, export_run
        from exporters.versions import next_version

        say.step(f"reading {run}")
        wanted = RunExport(
            run=run,
            out=out,
            name=name,
            version=next_version(out, name) if version is None else version,
            data=data,
            train_exits=train_exits,
            depths=tuple(depths or ()),
            int8=int8,
            gate=gate,
            **sent,
        )
        return export_run(wanted, say)


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
    sent: dict[str, Any],
) -> tuple[ModelManifest, Scores]:
    with progress("loading torch") as say:
        from edge_sdk.training.data.load import described, labelled_dataset, open_data
        from exporters.adopt.deployed import deployed_answers
        from exporters.graphs import shared_exit
        from exporters.model import export_model
        from exporters.parity import run_torch
        from exporters.scores import score_bundle
        from exporters.versions import next_version
        from exporters.weights import check_depths, load_weights, read_origin, require_file

        require_file(weights)
        say.step("loading data and weights")
        samples = open_data(data)
        dataset = labelled_dataset(samples)
        say(described(samples, dataset.sizes))
        net = _network(backbone, dataset)
        trained = load_weights(net, weights)
        check_depths(weights, net, trained, depths or ())
        origin = read_origin(weights)
        say.step("tracing the network")
        manifest = export_model(
            net,
            dataset.x_held_out,
            dataset.y_held_out,
            out,
            name=name,
            version=next_version(out, name) if version is None else version,
            class_names=dataset.class_names,
            depths=depths or trained,
            int8=int8,
            device=partial(shared_exit, gate=gate or origin.gate, run=origin.run),
            unlabelled_x=dataset.x_train,
            progress=say,
            **sent,
        )
        say.step("scoring the bundles on test samples")
        whole = run_torch(net.eval(), dataset.x_test)[0].argmax(axis=1)
        target = out / name / manifest.version
        scores = {
            variant: score_bundle(
                target / "bundles" / variant,
                whole,
                dataset.x_test,
                dataset.y_test,
                offload=deployed_answers(target, manifest, variant),
            )
            for variant in manifest.variants
        }
        return manifest, scores


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


def _json(
    target: Path, manifest: ModelManifest, bundles: list[BundleManifest], scores: Scores
) -> str:
    result = {
        "path": str(target),
        "name": manifest.name,
        "version": manifest.version,
        "figures_of": "test",
        "bundles": [_row(target, bundle, scores) for bundle in bundles],
    }
    return orjson.dumps(result, option=orjson.OPT_INDENT_2).decode()


def _table(target: Path, bundles: list[BundleManifest], scores: Scores) -> Table:
    scored = next(iter(scores.values())).samples
    title = f"{target}\nexits and accuracy: on {scored:,} test samples"
    table = Table(title=title, title_justify="left")
    for heading in ("bundle", "kB", "us a run", "z as", "exit below", "exits", "accuracy"):
        table.add_column(heading, justify="left" if heading == "bundle" else "right")
    for bundle in bundles:
        row = _row(target, bundle, scores)
        table.add_row(
            row["variant"],
            f"{row['bytes'] / 1e3:.0f}",
            f"{row['latency_us']:.0f}",
            row["codec"] + (" of b" if row["bottleneck"] else ""),
            f"{row['threshold']:.3g} {row['measure']}",
            f"{row['exit_rate']:.1%}",
            f"{row['accuracy']:.1%}",
        )
    return table


def _row(target: Path, bundle: BundleManifest, scores: Scores) -> dict[str, Any]:
    """Figures of a bundle; exit rate and accuracies are of the test part."""
    variant = bundle.bundle.rpartition("/")[2]
    folder = target / "bundles" / variant
    score = scores[variant]
    return {
        "variant": variant,
        "bytes": sum((folder / file).stat().st_size for file in bundle.files),
        "latency_us": bundle.parity["latency_us"],
        "codec": bundle.smashed.codec,
        "bottleneck": "bottleneck" in bundle.graphs,
        "offload_bytes": bundle.parity["offload_bytes"][bundle.smashed.codec],
        "threshold": bundle.gate.threshold,
        "measure": "nats" if bundle.gate.policy == "entropy" else bundle.gate.policy,
        "exit_rate": score.exit_rate,
        "accuracy": score.accuracy,
        "exit_accuracy": score.exit_accuracy,
        "test_samples": score.samples,
    }
