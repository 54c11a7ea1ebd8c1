"""Recipes: what they say reaches the method's record; what cannot be is refused by its field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_sdk.errors import ConfigurationError
from edge_sdk.training.client.auxiliary import build_auxiliary
from edge_sdk.training.protocol.client_part import ClientPart, Distillation
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.protocol.training import Training
from profiles.energy import PowerModel
from server.training.core.round_view import RoundView
from server.training.core.weighted_mean import Contribution, by_depth_and_loss, by_samples
from server.training.methods.steps import PerClient, concatenated, per_client, shared
from server.training.recipe.recipe import METHODS, Recipe, load_recipe, read_recipe
from server.training.rounds.round import RoundSettings

SMALL: dict[str, Any] = {
    "method": "supersfl",
    "data": {"name": "digits", "clients": 3},
    "train": {"backbone": "tiny", "rounds": 2, "learning_rate": 0.1, "batch": 8, "iterations": 4},
}


def small(**changes: Any) -> dict[str, Any]:
    return {**SMALL, **changes}


def built(method: str, **numbers: Any) -> Recipe:
    return read_recipe(small(method=method, method_numbers=numbers))


KEPT = {
    *("fedavg", "fedprox", "feddyn", "fedlc", "fedper", "ditto"),
    *("harmony", "splitlpf", "pfsl"),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_built_by_its_name_and_defaults(name: str) -> None:
    method = built(name).built_method
    assert method.name == name
    assert method.labels == ("sent" if name not in KEPT else "derivable")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("splitfed-v1", per_client),
        ("splitfed-v2", shared),
        ("minibatch-sfl", concatenated),
        ("multi-exit", PerClient(0.5)),
        ("splitgp", PerClient(0.5)),
        ("supersfl", shared),
        ("fedavg", None),
        ("fedprox", None),
    ],
)
def test_methods_differ_in_the_seams_their_papers_differ_in(name: str, step: object) -> None:
    method = built(name).built_method
    assert method.server_step == step
    assert method.client.whole is (step is None)
    assert (method.weigh is by_samples) is (name != "supersfl")


def test_supersfl_s_numbers_are_the_paper_s() -> None:
    method = built("supersfl").built_method
    assert (method.client.fusion, method.client.clip, method.server_weight) == ("tpgf", 0.5, 0.01)
    assert method.weigh is by_depth_and_loss
    assert not method.share_exits


@pytest.mark.parametrize("fusion", ["tpgf", "no_loss", "no_depth", "equal"])
def test_its_ablations_are_one_word_of_the_recipe(fusion: str) -> None:
    assert built("supersfl", fusion=fusion).built_method.client.fusion == fusion


def test_the_numbers_of_a_method_reach_its_record() -> None:
    assert built("fedprox", mu=0.3).built_method.client.prox_mu == 0.3
    splitgp = built("splitgp", personal_share=0.9, exit_share=0.1, finetune_steps=4).built_method
    assert (splitgp.client.personal_share, splitgp.client.exit_share) == (0.9, 0.1)
    assert splitgp.server_step == PerClient(0.9)
    assert splitgp.finetune_steps == 4
    weigh = built("supersfl", normalise_weights=True).built_method.weigh
    assert weigh is not by_depth_and_loss
    empty: dict[str, Contribution] = {}
    assert weigh(empty, RoundView(1)) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "fedsgd"}, "expected one of fedavg"),
        ({"method_numbers": {"lambda": 1}}, "method_numbers: supersfl takes fusion.*got lambda"),
        ({"method_numbers": {"fusion": "sum"}}, "fusion"),
        ({"method_numbers": {"server_weight": -1}}, "server_weight"),
        ({"method_numbers": {"clip": 0}}, "clip"),
        ({"method_numbers": 3}, "method_numbers"),
        ({"method": "splitgp", "method_numbers": {"personal_share": 1.5}}, "personal_share"),
        ({"method": "splitgp", "method_numbers": {"finetune_steps": -1}}, "finetune_steps"),
        ({"method": "splitgp", "method_numbers": {"finetune_rate": 0.0}}, "finetune_rate"),
        ({"method": "multi-exit", "method_numbers": {"exit_share": "half"}}, "exit_share"),
        ({"method": "fedprox", "method_numbers": {"mu": -0.1}}, "prox_mu"),
        ({"round": {"quorum": 2}}, "quorum"),
        ({"round": {"cohort": 0}}, "cohort"),
        ({"round": {"participation": 0}}, "round: participation: expected .* above 0 .*, got 0"),
        ({"energy": {"idle_w": 3}}, "energy: expected idle_w and busy_w, or neither"),
        ({"energy": {"co2_g_kwh": -1}}, "co2_g_kwh: expected"),
        ({"energy": {"idle_w": 3, "busy_w": 2}}, "energy: power model: busy_w: expected at least"),
        (
            {"export": {"codec": "gif"}},
            "export: codec: expected one of auto, smallest, fp32.*'gif'",
        ),
        ({"export": {"bottleneck": 0}}, "export: bottleneck: expected a number of channels, auto"),
        (
            {"export": {"bottleneck": "narrow"}},
            "bottleneck: expected a whole number or one of auto",
        ),
        ({"export": {"width": 3}}, "export: unknown width; known are bottleneck, codec"),
        ({"round": {"step_deadline_s": 0}}, "step_deadline_s"),
        ({"round": {"norm_bound": -1}}, "norm_bound"),
        ({"round": {"speed": 1}}, "round: unknown speed"),
        ({"round": {"buffer": "x"}}, "round: buffer: expected a whole number, got 'x'"),
        ({"round": {"robust": "median"}}, "round: robust: expected one of none, trimmed"),
        (
            {"evaluate": {"rho": 1.5}},
            "rho: expected a finite number from 0 to 1, got 1.5",
        ),
        ({"evaluate": {"rho": "x"}}, "evaluate: rho: expected a number, got 'x'"),
        ({"train": {**SMALL["train"], "depths": [1, "x"]}}, "depths: .* list, each a whole number"),
        ({"train": {**SMALL["train"], "latency_ms": [1]}}, "latency_ms: .* 2, each a number"),
        ({"train": {**SMALL["train"], "codec": "zip"}}, "train: codec: expected one of fp32"),
        ({"data": {**SMALL["data"], "folder": 3}}, "data: folder: expected text, got 3"),
        ({"method_numbers": {"share_exits": "yes"}}, "share_exits: expected true or false"),
        ({"method_numbers": {"server_weight": "x"}}, "server_weight: expected a number, got 'x'"),
        ({"method_numbers": {"server_weight": True}}, "server_weight: expected a number, got True"),
        ({"method_numbers": {"clip": True}}, "clip: expected a number, got True"),
        ({"train": {"backbone": "tiny"}}, "train"),
        ({"data": "digits"}, "data: expected a table"),
        ({"more": 1}, "unknown more"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_recipe(small(**change))


def test_rounds_are_as_the_recipe_has_them_and_else_neutral() -> None:
    assert read_recipe(SMALL).round == RoundSettings()
    recipe = read_recipe(small(round={"availability": 0.2, "cohort": 1, "norm_bound": 10.0}))
    assert recipe.round == RoundSettings(availability=0.2, cohort=1, norm_bound=10.0)


@pytest.mark.parametrize(
    ("rounds", "most"),
    [({}, 0), ({"buffer": 2}, 10), ({"buffer": 2, "staleness_max": 0}, 0)],
)
def test_results_may_be_late_in_buffered_rounds_unless_said(
    rounds: dict[str, Any], most: int
) -> None:
    assert read_recipe(small(method="fedavg", round=rounds)).round.staleness_max == most


def test_watts_of_a_recipe_make_a_power_model() -> None:
    assert read_recipe(SMALL).energy.model() is None
    model = read_recipe(small(energy={"idle_w": 2, "busy_w": 6.0})).energy.model()
    assert model == PowerModel(idle_w=2, busy_w=6.0, source="the recipe")


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    with pytest.raises(ConfigurationError, match=r"mine\.toml: cannot be read"):
        load_recipe(path)
    for raw, message in ((b"method =", "not TOML"), (b"\xff", "not TOML"), (b"", r"mine\.toml")):
        path.write_bytes(raw)
        with pytest.raises(ConfigurationError, match=message):
            load_recipe(path)


def test_a_recipe_read_from_its_file_is_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'method = "supersfl"\n'
        '[data]\nname = "digits"\nclients = 3\n'
        '[train]\nbackbone = "tiny"\nrounds = 2\nlearning_rate = 0.1\nbatch = 8\niterations = 4\n'
    )
    assert load_recipe(path) == read_recipe(SMALL)


def test_a_whole_number_is_a_number_and_a_list_a_tuple() -> None:
    recipe = read_recipe(small(train={**SMALL["train"], "learning_rate": 1, "depths": [1, 2]}))
    assert (recipe.train.training.learning_rate, recipe.train.depths) == (1, (1, 2))


def test_a_recipe_is_written_as_the_tables_that_it_is_read_from() -> None:
    """`[train]` and `[privacy]` stay flat: reports and checkpoints hold them, key by key."""
    written = read_recipe(SMALL).to_dict()
    assert list(written) == [
        *("method", "data", "train", "round", "evaluate", "privacy", "energy"),
        *("method_numbers", "parts", "gate", "seed"),
    ]
    assert written["train"] == {
        **SMALL["train"],
        "epochs": 1,
        "depth": None,
        "depths": None,
        "norm": None,
        "memory_gb": (2.0, 16.0),
        "latency_ms": (20.0, 200.0),
        "momentum": 0.0,
        "weight_decay": 0.0,
        "decay": 1.0,
        "server_learning_rate": None,
        "server_clip": None,
        "codec": "fp32",
        "update_codec": "fp32",
        "update_share": 0.05,
        "update_samples": 2,
        "update_steps": 60,
        "backbone_folder": None,
        "start": None,
    }
    assert written["privacy"] == {
        "feature_clip": None,
        "feature_sigma": 0.0,
        "update_clip": None,
        "update_sigma": 0.0,
        "delta": 1e-5,
    }
    assert read_recipe(written) == read_recipe(SMALL)


def test_a_plan_has_no_truth_for_a_number() -> None:
    with pytest.raises(ConfigurationError, match="clip: expected a number above 0, got True"):
        ClientPart(clip=True)


@pytest.mark.parametrize(
    ("backbone", "shape"),
    [("tiny", (1, 8, 8)), ("resnet18", (3, 32, 32)), ("har_cnn", (9, 32)), ("vit_s", (3, 32, 32))],
)
def test_global_pools_over_tokens_are_refused_when_the_recipe_is_read(
    backbone: str, shape: tuple[int, ...]
) -> None:
    """Not only when a client starts: of the same backbones, by what a client does with them."""
    data = {
        "method": "besplit",
        "data": {"name": "digits", "clients": 2},
        "train": {"backbone": backbone, "rounds": 1, "learning_rate": 0.1, "batch": 8},
    }
    part = ClientPart(distil=Distillation("global"))
    numbers = (0.0,) * shape[0], (1.0,) * shape[0]
    plan = Plan(backbone, shape, 10, *numbers, 1, Training(0.1, 8), part=part, seed=1)
    try:
        build_auxiliary(plan)
    except ConfigurationError:
        with pytest.raises(ConfigurationError, match=f'{backbone}.*auxiliary_head = "exit"'):
            read_recipe(data)
    else:
        read_recipe(data)
    read_recipe(data | {"method_numbers": {"auxiliary_head": "exit"}})
    read_recipe(data | {"method_numbers": {"ablation": "no_dtd"}})


OWN = """
from torch import nn

