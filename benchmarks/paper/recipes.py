"""The recipe of a row of a paper's table, and the training that it asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.jobs.job import Job
from benchmarks.paper.measures import of_clients
from benchmarks.paper.tables.table import Row, Scale, Table, over
from edge_sdk.training.data.load import HELD_OUT_SHARE
from server.training.recipe.recipe import read_recipe

# Of the data set without its test part, from which held-out samples are still to be taken.
_SAMPLES: Final[Mapping[str, int]] = {"digits": 1437, "fashion-mnist": 60_000, "cifar-10": 50_000}


def job_of(  # noqa: PLR0917 - a row of a table, with one seed
    name: str, table: Table, row: Row, scale: Scale, seed: int = 0, data: Path | None = None
) -> Job:
    """The training of a row at that scale with that seed.

    Args:
        name: of the table. data: folder of the data set's files.
    """
    recipe = over(_with_tuned(table, row, scale), {"seed": seed})
    recipe = over(recipe, {"data": {"held_out": _held_out(table, scale)}})
    # SCALA alone shares a joint batch out; a round has as many samples for all rows of a table
    joint = recipe["method"] == "scala" and "parts" not in recipe
    if joint and "iterations" not in recipe["train"]:
        recipe = over(recipe, {"train": {"iterations": _joint_batches(recipe)}})
    if not joint and "parts" not in recipe and "iterations" in recipe["train"]:
        recipe = over(recipe, {"train": {"batch": _share_of_batch(recipe)}})
    # after the share of a joint batch, which is for rows whose scale counts batches itself
    if recipe["method"] == "mergesfl" and "iterations" not in recipe["train"]:
        recipe = over(recipe, {"train": {"iterations": _merged_batches(recipe)}})
    if data is not None and recipe["data"]["name"] != "digits":
        recipe = over(recipe, {"data": {"folder": str(data)}})
    return Job(name, row.name, recipe)


def _with_tuned(table: Table, row: Row, scale: Scale) -> dict[str, Any]:
    """The row's recipe over the numbers that were chosen for its method, over the scale's."""
    base = table.scales[scale]
    plain = over(base, row.recipe)
    chosen = table.tuned_numbers(scale)
    if row.name in chosen:
        # the default recipe is no method: its row has its name, and what was swept is in the row
        return over(plain, chosen[row.name])
    return over(over(base, chosen.get(plain["method"], {})), row.recipe)


@cache
def _held_out(table: Table, scale: Scale) -> float:
    """Share of the samples that no row of the table trains on.

    It reads the recipes of all rows, and each row asks for it.

    Thresholds of gated pairs are chosen on it, in tables that have any; the other rows hold it out
    too, so that all train on the same samples. Where nothing is chosen after training, clients
    train on all samples, as in the papers.
    """
    if not any(map(of_clients, table.measures)):
        return 0.0
    counted = {"train": {"iterations": 1}}  # SCALA's recipes ask for them; nothing here does
    recipes = [
        read_recipe(over(over(table.scales[scale], row.recipe), counted)) for row in table.rows
    ]
    # with a local split each client has validation samples of its own
    chosen = any(r.built_method.share_exits and r.data.split != "local" for r in recipes)
    return HELD_OUT_SHARE if chosen else 0.0


def _share_of_batch(recipe: Mapping[str, Any]) -> int:
    """A participant's share of a joint batch."""
    batch: int = recipe["train"]["batch"]
    return max(1, batch // _participants(recipe))


def _participants(recipe: Mapping[str, Any]) -> int:
    clients: int = recipe["data"]["clients"]
    share: float = recipe.get("round", {}).get("participation", 1.0)
    return max(1, round(clients * share))


def _merged_batches(recipe: Mapping[str, Any]) -> int:
    """Batches of MergeSFL's workers with as many samples as the epochs of the other rows' clients.

    The fastest worker has the batch of the other rows, the others have shares of it.
    """
    speeds: Sequence[float] = recipe["method_numbers"]["speeds"]
    joint = recipe["train"]["batch"] * sum(speeds) / (len(speeds) * max(speeds))
    sharers = _participants(recipe)
    return _joint_batches(over(recipe, {"train": {"batch": joint * sharers}}))


def _joint_batches(recipe: Mapping[str, Any]) -> int:
    """Joint batches with as many samples as the epochs of the other rows' clients."""
    data, train = recipe["data"], recipe["train"]
    samples = min(
        data.get("train_max") or math.inf, (1 - data["held_out"]) * _SAMPLES[data["name"]]
    )
    share: float = recipe.get("round", {}).get("participation", 1.0)
    batches: float = train.get("epochs", 1) * share * samples / train["batch"]
    return max(1, round(batches))
