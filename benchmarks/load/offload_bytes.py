"""Bytes of an offload against the server's answers, by depth, codec and bottleneck.

    python -m benchmarks.load.offload_bytes cnn6 --data DIR     on Fashion-MNIST
    python -m benchmarks.load.offload_bytes cnn8 --data DIR     on CIFAR-10

A network is trained for a minute, without exits. For each cut, test images pass the device's
stages, a bottleneck or none, and a codec; the server's stages answer. The reference is the same
network without codec. Beside it stand the raw images, compressed without loss: as PNG, by
zstandard, and as a device sends them (`raw_inputs`). A codec is chosen on images that are neither
learnt from nor tested. Writes benchmarks/results/offload-bytes-NETWORK.json, .md
and .png.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from benchmarks.reports import Data, Results, made_by, provenance, write
from edge_sdk.manifest import CODECS, Codec
from edge_sdk.nets import Supernet, build
from edge_sdk.training.data.load import load_dataset
from edge_sdk.wire.codecs import decode, encode
from edge_sdk.wire.compression import compress
from edge_sdk.wire.raw_inputs import encode_raw
from exporters.offloads.bottleneck import Bottleneck, channel_axis, train_bottleneck
from exporters.parity import run_torch

Floats = NDArray[np.float32]
Labels = NDArray[np.integer[Any]]

CHOOSE: Final = 1_000  # images that choose, and images that are tested
TESTED: Final = 2_000
LOST_MOST: Final = 0.005
NARROW: Final[Sequence[Codec]] = ("int8-zstd", "int6-zstd", "int4-zstd", "int4-channel-zstd")
LEARNT: Final = 6_000  # images that a bottleneck learns from
BATCH: Final = 64

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Subject:
    """A network and its data.

    Attributes:
        images, epochs: of training. steps: of a bottleneck's distillation, at each depth.
        widths: of bottlenecks, as shares of the channels.
    """

    backbone: str
    dataset: str
    images: int
    epochs: int
    steps: Mapping[int, int]
    widths: Sequence[int]


SUBJECTS: Final = (
    Subject("cnn6", "fashion-mnist", 20_000, 3, {2: 600, 3: 1_000}, (2, 4, 8)),
    Subject("cnn8", "cifar-10", 8_000, 3, {2: 40, 4: 40}, (4,)),
)


@dataclass(frozen=True, slots=True)
class Point:
    """A codec at a depth, on test images.

    Attributes:
        channels: of the bottleneck; 0 without one.
        bytes: of a query's tensor, on average. agreement: share of the server's labels that stay.
        accuracy: of these answers, against labels.
        kept: share of the labels that stay, of the images that choose.
    """

    depth: int
    channels: int
    codec: str
    bytes: float
    agreement: float
    accuracy: float
    kept: float


@dataclass(frozen=True, slots=True)
class Chosen:
    """The smallest codec of a depth that keeps 99.5 % of the labels of the images that choose.

    Attributes:
        point: its figures. fp16_bytes: of z in fp16.
        mixed_bytes, mixed_agreement: where a device sends the raw input if that is smaller.
    """

    point: Point
    fp16_bytes: float
    mixed_bytes: float
    mixed_agreement: float


@app.command(epilog="Example: python -m benchmarks.load.offload_bytes cnn6 --data shared/data")
def main(
    backbone: Annotated[str, typer.Argument(help="cnn6 or cnn8.")] = "cnn6",
    *,
    data: Data = None,
    results: Results = Path(__file__).parents[1] / "results",
) -> None:
    """Measure bytes against agreement and write the report with its plot."""
    shared = os.environ.get("SPLITEDGE_SHARED", Path(__file__).parents[3] / "shared")
    folder = data or Path(shared) / "data"
    report: dict[str, Any] = {
        "command": f"python -m benchmarks.load.offload_bytes {backbone}",
        **provenance(),
        "subjects": {},
    }
    for subject in SUBJECTS:
        if backbone == subject.backbone:
            report["subjects"][subject.backbone] = measured(subject, folder)
    blocks = _blocks(report)
    write(results / f"offload-bytes-{backbone}", report, blocks)
    plot(report, results / f"offload-bytes-{backbone}.png")
    print("\n\n".join(blocks))


def measured(subject: Subject, folder: Path) -> dict[str, Any]:
    """All figures of a network."""
    data = load_dataset(subject.dataset, folder)
    net = _trained(subject, data)
    x = {
        "learn": data.x_train[subject.images : subject.images + LEARNT],
        "choose": data.x_train[subject.images + LEARNT :][:CHOOSE],
        "test": data.x_test[:TESTED],
    }
    y = data.y_test[:TESTED]
    whole = run_torch(net, x["test"])[0].argmax(axis=1)
    raw = np.array([encode_raw(one).array.nbytes for one in x["test"]])
    points: list[Point] = []
    chosen: list[Chosen] = []
    for depth, steps in subject.steps.items():
        z = {name: run_torch(net.prefix(depth), part)[0] for name, part in x.items()}
        suffix = net.suffix(depth)
        found: list[tuple[Point, NDArray[np.float64], Labels]] = []
        for pair, channels in _narrowings(
            net, depth, z["learn"], steps=steps, widths=subject.widths
        ):
            for codec in CODECS if pair is None else NARROW:
                kept, *_ = _answers(z["choose"], pair, codec, suffix)
                before = run_torch(suffix, z["choose"])[0].argmax(axis=1)
                labels, sizes = _answers(z["test"], pair, codec, suffix)
                point = Point(
                    depth=depth,
                    channels=channels,
                    codec=codec,
                    bytes=round(float(sizes.mean()), 1),
                    agreement=float((labels == whole).mean()),
                    accuracy=float((labels == y).mean()),
                    kept=float((kept == before).mean()),
                )
                print(subject.backbone, point, flush=True)
                points.append(point)
                found.append((point, sizes, labels))
        chosen.append(_chosen(found, raw, whole))
    return {
        "about": asdict(subject) | {"steps": list(subject.steps.items())},
        "accuracy": float((whole == y).mean()),
        "raw_bytes": int(x["test"][0].nbytes),
        "png_bytes": float(np.mean([_png_bytes(one) for one in x["test"]])),
        "zstd_bytes": float(np.mean([len(compress(one.ravel())) for one in x["test"]])),
        "sent_raw_bytes": float(raw.mean()),
        "points": [asdict(point) for point in points],
        "chosen": [asdict(each) for each in chosen],
    }


def _trained(subject: Subject, data: Any) -> Supernet:
    net = build(
        subject.backbone, classes=data.classes, mean=data.mean, std=data.std,
        input_shape=data.x_train.shape[1:], seed=0,
    )  # fmt: skip
    net = net.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs
    x = torch.from_numpy(np.array(data.x_train[: subject.images]))
    y = torch.from_numpy(np.array(data.y_train[: subject.images]))
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)
    for epoch in range(1, subject.epochs + 1):
        for rows in torch.split(torch.randperm(len(y), generator=generator), BATCH):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimiser.step()
        print(f"{subject.backbone}: epoch {epoch} of {subject.epochs}, {loss.item():.3f}")
    frozen: Supernet = net.eval().to(memory_format=torch.contiguous_format)
    return frozen


def _narrowings(
    net: Supernet, depth: int, z: Floats, *, steps: int, widths: Sequence[int]
) -> list[tuple[Bottleneck | None, int]]:
    """No bottleneck, and one of each width."""
    axis, suffix = channel_axis(z.shape[1:], net.input_shape), net.suffix(depth)
    made: list[tuple[Bottleneck | None, int]] = [(None, 0)]
    for share in widths:
        channels = z.shape[axis] // share
        made.append((train_bottleneck(z, axis, channels, suffix, steps=steps), channels))
        print(f"depth {depth}: bottleneck of {channels} channels trained", flush=True)
    return made


def _answers(
    z: Floats, pair: Bottleneck | None, codec: Codec, suffix: nn.Module
) -> tuple[Labels, NDArray[np.float64]]:
    """The server's labels of these samples, and the bytes of each."""
    sent = z if pair is None else run_torch(pair.encoder, z)[0]
    encoded = [encode(sent[row : row + 1], codec) for row in range(len(sent))]
    got = np.concatenate([decode(*each, sent.shape[1:]) for each in encoded])
    if pair is not None:
        got = run_torch(pair.decoder, got)[0]
    labels = run_torch(suffix, got)[0].argmax(axis=1)
    return labels, np.array([array.nbytes for array, _ in encoded], np.float64)


