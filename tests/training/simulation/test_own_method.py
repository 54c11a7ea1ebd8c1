"""A method of the user's own, from a file beside the recipe: examples/own_method.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from edge_sdk.errors import ConfigurationError
from server.training.methods.splitfed import splitfed_v1
from server.training.recipe.recipe import Recipe, load_recipe, read_recipe
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds, simulate
from tests.reader import ROOT, Document, Reader
from tests.training.worlds import World, assert_same, differences

EXAMPLES = ROOT / "examples"
NAME = "own_method:focal_splitfed"
PLAIN = {"gamma": 0.0, "power": 0.0, "mu": 0.0}
DOCUMENT = Document("docs/own-method.md")


def recipe(method: str = NAME, **changes: Any) -> Recipe:
    return read_recipe(
        {
            "method": method,
            "method_folder": str(EXAMPLES),
            "data": {"name": "digits", "clients": 2, "train_max": 80, "test_max": 20},
            "train": {
                "backbone": "tiny",
                "depth": 2,
                "rounds": 2,
                "batch": 16,
                "learning_rate": 0.1,
            },
            **changes,
        }
    )


def no_method() -> dict[str, str]:
    return {"name": "mine"}


def test_without_its_numbers_the_example_is_splitfed() -> None:
    own = recipe(method_numbers=PLAIN).built_method
    assert_same(World(own).trained(), World(splitfed_v1()).trained())
    for number in PLAIN:
        other = recipe(method_numbers={**PLAIN, number: 1.0}).built_method
        assert differences(World(other).trained(), World(splitfed_v1()).trained()), number


def test_the_focal_loss_by_hand() -> None:
    # p = 1/2 for both classes: (1 - 1/2)^2 * ln 2
    step: Any = recipe(method_numbers={"gamma": 2.0}).built_method.server_step
    loss = step.func.__globals__["focal_loss"]("a", torch.zeros(1, 2), torch.tensor([0]), gamma=2.0)
    assert loss.item() == pytest.approx(0.25 * 0.693147, rel=1e-5)


def test_losses_that_noise_hides_weigh_by_samples() -> None:
    noise = {"update_clip": 1.0, "update_sigma": 1.0, "feature_clip": 1.0, "feature_sigma": 1.0}
    data = {"name": "digits", "clients": 3, "train_max": 80, "test_max": 20}
    run = build_simulation(recipe(privacy=noise, data=data))
    weights = run.loop.run_round(1, 0).weights
    sizes = {name: len(client.y) for name, client in run.clients.items()}
    assert len(set(sizes.values())) == 2
    assert weights == {name: size / sum(sizes.values()) for name, size in sizes.items()}


def test_the_document_s_command_trains_it(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    Reader(tmp_path).shell(DOCUMENT.snippet("simulate"))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["method"] == "focal-splitfed"
    assert [row["merged"] for row in report["rounds"]] == [True] * 3


def test_its_module_is_found_beside_the_recipe() -> None:
    loaded = load_recipe(EXAMPLES / "own_method.toml")
    assert loaded.method_folder == EXAMPLES
    assert loaded.built_method.name == "focal-splitfed"


def test_a_run_of_it_goes_on_wherever_the_module_lies(tmp_path: Path) -> None:
    simulate(recipe(), tmp_path / "run")
    copy = tmp_path / "moved"
    copy.mkdir()
    (copy / "own_method.py").write_text((EXAMPLES / "own_method.py").read_text())
    more = recipe().to_dict() | {"method_folder": str(copy)}
    more["train"] = {**more["train"], "rounds": 3}
    simulate(read_recipe(more), tmp_path / "run", resume=True)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert len(report["rounds"]) == 3


def test_a_part_may_be_of_it() -> None:
    built = recipe("splitfed-v1", parts={"weigh": NAME}).built_method
    assert built.name == "splitfed-v1 + focal-splitfed weigh"
    run = build_simulation(recipe("splitfed-v1", parts={"weigh": NAME}))
    rows = list(run_rounds(run, []))
    assert rows[-1]["merged"]


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("nowhere_at_all:method", {}, "expected a module nowhere_at_all; put nowhere_at_all.py in"),
        ("own_method:nothing", {}, "expected a function nothing in"),
        ("own_method:focal_loss", {}, "needs _client, logits, labels, gamma; give a value, or"),
        (NAME, {"method_numbers": {"alpha": 1.0}}, "takes gamma, power, mu; got alpha"),
        (NAME, {"method_numbers": {"gamma": "much"}}, "gamma: expected a number"),
        (f"{__name__}:no_method", {}, "expected the function to return a Method.*, got dict"),
        ("focal", {}, "expected one of fedavg.*or your own as package.module:function"),
    ],
)
def test_what_is_no_method_is_said(method: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        recipe(method, **changes)
