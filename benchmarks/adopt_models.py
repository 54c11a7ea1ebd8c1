"""Classifiers that `benchmarks.adopt` adopts: trained here without exits, or found in a package."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import nn

from edge_sdk.durable import make_folder
from edge_sdk.nets import build
from edge_sdk.training.data.load import Dataset, load_dataset

Array = NDArray[Any]

UNLABELLED: Final = 12_000
BATCH: Final = 64


@dataclass(frozen=True, slots=True)
class Trained:
    """A backbone to train without exits, as a user's own training would.

    Attributes:
        images: labelled ones that it learns from; the unlabelled ones come after them.
        learning_rate: of Adam, or the peak of SGD's one cycle where `augment`.
        augment: train by SGD on images that are mirrored and shifted at random.
        bfloat16: multiply in bfloat16 while it trains.
    """

    backbone: str
    dataset: str
    images: int
    epochs: int
    learning_rate: float
    augment: bool = False
    bfloat16: bool = False

    @property
    def about(self) -> str:
        """Origin of the model, as a sentence."""
        return (
            f"{self.backbone} learnt from {self.images} labelled images in {self.epochs} epochs and"
            " knows of no exits."
        )

    def model(self, data: Path, folder: Path) -> Path:
        """The trained model as an ONNX file in `folder`; trained unless it is there."""
        path = folder / f"{self.backbone}-{self.epochs}.onnx"
        if not path.is_file():
            make_folder(folder)
            _train(self, load_dataset(self.dataset, data), path)
        return path

    def samples(self, data: Path) -> dict[str, Array]:
        """Unlabelled images that the model did not learn from, and labelled test images."""
        dataset = load_dataset(self.dataset, data)
        end = self.images + UNLABELLED
        return {
            "x_train": dataset.x_train[self.images : end].astype(np.float32),
            "x_test": dataset.x_test.astype(np.float32),
            "y_test": dataset.y_test,
            "class_names": np.array(dataset.class_names),
        }


@dataclass(frozen=True, slots=True)
class TextDirection:
    """PP-OCR's classifier of a line's direction, from a package, and lines drawn for it.

    The package gives no samples, so lines of random words are drawn in Pillow's own font. Half of
    them stand on their head.
    """

    package: str = "rapidocr_onnxruntime==1.4.4"
    member: str = "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx"
    test: int = 2_000
    unlabelled: int = 4_000
    dataset: str = "text-lines"

    @property
    def about(self) -> str:
        """Origin of the model, as a sentence."""
        return f"`{Path(self.member).name}` is from the package {self.package}."

    def model(self, data: Path, folder: Path) -> Path:  # noqa: ARG002 - it needs no data
        """The model's file in `folder`, out of the package from the package index."""
        path = folder / Path(self.member).name
        if not path.is_file():
            make_folder(folder)
            with TemporaryDirectory() as work:
                pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", work]
                subprocess.run([*pip, self.package], check=True)
                with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
                    path.write_bytes(wheel.read(self.member))
        return path

    def samples(self, data: Path) -> dict[str, Array]:  # noqa: ARG002 - it needs no data
        """Lines as the model takes them: (3, 48, 192), values from -1 to 1."""
        random = np.random.default_rng(0)
        count = self.unlabelled + self.test
        turned = np.arange(count) % 2
        x = np.stack([_line(random, turned=bool(each)) for each in turned])
        return {
            "x_train": x[: self.unlabelled],
            "x_test": x[self.unlabelled :],
            "y_test": turned[self.unlabelled :],
            "class_names": np.array(["upright", "turned"]),
        }


Subject = Trained | TextDirection

SUBJECTS: Final[Mapping[str, Subject]] = {
    "cnn6": Trained("cnn6", "fashion-mnist", 12_000, 3, 1e-3),
    "resnet18": Trained("resnet18", "cifar-10", 38_000, 4, 0.1, augment=True, bfloat16=True),
    "mobilenetv2": Trained("mobilenetv2", "cifar-10", 38_000, 4, 0.1, augment=True),
    "text-direction": TextDirection(),
}


