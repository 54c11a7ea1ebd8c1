"""The recipe of a row of a paper's table, and the training that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.jobs.job import Job
from benchmarks.paper.tables import Row, Scale, Table, over


def job_of(  # noqa: PLR0917 - a row of a table, with one seed
    name: str, table: Table, row: Row, scale: Scale, seed: int = 0, data: Path | None = None
) -> Job:
    """The training of a row at that scale with that seed.

    Args:
        name: of the table. data: folder of the data set's files.
    """
    recipe = over(over(table.scales[scale], row.recipe), {"seed": seed})
    if recipe["method"] != "scala" and "parts" not in recipe and "iterations" in recipe["train"]:
        # SCALA alone shares a joint batch out; the participants of the others have as much together
        recipe = over(recipe, {"train": {"batch": _share_of_batch(recipe)}})
    if data is not None and recipe["data"]["name"] != "digits":
        recipe = over(recipe, {"data": {"folder": str(data)}})
    # as in the papers: nothing is chosen after training, so clients train on all training samples
    return Job(name, row.name, over(recipe, {"data": {"held_out": 0}}))


def _share_of_batch(recipe: Mapping[str, Any]) -> int:
    """A participant's share of a joint batch."""
    clients: int = recipe["data"]["clients"]
    share: float = recipe["round"]["participation"]
    participants = max(1, round(clients * share))
    batch: int = recipe["train"]["batch"]
    return max(1, batch // participants)
