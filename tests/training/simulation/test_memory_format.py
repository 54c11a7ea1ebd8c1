"""Memory format and precision of a simulation: recorded, kept on resuming, and right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import torch

from edge_sdk.nets.memory_format import ChosenFormat
from edge_sdk.training.protocol.plan import Plan
from server.training.recipe.recipe import Recipe, read_recipe
from server.training.run.checkpoint import latest_checkpoint
from server.training.simulation.build import build_simulation
from server.training.simulation.run import simulate

METHODS = ("splitfed-v1", "supersfl", "scala", "harmony", "besplit", "splitlpf", "fedavg")


def recipe_of(
    method: str = "supersfl", rounds: int = 2, train: Mapping[str, str] | None = None
) -> Recipe:
    return read_recipe(
        {
            "method": method,
            "data": {"name": "digits", "clients": 3, "train_max": 300, "test_max": 200},
            "train": {
                "backbone": "tiny",
                "rounds": rounds,
                "batch": 16,
                "learning_rate": 0.1,
                "depth": 2,
                **({"iterations": 6} if method == "scala" else {}),
                **(train or {}),
            },
        }
    )


@pytest.mark.parametrize("chosen", ["channels_last", "contiguous"])
def test_a_resumed_run_keeps_the_format_of_its_first_rounds(
    tmp_path: Path, chosen: ChosenFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurement is made to choose; for the resumed half it would choose the other format."""
    measured = [chosen]
    monkeypatch.setattr(
        "server.training.run.build.chosen_format", lambda *_: measured.pop() if measured else ""
    )
    report = simulate(recipe_of(rounds=1), tmp_path / "run")
    assert report["memory_format"] == chosen
    resumed = simulate(recipe_of(rounds=2), tmp_path / "run", resume=True)
    assert resumed["memory_format"] == chosen
    monkeypatch.undo()

    simulate(recipe_of(rounds=2, train={"memory_format": chosen}), tmp_path / "whole")

    ends = [latest_checkpoint(tmp_path / name) for name in ("run", "whole")]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].tensors.keys() == ends[1].tensors.keys()
    for name, tensor in ends[0].tensors.items():
        assert torch.equal(tensor, ends[1].tensors[name]), name


def test_a_checkpoint_of_the_release_before_is_contiguous(tmp_path: Path) -> None:
    simulate(recipe_of(rounds=1), tmp_path)
    [path] = (tmp_path / "checkpoints").iterdir()
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = orjson.loads(raw[8 : 8 + size])
    kept = orjson.loads(header["__metadata__"]["run"])
    del kept["memory_format"]
    header["__metadata__"]["run"] = orjson.dumps(kept).decode()
    written = orjson.dumps(header)
    path.write_bytes(len(written).to_bytes(8, "little") + written + raw[8 + size :])

    found = latest_checkpoint(tmp_path)

    assert found is not None
    assert found.memory_format == "contiguous"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_in_bf16_with_channels_last(method: str) -> None:
    """All weights stay float32 and finite, and end near those of fp32."""
    ends = []
    for numbers in ({}, {"precision": "bf16", "memory_format": "channels_last"}):
        run = build_simulation(recipe_of(method, train=numbers))
        result = run.loop.run_round(1, 0)
        assert result.merged
        assert not result.refused
        ends.append(run.state.read())

    plain, half = ends
    for name, tensor in half.items():
        assert tensor.dtype == torch.float32, name
        # one round moves weights by about 0.1; bf16 keeps 8 bits of each product
        torch.testing.assert_close(tensor, plain[name], rtol=0.1, atol=0.05)
    assert any(not torch.equal(half[name], plain[name]) for name in plain)


def test_a_plan_says_nothing_that_the_release_before_does_not_know() -> None:
    run = build_simulation(recipe_of())
    plan = next(iter(run.plans.values()))
    open_plan = replace(plan, training=replace(plan.training, memory_format="auto"))

    assert not {"memory_format", "precision"} & open_plan.to_dict().keys()
    assert Plan.from_dict(open_plan.to_dict()) == open_plan
    assert Plan.from_dict(plan.to_dict()).training.memory_format == "contiguous"
