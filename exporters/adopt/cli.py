"""`splitedge adopt`: an ONNX classifier of any framework -> an early-exit model for a fleet."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import orjson
import typer

from edge_sdk.cli.output import check_report, check_target, print_table, progress
from exporters.next_step import next_step
from exporters.options import GATE_HELP, Bottleneck, Codec, Version, read_bottleneck, read_codec
from profiles.control_groups import usable_cores

if TYPE_CHECKING:  # torch takes seconds to import; --help shall not
    from exporters.adopt.adoption import Adoption
    from exporters.adopt.graph.preprocess import Preprocessing
    from exporters.adopt.settings import Settings

_EPILOG: Final = (
    "Example: splitedge adopt model.onnx --data pictures --name things --out server/models"
    " --bottleneck auto"
)
_SEPARATOR: Final = re.compile(r"[,x\s]+")

app = typer.Typer(add_completion=False)


@app.command(epilog=_EPILOG)
def adopt(
    model: Annotated[Path, typer.Argument(help="The classifier, an ONNX file.")],
    *,
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            help="Samples, no labels needed: a folder of pictures (flat, or a folder a class),"
            " FILE.npz, csv:FILE?window=ROWS, module:function or a published set such as digits and"
            " fashion-mnist=DIR (docs/data.md lists them).",
        ),
    ],
    name: Annotated[str, typer.Option(help="The model's name: a-z, 0-9 and '-'.")],
    out: Annotated[Path, typer.Option(help="Folder of models; OUT/NAME/VERSION is written.")],
    depth: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Publish the cut of this depth; may be given again.",
            show_default="a handful, by cost",
        ),
    ] = None,
    labels: Annotated[
        bool, typer.Option("--labels", help="Report accuracy too; the data have labels.")
    ] = False,
    agreement: Annotated[
        float,
        typer.Option(help="How often exits answer as the whole model does, above 0 to 1."),
    ] = 0.98,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON.")
    ] = None,
    input_type: Annotated[
        Literal["uint8", "float32"] | None,
        typer.Option("--input", help="Type of raw inputs.", show_default="the model's"),
    ] = None,
    mean: Annotated[
        str | None,
        typer.Option(
            help="Mean, subtracted from raw inputs: one number, or one for each channel:"
            " 123.7,116.3,103.5. Pixels are 0..255.",
        ),
    ] = None,
    std: Annotated[
        str | None, typer.Option(help="Standard deviation; inputs less the mean are divided by it.")
    ] = None,
    layout: Annotated[
        Literal["nchw", "nhwc"] | None,
        typer.Option(
            help="Position of the channels in raw inputs: nchw first, nhwc last. Windows of the"
            " model's own shape stay as they are.",
            show_default="the model's",
        ),
    ] = None,
    resize: Annotated[
        str | None,
        typer.Option(
            metavar="HxW",
            help="Size of raw pictures; the graph resizes them to the model's size.",
            show_default="the model's",
        ),
    ] = None,
    preprocess: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="ONNX graph from raw inputs to the model's input."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Shape of one sample, where the model leaves it open: 3,48,192."),
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="Output with the scores, if the model has several.")
    ] = None,
    class_names: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Names of the classes in order, one on each line."),
    ] = None,
    gate: Annotated[
        str,
        typer.Option(
            metavar="GATE",
            help=GATE_HELP,
        ),
    ] = "entropy",
    int8: Annotated[
        Literal["auto", "never"],
        typer.Option(help="auto: also publish int8 if it gives the same answers and runs faster."),
    ] = "auto",
    codec: Codec = "auto",
    bottleneck: Bottleneck = "never",
    samples: Annotated[
        int,
        typer.Option(min=6, help="Samples for heads and thresholds, at most; drawn by the seed."),
    ] = 20_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split and of the heads.")] = 0,
    version: Version = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Give an ONNX classifier early exits, from unlabelled samples, and publish it for a fleet.

    Cuts are found in the graph. Exit heads learn what the model itself answers. The threshold is
    chosen on held-out samples; all figures are of a test part that chose nothing.
    """
    from exporters.adopt.graph.preprocess import Preprocessing
    from exporters.adopt.settings import Settings

    preprocessing = Preprocessing(
        input=input_type,
        mean=_numbers("--mean", mean),
        std=_numbers("--std", std),
        layout=layout,
        resize=_size(resize),
        graph=preprocess,
    )

    def settings(names: tuple[str, ...], next_free: int) -> Settings:
        return Settings(
            name=name,
            version=next_free if version is None else version,
            out=out,
            class_names=names,
            depths=depth,
            agreement=agreement,
            gate=gate,
            int8=int8,
            codec=read_codec(codec),
            bottleneck=read_bottleneck(bottleneck),
            seed=seed,
            threads=usable_cores(),
        )

    # what does not fit is refused before anything takes time
    settings((), 1)
    check_target("--out", out / name, folder=True)
    check_report(report)
    made = _adopt(
        model,
        preprocessing,
        settings,
        data=data,
        labels=labels,
        most=samples,
        seed=seed,
        shape=None if shape is None else tuple(map(int, _numbers("--shape", shape))),
        output=output,
        class_names=class_names,
    )
    _tell(made, out, report, as_json=as_json)


