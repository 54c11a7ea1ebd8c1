"""The record of a run on disk: what is written first, and what an interruption leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_sdk.errors import ConfigurationError
from server.training.recipe.recipe import load_recipe
from server.training.run.checkpoint import latest_checkpoint
from server.training.run.record import LOG, record_rounds
from server.training.run.run import Row
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds

RECIPE = Path(__file__).parents[3] / "examples" / "recipes" / "supersfl-digits.toml"


def test_files_that_a_checkpoint_replaces_go_before_anything_else_can_fail(tmp_path: Path) -> None:
    """A late update whose merge is saved would count twice if its file outlived an interruption."""
    simulation = build_simulation(load_recipe(RECIPE))
    rows: list[Row] = []
    saved: list[int] = []

    def note_saved() -> None:
        checkpoint = latest_checkpoint(tmp_path)
        assert checkpoint is not None
        saved.append(checkpoint.round)

    def interrupt(row: Row) -> None:
        raise KeyboardInterrupt(row["round"])

    with pytest.raises(KeyboardInterrupt):
        record_rounds(
            tmp_path,
            simulation,
            rows,
            run_rounds(simulation, rows),
            interrupt,
            on_saved=note_saved,
        )
    assert saved == [1]
    assert len((tmp_path / LOG).read_bytes().splitlines()) == 1


def broken_round(number: int, refused: int) -> Row:
    names = [f"pi-{n}" for n in range(refused)]
    return {
        "round": number,
        "participants": [],
        "refused": dict.fromkeys(names, "features: why is for people"),
        "faults": dict.fromkeys(names, "not-finite"),
        "merged": 0,
        "loss": None,
    }


@pytest.mark.parametrize(("clients", "kept"), [(1, 2), (3, 0)])
def test_one_broken_client_ends_no_training_in_a_round(
    tmp_path: Path, clients: int, kept: int
) -> None:
    simulation = build_simulation(load_recipe(RECIPE))
    rows: list[Row] = []
    shown: list[int] = []

    def rounds() -> Iterator[Row]:
        for number in range(1, 10):
            rows.append(broken_round(number, clients))
            yield rows[-1]

    with pytest.raises(ConfigurationError, match=f"diverged: {clients} of {clients} clients"):
        record_rounds(tmp_path, simulation, rows, rounds(), lambda row: shown.append(row["round"]))
    assert len(shown) == kept