def sha256(path: Path) -> str:
    """Hash of a file, so that a report names the very model."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _train(subject: Trained, dataset: Dataset, path: Path) -> None:
    """Train by cross-entropy, and write the network with an open batch axis."""
    net = build(
        subject.backbone, classes=dataset.classes, mean=dataset.mean, std=dataset.std,
        input_shape=dataset.x_train.shape[1:], seed=0,
    )  # fmt: skip
    whole = net.segment(0, None).train()
    if subject.augment:
        _keep_small_images(whole)
        _lay_out(whole, torch.channels_last)
    x = torch.from_numpy(np.array(dataset.x_train[: subject.images]))
    y = torch.from_numpy(np.array(dataset.y_train[: subject.images]))
    optimiser, cycle = _optimiser(subject, whole, steps=subject.epochs * -(-len(y) // BATCH))
    generator = torch.Generator().manual_seed(0)
    for epoch in range(1, subject.epochs + 1):
        for batch, labels in _batches(x, y, generator, augment=subject.augment):
            optimiser.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=subject.bfloat16):
                logits = whole(batch)
            loss = nn.functional.cross_entropy(logits.float(), labels)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimiser.step()
            if cycle is not None:
                cycle.step()
        done = f"{subject.backbone}: epoch {epoch} of {subject.epochs}"
        print(f"{done}, last loss {loss.item():.3f}", flush=True)
    _lay_out(whole, torch.contiguous_format)
    _write_onnx(whole.eval(), x[:2].float(), path)


def _optimiser(
    subject: Trained, whole: nn.Module, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.OneCycleLR | None]:
    rate = subject.learning_rate
    if not subject.augment:
        return torch.optim.Adam(whole.parameters(), rate), None
    sgd = torch.optim.SGD(whole.parameters(), rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    return sgd, torch.optim.lr_scheduler.OneCycleLR(sgd, rate, total_steps=steps)


def _batches(
    x: torch.Tensor, y: torch.Tensor, generator: torch.Generator, *, augment: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for rows in torch.split(torch.randperm(len(y), generator=generator), BATCH):
        batch = x[rows].float()
        if augment:
            batch = _augmented(batch, generator).contiguous(memory_format=torch.channels_last)
        yield batch, y[rows]


def _augmented(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Every image mirrored with probability 1/2; the batch shifted by up to 4 pixels."""
    mirrored = torch.rand(len(x), 1, 1, 1, generator=generator) < 0.5
    x = torch.where(mirrored, x.flip(-1), x)
    down, right = torch.randint(0, 9, (2,), generator=generator).tolist()
    height, width = x.shape[2:]
    padded = nn.functional.pad(x, (4, 4, 4, 4))
    return padded[:, :, down : down + height, right : right + width]


def _keep_small_images(whole: nn.Module) -> None:
    """Let the first convolution keep the resolution, as networks for images of 32 x 32 do."""
    stem = next(layer for layer in whole.modules() if isinstance(layer, nn.Conv2d))
    stem.stride = (1, 1)
    if stem.kernel_size == (7, 7):  # its middle, scaled to the smaller fan-in
        stem.kernel_size, stem.padding = (3, 3), (1, 1)
        stem.weight = nn.Parameter(stem.weight[:, :, 2:5, 2:5].clone() * 7 / 3)


def _lay_out(whole: nn.Module, memory_format: torch.memory_format) -> None:
    """Give weights of four dimensions that order in memory."""
    for weight in whole.parameters():
        if weight.ndim == 4:
            weight.data = weight.data.contiguous(memory_format=memory_format)


def _write_onnx(whole: nn.Module, x: torch.Tensor, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            whole,
            (x,),
            dynamo=True,
            verbose=False,
            dynamic_shapes=({0: torch.export.Dim("b", min=1, max=256)},),
        )
    assert program is not None
    program.save(str(path))


def _line(random: np.random.Generator, *, turned: bool) -> NDArray[np.float32]:
    """A line of one to four random words, blurred and noisy, (3, 48, 192)."""
    letters: Sequence[str] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    words = [
        "".join(random.choice(list(letters), random.integers(2, 9)))
        for _ in range(random.integers(1, 5))
    ]
    font = ImageFont.load_default(int(random.integers(24, 40)))
    text = " ".join(words)
    left, top, right, bottom = font.getbbox(text)
    margin = int(random.integers(2, 10))
    paper, ink = random.integers(150, 256, 3), random.integers(0, 100, 3)
    size = (int(right - left) + 2 * margin, int(bottom - top) + 2 * margin)
    image = Image.new("RGB", size, tuple(paper.tolist()))
    draw = ImageDraw.Draw(image)
    draw.text((margin - left, margin - top), text, font=font, fill=tuple(ink.tolist()))
    image = image.rotate(float(random.normal(0, 2)), fillcolor=tuple(paper.tolist()), expand=True)
    image = image.filter(ImageFilter.GaussianBlur(float(random.uniform(0, 2))))
    if turned:
        image = image.rotate(180)
    # 48 high; as wide as it comes, up to 192, and the rest stays 0, as in the package
    width = min(192, max(1, round(image.width * 48 / image.height)))
    pixels = np.asarray(image.resize((width, 48)), np.float32)
    pixels += random.normal(0, random.uniform(0, 20), pixels.shape).astype(np.float32)
    line = np.zeros((3, 48, 192), np.float32)
    # channels in the order blue, green, red
    line[:, :, :width] = pixels.clip(0, 255).transpose(2, 0, 1)[::-1] / 127.5 - 1
    return line