def _chosen(
    found: Sequence[tuple[Point, NDArray[np.float64], Labels]],
    raw: NDArray[np.integer[Any]],
    whole: Labels,
) -> Chosen:
    allowed = [each for each in found if each[0].kept >= 1 - LOST_MOST]
    point, sizes, labels = min(allowed, key=lambda each: each[0].bytes)
    fp16 = next(each.bytes for each, *_ in found if each.codec == "fp16")
    smaller = raw < sizes  # then the server computes from the input itself
    agreement = np.where(smaller, True, labels == whole).mean()
    return Chosen(point, fp16, float(np.minimum(raw, sizes).mean()), float(agreement))


def _png_bytes(x: NDArray[np.uint8]) -> int:
    file = BytesIO()
    picture = x[0] if len(x) == 1 else x.transpose(1, 2, 0)
    Image.fromarray(picture).save(file, "PNG", optimize=True)
    return len(file.getvalue())


def _blocks(report: Mapping[str, Any]) -> list[str]:
    (name,) = report["subjects"]
    blocks = [
        "# Bytes of an offload against the server's answers",
        (
            f"{made_by(report)} Bytes are those of a query's tensor; the frame around it takes"
            " about 300 more, which rows that leave together share. Agreement: share of test images"
            " whose label is that of the same network without codec and bottleneck. Goal: at most a"
            " quarter of fp16's bytes with at most 0.5 points lost, and never more bytes than the"
            " raw input compressed without loss."
        ),
        f"![Bytes against agreement](offload-bytes-{name}.png)",
    ]
    for name, one in report["subjects"].items():
        about = one["about"]
        blocks.append(f"## {name}, {about['dataset']}")
        blocks.append(
            f"Trained on {about['images']:,} images in {about['epochs']} epochs;"
            f" {one['accuracy']:.1%} of {TESTED:,} test images are right. An image takes"
            f" {one['raw_bytes']} bytes, as PNG {one['png_bytes']:.0f}, by zstandard"
            f" {one['zstd_bytes']:.0f}, and as a device sends it {one['sent_raw_bytes']:.0f}."
        )
        blocks.append("\n".join([*_goal_table(one)]))
        blocks.append("\n".join([*_point_table(one)]))
    return blocks


