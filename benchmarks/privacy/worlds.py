"""The networks that are attacked: their data, their amount of training, and the attacker's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.attacks.inversion import Attacker
from benchmarks.paper.tables.table import over
from server.training.recipe.recipe import Recipe, read_recipe

DataName = Literal["digits", "fashion-mnist"]


@dataclass(frozen=True, slots=True)
class Scale:
    """Amount of training on one data set, and the strength of the inversion attack.

    Attributes:
        depth: the cut where only one is tried.
        members: training samples of the networks whose members are looked for: few, since a network
            that saw few samples often knows them by heart.
        member_rounds: rounds of five epochs of these networks.
        attacked: largest number of images, gradients or members that are attacked.
    """

    backbone: str
    depth: int
    rounds: int
    train_max: int
    test_max: int
    members: int
    member_rounds: int
    attacked: int
    inverter: Attacker


SCALES: Final[Mapping[str, Scale]] = {
    "digits": Scale("tiny", 2, 20, 1_400, 397, 700, 25, 200, Attacker(16, 1, 15)),
    "fashion-mnist": Scale("cnn6", 2, 10, 5_000, 2_000, 1_000, 20, 500, Attacker(32, 2, 8)),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One attack on one network.

    Attributes:
        part: `images`, `labels`, `members` or `noise`.
        name: what was attacked.
        figures: by name; None for a figure that cannot be had.
    """

    part: str
    name: str
    seed: int
    figures: Mapping[str, float | None]
    why: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The trial for a report."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class World:
    """One data set, its scale, and the seed of all that is drawn.

    Attributes:
        folder: of the data set's files; None for one that needs none.
    """

    data: DataName
    scale: Scale
    seed: int
    folder: Path | None = None

    def recipe(self, method: str, changes: Mapping[str, Any] | None = None) -> Recipe:
        """A recipe of ten clients on this data set.

        Raises: ConfigurationError for numbers that the method refuses.
        """
        scale = self.scale
        plain = {
            "method": method,
            "seed": self.seed,
            "data": {
                "name": self.data,
                "clients": 10,
                "held_out": 0,
                "train_max": scale.train_max,
                "test_max": scale.test_max,
            },
            "train": {
                "backbone": scale.backbone,
                "depth": scale.depth,
                "rounds": scale.rounds,
                "epochs": 3,
                "batch": 16,
                "learning_rate": 0.05,
                "momentum": 0.9,
            },
            "evaluate": {"every": 1_000},
        }
        if self.folder is not None:
            plain = over(plain, {"data": {"folder": str(self.folder)}})
        return read_recipe(over(plain, changes or {}))
