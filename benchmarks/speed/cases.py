"""The simulations whose speed is compared with plain PyTorch, and the recipes of both sides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks.plain_loops import SuperSfl, WholeNetwork
from benchmarks.reports import RECIPES
from edge_sdk.nets.precision import Precision
from server.training.recipe.recipe import Recipe, load_recipe

Data = Annotated[Path, typer.Option(metavar="DIR", help="Folder of Fashion-MNIST's files.")]
# of the plots against clients
CURVE_METHODS: Final = ("fedavg", "splitfed-v1", "supersfl")
CURVE_CLIENTS: Final = (10, 100, 1_000, 10_000)

LOOPS: Final[dict[str, type[WholeNetwork | SuperSfl]]] = {
    "fedavg": WholeNetwork,
    "splitfed-v1": WholeNetwork,
    "supersfl": SuperSfl,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation.

    Attributes:
        samples: of all clients, a round. least: the goal, in samples/s over the plain loop's.
        workers: processes that train the clients; 0 for the simulation's own.
    """

    method: str
    backbone: str
    clients: int
    samples: int
    least: float
    precision: Precision = "fp32"
    workers: int = 0

    @property
    def name(self) -> str:
        """The case in words."""
        shared = f", {self.workers} workers" if self.workers else ""
        return f"{self.method}, {self.backbone}, {self.clients} clients, {self.precision}{shared}"

    def recipe(self, data: Path) -> Recipe:
        """The recipe; `tiny` trains on the digits, all others on Fashion-MNIST."""
        small = self.backbone == "tiny"
        recipe = load_recipe(
            RECIPES / f"{self.method}-{'digits' if small else 'fashion-mnist'}.toml"
        )
        folder = recipe.data.folder if small else data
        numbers = replace(recipe.train.training, precision=self.precision)
        # resnet18's first cut is its stem
        depth = None if self.backbone in {"tiny", "cnn6"} else 2
        return replace(
            recipe,
            data=replace(
                recipe.data,
                clients=self.clients,
                partition="iid",
                numbers={},
                folder=folder,
                held_out=0,
                train_max=self.samples,
            ),
            train=replace(
                recipe.train, backbone=self.backbone, depth=depth, depths=None, training=numbers
            ),
        )


CASES: Final = (
    Case("fedavg", "tiny", 10, 1400, 0.9),
    Case("splitfed-v1", "tiny", 10, 1400, 0.9),
    Case("supersfl", "tiny", 10, 1400, 0.9),
    Case("fedavg", "cnn6", 20, 4000, 1.3),
    Case("splitfed-v1", "cnn6", 20, 4000, 1.3),
    Case("supersfl", "cnn6", 20, 4000, 1.3),
    Case("splitfed-v1", "cnn6", 20, 4000, 1.8, "bf16"),
    Case("splitfed-v1", "cnn8", 4, 512, 1.8, "bf16"),
    Case("splitfed-v1", "resnet18", 4, 512, 1.8, "bf16"),
)
# the least is of two workers over one
SHARED: Final = (
    ("splitfed-v1", "cnn6", 4000),
    ("supersfl", "cnn6", 4000),
    ("splitfed-v1", "cnn8", 512),
)
SHARED_LEAST: Final = 1.8