def _goal_table(one: Mapping[str, Any]) -> list[str]:
    lines = [
        "The smallest that keeps 99.5 % of the labels of the images that choose:",
        "",
        (
            "| depth | bottleneck | codec | bytes | share of fp16 | agreement | accuracy | with raw"
            " inputs: bytes | agreement | a quarter, 0.5 points | never above the input |"
        ),
        "| --- " * 11 + "|",
    ]
    for each in one["chosen"]:
        point = each["point"]
        share = point["bytes"] / each["fp16_bytes"]
        met = share <= 0.25 and point["agreement"] >= 1 - LOST_MOST
        mixed = each["mixed_bytes"] / each["fp16_bytes"]
        mixed_met = mixed <= 0.25 and each["mixed_agreement"] >= 1 - LOST_MOST
        words = "met" if met else "met with raw inputs" if mixed_met else "missed"
        least = min(one["sent_raw_bytes"], one["png_bytes"], one["zstd_bytes"])
        below = "met" if each["mixed_bytes"] <= least else "missed"
        lines.append(
            f"| {point['depth']} | {point['channels'] or 'none'} | {point['codec']}"
            f" | {point['bytes']:.0f} | {share:.3f} | {point['agreement']:.2%}"
            f" | {point['accuracy']:.2%} | {each['mixed_bytes']:.0f}"
            f" | {each['mixed_agreement']:.2%} | {words} | {below} |"
        )
    return lines


def _point_table(one: Mapping[str, Any]) -> list[str]:
    lines = ["| depth | bottleneck | codec | bytes | agreement | accuracy |", "| --- " * 6 + "|"]
    lines += [
        f"| {point['depth']} | {point['channels'] or 'none'} | {point['codec']}"
        f" | {point['bytes']:.0f} | {point['agreement']:.2%} | {point['accuracy']:.2%} |"
        for point in one["points"]
    ]
    return lines


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw bytes against agreement, one panel for each network and depth."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only the last step draws

    panels = [
        (name, one, each["point"]["depth"], each["fp16_bytes"])
        for name, one in report["subjects"].items()
        for each in one["chosen"]
    ]
    figure = Figure(figsize=(5.2 * len(panels), 4.4), layout="constrained")
    for axes, (name, one, depth, fp16) in zip(
        np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True
    ):
        _draw(axes, [point for point in one["points"] if point["depth"] == depth])
        styles = (("PNG", "png_bytes", ":"), ("as sent", "sent_raw_bytes", "-"))
        for label, key, style in styles:
            axes.axvline(one[key], color="grey", linestyle=style, label=f"raw input, {label}")
        axes.axvline(one["zstd_bytes"], color="silver", linestyle="--", label="raw input, zstd")
        axes.axvline(fp16 / 4, color="tab:red", linewidth=0.8, label="a quarter of fp16")
        axes.axhline(99.5, color="tab:red", linewidth=0.8)
        axes.set(title=f"{name}, depth {depth}", xlabel="bytes of a query's tensor", xscale="log")
        axes.set_ylabel("agreement, %")
        axes.set_ylim(90, 100.2)
        axes.legend(fontsize=6)
    figure.savefig(path, dpi=110)


def _draw(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    by_width: dict[int, list[Mapping[str, Any]]] = {}
    for point in points:
        by_width.setdefault(point["channels"], []).append(point)
    for channels, some in by_width.items():
        label = f"bottleneck of {channels}" if channels else "z"
        sizes = [point["bytes"] for point in some]
        axes.plot(sizes, [100 * point["agreement"] for point in some], "o", ms=4, label=label)
        for point in some:
            place = (point["bytes"], max(100 * point["agreement"], 90))
            axes.annotate(point["codec"], place, fontsize=5, rotation=30)


if __name__ == "__main__":
    app()