def network(classes):
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, classes))
"""


def test_a_recipe_finds_its_network_and_first_weights_next_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "net_by_the_recipe.py").write_text(OWN)
    (tmp_path / "first.safetensors").write_bytes(b"")
    path = tmp_path / "mine.toml"
    path.write_text(
        'method = "splitfed-v1"\n'
        '[data]\nname = "digits"\nclients = 3\n'
        '[train]\nbackbone = "net_by_the_recipe:network"\nstart = "first.safetensors"\n'
        "rounds = 2\nlearning_rate = 0.1\nbatch = 8\n"
    )
    train = load_recipe(path).train
    assert train.backbone_folder == tmp_path.resolve()
    assert train.start == tmp_path.resolve() / "first.safetensors"
    written = load_recipe(path).to_dict()
    assert read_recipe(written) == load_recipe(path)
    assert written["train"]["start"] == str(train.start)
    with pytest.raises(ConfigurationError, match=r"put no_such_network_module\.py in"):
        read_recipe(small(train={**SMALL["train"], "backbone": "no_such_network_module:network"}))


def test_synthetic_updates_do_not_carry_an_averaged_auxiliary_model() -> None:
    train = {"backbone": "tiny", "rounds": 1, "learning_rate": 0.1, "batch": 8}
    table: dict[str, Any] = {
        "method": "besplit",
        "data": {"name": "digits", "clients": 2},
        "train": {**train, "update_codec": "synthetic"},
    }
    with pytest.raises(ConfigurationError, match=r"synthetic .* another codec, or auxiliary ="):
        read_recipe(table)
    read_recipe({**table, "method_numbers": {"auxiliary": "personal"}})
