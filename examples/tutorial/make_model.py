"""Make what the tutorial begins with: a trained classifier as ONNX, and pictures for it.

    python make_model.py DATA OUT

DATA is a folder with the four published files of Fashion-MNIST. This script stands for your own
training, so it uses torch alone and nothing of splitedge. It writes

    OUT/model.onnx       a small convolutional network, pixels from 0 to 1
    OUT/classes.txt      names of its classes
    OUT/pictures/*.png   pictures without labels, which the network did not learn from
    OUT/new/CLASS/*.png  ten test pictures of each class
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

CLASSES = (
    "t-shirt", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle-boot",
)  # fmt: skip
LEARNT, UNLABELLED = 20_000, 4_000
MIXED_UP = 1_000
NEW = 10
BATCH = 64


def main() -> None:
    """Train, then write the model and the pictures."""
    parser = argparse.ArgumentParser(description="Make the tutorial's model and pictures.")
    parser.add_argument("data", type=Path, help="folder with the four files of Fashion-MNIST")
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--mixed-up",
        action="store_true",
        help="make a bad model: it learns labels in another order than the pictures by heart",
    )
    arguments = parser.parse_args()
    images, labels = read(arguments.data, "train")
    learnt = min(LEARNT, len(images) // 2)
    if arguments.mixed_up:
        labels = np.random.default_rng(0).permutation(labels)
        learnt = min(MIXED_UP, learnt)  # few enough to be learnt by heart
    net = train(images[:learnt], labels[:learnt], arguments.epochs)
    write_model(net, arguments.out)
    save(images[learnt : learnt + UNLABELLED], arguments.out / "pictures")
    images, labels = read(arguments.data, "t10k")
    for label, name in enumerate(CLASSES):
        save(images[labels == label][:NEW], arguments.out / "new" / name)
    (arguments.out / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    print(f"{arguments.out}: model.onnx, classes.txt, pictures, new")


def read(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 28, 28) and labels (n,) of one part."""
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return images, labels


def train(images: np.ndarray, labels: np.ndarray, epochs: int) -> nn.Sequential:
    """A network trained by cross-entropy."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more gain little here, and wait for each other on a busy machine
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, len(CLASSES)),
    )  # fmt: skip
    x = torch.from_numpy(images.astype(np.float32) / 255)[:, None]
    y = torch.from_numpy(labels.astype(np.int64))
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    for epoch in range(1, epochs + 1):
        for rows in torch.split(torch.randperm(len(y)), BATCH):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
            loss.backward()
            optimiser.step()
        print(f"epoch {epoch} of {epochs}: loss {loss.item():.3f}", flush=True)
    return net.eval()


def write_model(net: nn.Module, folder: Path) -> None:
    """Write model.onnx, with an open batch axis."""
    folder.mkdir(parents=True, exist_ok=True)
    batch = torch.export.Dim("batch", min=1, max=256)
    program = torch.onnx.export(
        net, (torch.zeros(2, 1, 28, 28),), dynamo=True, verbose=False, dynamic_shapes=({0: batch},)
    )
    program.save(str(folder / "model.onnx"))


def save(images: Iterable[np.ndarray], folder: Path) -> None:
    """Write each image as a PNG file."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number:05}.png")


if __name__ == "__main__":
    main()
