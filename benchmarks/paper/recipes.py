"""The recipe of a row of a paper's table, and the training that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.jobs.job import Job
from benchmarks.paper.measures import of_clients
from benchmarks.paper.tables import Row, Scale, Table, over
from benchmarks.paper.tuned import tuned_numbers
from edge_sdk.training.data.load import HELD_OUT_SHARE
from server.training.recipe.recipe import read_recipe


def job_of(  # noqa: PLR0917 - a row of a table, with one seed
    name: str, table: Table, row: Row, scale: Scale, seed: int = 0, data: Path | None = None
) -> Job:
    """The training of a row at that scale with that seed.

    Args:
        name: of the table. data: folder of the data set's files.
    """
    recipe = over(_with_tuned(table, row, scale), {"seed": seed})
    if recipe["method"] != "scala" and "parts" not in recipe and "iterations" in recipe["train"]:
        # SCALA alone shares a joint batch out; the participants of the others have as much together
        recipe = over(recipe, {"train": {"batch": _share_of_batch(recipe)}})
    if data is not None and recipe["data"]["name"] != "digits":
        recipe = over(recipe, {"data": {"folder": str(data)}})
    return Job(name, row.name, over(recipe, {"data": {"held_out": _held_out(table, scale)}}))


def _with_tuned(table: Table, row: Row, scale: Scale) -> dict[str, Any]:
    """The row's recipe over the numbers that were chosen for its method, over the scale's."""
    base = table.scales[scale]
    if scale in table.tuned:
        plain = over(base, row.recipe)
        chosen = tuned_numbers(plain["data"]["name"])
        # the default recipe is no method: its row has its name
        base = over(base, chosen.get(row.name, chosen.get(plain["method"], {})))
    return over(base, row.recipe)


def _held_out(table: Table, scale: Scale) -> float:
    """Share of the samples that no row of the table trains on.

    Thresholds of gated pairs are chosen on it, in tables that have any; the other rows hold it out
    too, so that all train on the same samples. Where nothing is chosen after training, clients
    train on all samples, as in the papers.
    """
    if not any(map(of_clients, table.measures)):
        return 0.0
    recipes = [read_recipe(over(table.scales[scale], row.recipe)) for row in table.rows]
    # with a local split each client has validation samples of its own
    chosen = any(r.built_method.share_exits and r.data.split != "local" for r in recipes)
    return HELD_OUT_SHARE if chosen else 0.0


def _share_of_batch(recipe: Mapping[str, Any]) -> int:
    """A participant's share of a joint batch."""
    clients: int = recipe["data"]["clients"]
    share: float = recipe["round"]["participation"]
    participants = max(1, round(clients * share))
    batch: int = recipe["train"]["batch"]
    return max(1, batch // participants)
