from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from edge_sdk.manifest import BundleManifest, ModelManifest
from edge_sdk.nets import Supernet, build
from edge_sdk.training.data.load import Dataset, load_dataset
from exporters.model import export_model


@dataclass(frozen=True)
class Tree:
    """An exported model and what it was made from."""

    net: Supernet
    data: Dataset
    folder: Path
    manifest: ModelManifest
    lines: list[str]

    def bundle(self, variant: str) -> BundleManifest:
        return BundleManifest.load(self.folder / "bundles" / variant)

    def path(self, variant: str, graph: str = "exit") -> Path:
        return self.folder / "bundles" / variant / self.bundle(variant).graphs[graph].file


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load_dataset("digits")


@pytest.fixture(scope="session")
def fashion(fashion_mnist_fixture: Path) -> Dataset:
    return load_dataset("fashion-mnist", fashion_mnist_fixture)


@pytest.fixture(scope="session")
def tiny(digits: Dataset) -> Supernet:
    return trained("tiny", digits, samples=1024, epochs=4)


@pytest.fixture(scope="session")
def cnn8(fashion: Dataset) -> Supernet:
    return trained("cnn8", fashion, samples=512, epochs=1)


@pytest.fixture(scope="session")
def tiny_tree(tiny: Supernet, digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """`tiny` at two of its four cuts, fp32."""
    return tiny_export(tiny, digits, tmp_path_factory.mktemp("models"))


def tiny_export(net: Supernet, data: Dataset, out: Path, **options: Any) -> Tree:
    """`tiny` at two of its four cuts, fp32, with these options of the export."""
    lines: list[str] = []
    manifest = export_model(
        net,
        data.x_test,
        data.y_test,
        out,
        name="digits",
        version=1,
        class_names=data.class_names,
        depths=(2, 4),
        int8="never",
        progress=lines.append,
        **options,
    )
    return Tree(net, data, out / "digits" / "1", manifest, lines)


def trained(name: str, data: Dataset, *, samples: int, epochs: int) -> Supernet:
    """All exits and the end trained together, a second or two: sure enough that ties are rare."""
    net = build(
        name,
        classes=data.classes,
        input_shape=data.x_train.shape[1:],
        mean=data.mean,
        std=data.std,
        seed=0,
    )
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    x = torch.from_numpy(np.array(data.x_train[:samples]))
    y = torch.from_numpy(np.array(data.y_train[:samples]))
    order = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for picked in torch.split(torch.randperm(len(x), generator=order), 64):
            exits, final = net.forward_exits(x[picked])
            optimiser.zero_grad()
            losses = [cross_entropy(logits, y[picked]) for logits in (*exits.values(), final)]
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]  # torch's own
            optimiser.step()
    return net
