"""The loop: what a device was not sure of is kept, read as DATA, and trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from typer.testing import CliRunner

from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.kept.index import read_index
from edge_sdk.kept.keeper import Keeper
from edge_sdk.settings_file.keep_table import KeepTable
from edge_sdk.training.data.load import open_data
from server.training.commands import simulate_app

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fleet import Fleet

pytestmark = pytest.mark.deadline

HARD = 120
RECIPE = """
method = "supersfl"
[data]
name = "digits"
clients = 2
partition = "iid"
[train]
backbone = "tiny"
rounds = 1
learning_rate = 0.05
batch = 8
"""


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_hard_inputs_are_trained_on(fleet: Fleet, digits: Digits, tmp_path: Path) -> None:
    place = tmp_path / "kept"
    settings = AgentSettings(threshold=-1.0, deadline_s=5.0)
    observers = [Keeper(place, KeepTable())]
    with EdgeAgent.open(fleet.device("loop"), settings, observers=observers) as agent:
        answers = list(agent.predict_many(digits.x[:HARD]))
        corrected = (answers[0].label + 1) % 10
        assert agent.correct(answers[0].id, corrected)

    samples = open_data(str(place / "labelled"))
    assert samples.class_names == tuple(str(digit) for digit in range(10))
    assert samples.train.y is not None
    rows = {answer.id: row for row, answer in enumerate(answers)}
    files = sorted((place / "labelled").glob("*/*.png"))  # as DATA reads them
    order = [rows[path.stem] for path in files]
    labels = [corrected if row == 0 else answers[row].label for row in order]
    assert samples.train.y.tolist() == labels
    np.testing.assert_array_equal(samples.train.x, digits.x[order])
    assert len(read_index(place)) == HARD

    recipe = tmp_path / "next.toml"
    recipe.write_text(RECIPE)
    out = tmp_path / "run"
    options = [str(recipe), "--data", str(place / "labelled"), "--out", str(out)]
    done = CliRunner().invoke(simulate_app, options)
    assert done.exit_code == 0, done.output
    weights = load_file(out / "weights.safetensors")
    assert all(np.isfinite(value).all() for value in weights.values())