def _adopt(
    model: Path,
    preprocessing: Preprocessing,
    settings: Any,
    *,
    data: str,
    labels: bool,
    most: int,
    seed: int,
    shape: tuple[int, ...] | None,
    output: str | None,
    class_names: Path | None,
) -> Adoption:
    with progress("loading torch and onnxruntime") as say:
        from edge_sdk.training.data.load import described, split_samples
        from exporters.adopt import inputs
        from exporters.adopt.adoption import adopt as make
        from exporters.adopt.classifier import load_classifier, prepared
        from exporters.adopt.graph.preprocess import for_windows
        from exporters.adopt.settings import HELD_OUT_SHARE
        from exporters.model import check_place
        from exporters.versions import next_version

        given = _read_names(class_names)
        say.step(f"reading {model}")
        plain = load_classifier(model, shape=shape, output=output)
        classifier = prepared(plain, preprocessing)
        chosen = settings((), 1)
        chosen = settings((), next_version(chosen.out, chosen.name))
        check_place(chosen.out, chosen.name, chosen.version)
        say.step(f"reading {data}")
        opened = inputs.open_inputs(data, classifier.raw, most=2 * most)
        sample = opened.train.x.shape[1:]
        fitting = for_windows(preprocessing, plain.raw.shape, sample)
        if fitting.layout != preprocessing.layout:
            say(f"--layout: left out, since the windows have the model's own shape {sample}")
        classifier = prepared(plain, fitting)
        raw = classifier.raw
        read = inputs.as_inputs(opened, raw, layout=preprocessing.layout)
        names = inputs.names_of(classifier.classes, given, read)
        parts = split_samples(read, held_out=HELD_OUT_SHARE, seed=seed, most=most)
        parts = inputs.with_labels(parts, read, names, wanted=labels, named=given is not None)
        say(described(read, parts.sizes))
        say(f"raw input {raw.dtype} {raw.shape}, {classifier.classes} classes")
        say(inputs.origin_of_names(names, given, read))
        return make(
            classifier,
            parts,
            settings(names, chosen.version),
            say,
            notices=inputs.doubts(data, read, raw, preprocessing),
        )


def _tell(made: Adoption, out: Path, report: Path | None, *, as_json: bool) -> None:
    from edge_sdk.durable import make_folder, write_atomic
    from exporters.adopt.report import report_of, table_of

    raw = orjson.dumps(report_of(made), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if report is not None:
        make_folder(report.parent)
        write_atomic(report, raw)
    if as_json:
        typer.echo(raw.decode(), nl=False)
        return
    print_table(table_of(made))
    typer.echo(f"Next: {next_step(out)}")


def _numbers(option: str, text: str | None) -> tuple[float, ...]:
    from exporters.errors import ExportError

    if text is None:
        return ()
    try:
        return tuple(float(word) for word in _SEPARATOR.split(text.strip(" ()[]")) if word)
    except ValueError as err:
        raise ExportError(f"{option}: expected numbers with commas between, got {text!r}") from err


def _size(text: str | None) -> tuple[int, int] | None:
    from edge_sdk.training.data.load import picture_size

    return None if text is None else picture_size(text)


def _read_names(path: Path | None) -> tuple[str, ...] | None:
    from exporters.errors import ExportError

    if path is None:
        return None
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise ExportError(f"{path}: expected a text file, a class name a line ({err})") from err
    return tuple(line.strip() for line in lines if line.strip())
