"""Plans for real devices at a device of the release before."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import orjson
import pytest

from edge_sdk.training.protocol.plan import Plan
from server.training.recipe.recipe import METHODS, read_recipe
from server.training.run.build import load_data, plan_of

if TYPE_CHECKING:
    from tests.releases.conftest import Release

# Methods that ask for something new of their clients, and the keys of a plan that say it.
NEWER = {
    "besplit": "distil: unknown averaged, evidence; update this device",
    "feddyn": "part: unknown dynamic; update this device",
    "fedlc": "part: unknown calibration; update this device",
    "fedper": "part: unknown own_head; update this device",
    "ditto": "part: unknown own_network; update this device",
}
READ = """
import json, sys
from edge_sdk.errors import ConfigurationError
from edge_sdk.training.protocol.plan import Plan
found = {}
for name, plan in json.load(sys.stdin).items():
    try:
        Plan.from_dict(plan)
    except ConfigurationError as err:
        found[name] = str(err)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    made = {}
    for name in METHODS:
        recipe = read_recipe(
            {
                "method": name,
                "data": {"name": "digits", "clients": 2},
                "train": {
                    "backbone": "tiny",
                    "rounds": 1,
                    "batch": 8,
                    "iterations": 2,
                    "learning_rate": 0.1,
                },
            }
        )
        method = recipe.built_method
        made[name] = plan_of(recipe, method, load_data(recipe), 5 if method.client.whole else 2)
    return made


def test_they_are_read_or_refused_with_the_keys_that_are_new(
    before: Release, plans: dict[str, Plan]
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", READ],
        input=orjson.dumps({name: plan.to_dict() for name, plan in plans.items()}),
        env={**os.environ, "PYTHONPATH": str(before.path)},
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert orjson.loads(done.stdout) == NEWER


def test_a_plan_of_the_release_before_is_read(plans: dict[str, Plan]) -> None:
    table = plans["besplit"].to_dict()
    distil = {**table["part"]["distil"]}
    del distil["averaged"], distil["evidence"]
    read = Plan.from_dict({**table, "part": {**table["part"], "distil": distil}}).part.distil
    assert read is not None
    assert (read.averaged, read.loss.activation, read.loss.kl_share) == (False, "softplus", 1.0)
