"""Parts of methods: what they become together, and what is refused with its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from edge_sdk.errors import ConfigurationError
from edge_sdk.training.client.auxiliary import build_auxiliary
from edge_sdk.training.formulas.evidential_loss import EvidentialLoss
from server.training.recipe.recipe import METHODS, Recipe, read_recipe
from server.training.report.report import report_of
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds


def recipe_of(method: str, **more: Any) -> Recipe:
    return read_recipe(
        {
            "method": method,
            "data": {"name": "digits", "clients": 3, "train_max": 120, "test_max": 50},
            "train": {
                "backbone": "tiny",
                "rounds": 2,
                "learning_rate": 0.05,
                "batch": 20,
                "iterations": 6,
            },
            **more,
        }
    )


GUARD = {"method": "scala", "numbers": {"inversion": 0.3}}
ALONE = {"method": "besplit", "numbers": {"server_share": 0.0}}


def test_a_part_is_taken_whole_and_the_rest_stays() -> None:
    method = recipe_of("supersfl", parts={"server": "minibatch-sfl"}).built_method
    supersfl, minibatch = METHODS["supersfl"](), METHODS["minibatch-sfl"]()
    assert method.server_step is minibatch.server_step
    assert (method.client, method.weigh) == (supersfl.client, supersfl.weigh)
    assert method.server_weight == supersfl.server_weight == 0.01
    assert method.name == "supersfl + minibatch-sfl server"


def test_a_part_may_have_numbers() -> None:
    parts = {"weigh": {"method": "supersfl", "numbers": {"server_weight": 0.3}}}
    assert recipe_of("splitfed-v2", parts=parts).built_method.server_weight == 0.3


def test_a_method_with_all_its_parts_from_itself_is_itself() -> None:
    parts = dict.fromkeys(("client", "server", "weigh"), "splitfed-v1")
    same_weights(recipe_of("supersfl", parts=parts), recipe_of("splitfed-v1"))


def same_weights(*recipes: Recipe) -> None:
    worlds = [build_simulation(recipe) for recipe in recipes]
    for world in worlds:
        list(run_rounds(world, []))
    one, other = (world.state.read() for world in worlds)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("base", ["supersfl", "scala", "besplit", "splitlpf", "splitgp"])
def test_alignment_of_weight_0_is_none_to_the_last_bit(base: str) -> None:
    nothing = {"method": "harmony", "numbers": {"align_weight": 0.0}}
    same_weights(recipe_of(base, parts={"align": nothing}), recipe_of(base))


def test_alignment_comes_with_harmonys_server_and_goes_without_it() -> None:
    both = recipe_of("supersfl", parts={"client": "harmony", "server": "harmony"}).built_method
    assert both.align == METHODS["harmony"]().align
    assert both.client.views
    off = {"method": "harmony", "numbers": {"align_weight": 0.0}}
    assert not recipe_of("harmony", parts={"align": off}).built_method.client.views


@pytest.mark.parametrize(
    "base", ["splitfed-v2", "minibatch-sfl", "splitgp", "supersfl", "besplit", "splitlpf"]
)
def test_alignment_changes_what_the_server_learns_and_no_clients_step_of_the_round(
    base: str,
) -> None:
    """One batch a client: what the clients learn of it came back before the server aligned."""
    once = {**TRAIN, "rounds": 1, "iterations": 1}
    one = recipe_of(base, train=once)
    aligned = recipe_of(base, train=once, parts={"align": "harmony"})
    if base == "splitfed-v2":  # in turn: the next client's gradient comes through what was aligned
        one, aligned = (replace(r, data=replace(r.data, clients=1)) for r in (one, aligned))
    worlds = [build_simulation(one), build_simulation(aligned)]
    for world in worlds:
        list(run_rounds(world, []))
    plain, ours = (world.state.read() for world in worlds)
    deepest = max(plan.depth for plan in worlds[0].plans.values())
    # SplitLPF's last layer is its clients'; those in turn see what was aligned for others
    assert any(not torch.equal(ours[n], plain[n]) for n in plain if n.startswith("stage5."))
    if base != "supersfl":
        assert all(
            torch.equal(ours[name], plain[name])
            for name in plain
            if name.startswith("stage") and int(name[5]) <= min(deepest, 1)
        )


def test_splitgp_with_harmonys_alignment_trains() -> None:
    """SplitGP + CSA, of HARMONY's Fig. 4."""
    row = recipe_of("splitgp", method_numbers={"personal_share": 0.9}, parts={"align": "harmony"})
    world = build_simulation(row)
    rows: list[dict[str, Any]] = []
    list(run_rounds(world, rows))
    assert rows[-1]["participants"] == list(world.clients)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert world.method.labels == "sent"


@pytest.mark.parametrize("adjust", ["both", "local"])
def test_the_combination_that_was_asked_for_trains_and_answers(adjust: str) -> None:
    """SuperSFL's depths, SCALA's server step, HARMONY's alignment, BESplit's gate."""
    server = {"adjust": adjust, "server": "joint" if adjust == "both" else "in_turn"}
    recipe = recipe_of(
        "supersfl",
        method_numbers={"share_exits": True},
        parts={
            "server": {"method": "scala", "numbers": server},
            "align": {"method": "harmony", "numbers": {"align_weight": 0.05}},
            "gate": "besplit",
        },
    )
    world = build_simulation(recipe)
    assert world.method.name == "supersfl + besplit gate + scala server + harmony align"
    rows: list[dict[str, Any]] = []
    list(run_rounds(world, rows))
    report = report_of(world, rows)
    # no loss to compare: what evidence for wrong classes costs grows from round to round
    assert report["rounds"][-1]["participants"] == list(world.clients)
    assert not report["rounds"][-1]["missed_steps"]
    assert report["final"]["answers"] == "gated"
    assert report["final"]["threshold_chosen_on"] == "held_out"
    assert all(0 < client["threshold"] <= 1 for client in report["each_client"])
    assert report["final"]["accuracy_id"] > 0


def test_exits_behind_an_evidential_gate_learn_evidence() -> None:
    plain = recipe_of("splitgp").built_method
    gated = recipe_of("splitgp", parts={"gate": "besplit"}).built_method
    assert (plain.gate, gated.gate) == ("entropy", "vacuity-exp")
    assert gated.client == replace(plain.client, evidence=EvidentialLoss())


@pytest.mark.parametrize(
    ("base", "parts"),
    [
        ("splitlpf", {"server": "harmony"}),
        ("harmony", {"client": "splitlpf"}),
        (
            "harmony",
            {
                "client": {
                    "method": "harmony",
                    "numbers": {"head": "client", "stochastic_depth": False},
                },
                "server": "splitlpf",
                "align": "harmony",
                "gate": "besplit",
            },
        ),
    ],
)
def test_clients_that_answer_outputs_go_with_any_server_that_asks_for_it(
    base: str, parts: Any
) -> None:
    world = build_simulation(recipe_of(base, parts=parts))
    rows: list[dict[str, Any]] = []
    list(run_rounds(world, rows))
    assert rows[-1]["participants"] == list(world.clients)
    assert not rows[-1]["missed_steps"]
    assert world.method.labels == "derivable"


@pytest.mark.parametrize(
    ("base", "parts"),
    [
        ("splitlpf", {"auxiliary": "besplit"}),
        ("splitlpf", {"auxiliary": "besplit", "guard": GUARD}),
        ("besplit", {"guard": GUARD}),
        ("harmony", {"auxiliary": "besplit"}),
        ("supersfl", {"auxiliary": ALONE}),
    ],
)
def test_what_joins_the_clients_half_trains_with_it(base: str, parts: Any) -> None:
    depth = {} if base == "supersfl" else {"depth": 2}
    world = build_simulation(recipe_of(base, train={**TRAIN, **depth}, parts=parts))
    own, joined = METHODS[base]().client, world.method.client
    assert replace(joined, distil=None, inversion=None, evidence=None) == replace(
        own, distil=None, inversion=None
    )
    rows: list[dict[str, Any]] = []
    list(run_rounds(world, rows))
    report = report_of(world, rows)
    assert rows[-1]["participants"] == list(world.clients)
    assert not rows[-1]["missed_steps"]
    assert report["final"]["accuracy_id"] > 0
    if "guard" in parts:  # it stays at home
        for client in world.clients.values():
            assert any(key.startswith("inversion.") for key in client.personal)
    if "auxiliary" in parts:  # it is averaged
        for plan in world.plans.values():
            model, first = world.state.auxiliaries[plan.depth], build_auxiliary(plan)
            now, then = model.head.state_dict(), first.head.state_dict()
            assert not all(torch.equal(now[name], tensor) for name, tensor in then.items())


TRAIN = {"backbone": "tiny", "rounds": 2, "learning_rate": 0.05, "batch": 20, "iterations": 6}


def test_a_combination_trains() -> None:
    world = build_simulation(recipe_of("supersfl", parts={"server": "minibatch-sfl"}))
    rows: list[dict[str, Any]] = []
    list(run_rounds(world, rows))
    assert rows[-1]["supervised"]
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize(
    ("base", "parts", "reason"),
    [
        ("fedavg", {"server": "splitfed-v1"}, "train the whole network.*split method"),
        ("splitfed-v1", {"server": "fedavg"}, "no step for them"),
        (
            "supersfl",
            {"server": "harmony"},
            "harmony's server asks.*supersfl's clients return none",
        ),
        (
            "harmony",
            {"server": "splitlpf"},
            "splitlpf's server asks.*embeddings, harmony's clients return that of its logits",
        ),
        (
            {"method": "harmony", "method_numbers": {"head": "client"}},
            {"server": "splitlpf", "align": "harmony"},
            "harmony's clients take second views at any depth, splitlpf's server",
        ),
        ("harmony", {"server": "scala"}, "needs labels.*labels = 'derivable'"),
        ("besplit", {"server": "scala"}, "learn from the server's logits"),
        ("supersfl", {"weigh": "besplit"}, "records that its own server step keeps"),
        ("splitfed-v1", {"exit": "supersfl"}, "some of client, gate, server, align, weigh"),
        ("splitfed-v1", {"gate": "besplit"}, "splitfed-v1's clients have no exit that besplit's"),
        ("fedavg", {"gate": "besplit"}, "fedavg's clients have no exit that besplit's gate"),
        ("besplit", {"gate": "supersfl"}, "besplit's auxiliary model.*supersfl's gate goes by ent"),
        ("splitgp", {"align": "supersfl"}, "supersfl aligns nothing"),
        ("splitlpf", {"auxiliary": "supersfl"}, "supersfl's clients have no auxiliary model"),
        ("splitfed-v1", {"auxiliary": "besplit"}, "learn from the server's logits.*share = 0"),
        (
            "splitlpf",
            {"auxiliary": "besplit", "gate": "supersfl"},
            "besplit's auxiliary model.*supersfl's gate goes by ent",
        ),
        ("fedavg", {"auxiliary": ALONE}, "distil: expected none where the client trains the"),
        ("splitlpf", {"guard": "scala"}, "scala's clients have no guard.*inversion above 0"),
        ("fedavg", {"guard": GUARD}, "inversion: expected none where nothing is cut"),
        ("harmony", {"guard": GUARD}, "inversion: expected none where the client adapts"),
        ("fedavg", {"align": "harmony"}, "harmony's alignment.*fedavg's server has none"),
        ("splitfed-v1", {"server": "nobody"}, "expected one of"),
        ("splitfed-v1", {"server": 3}, "or a table of method and numbers"),
        ("splitfed-v1", {"server": {"numbers": {}}}, "or a table of method and numbers"),
        ("splitfed-v1", {"weigh": {"method": "supersfl", "numbers": {"a": 1}}}, "takes fusion"),
        (
            "splitgp",
            {"align": {"method": "harmony", "numbers": {"align_weight": 0.5, "noise": 3.0}}},
            "noise has no effect on the",
        ),
        ("splitfed-v1", ["server"], "expected a table"),
    ],
)
def test_what_does_not_go_together_is_refused(base: Any, parts: Any, reason: str) -> None:
    named = {"method": base} if isinstance(base, str) else base
    with pytest.raises(ConfigurationError, match=reason):
        recipe_of(**named, parts=parts)


@pytest.mark.parametrize(
    "part", ["client", "gate", "server", "align", "weigh", "auxiliary", "guard"]
)
@pytest.mark.parametrize("base", METHODS)
def test_every_pair_of_parts_is_built_or_refused_with_a_sentence(base: str, part: str) -> None:
    for other in METHODS:
        try:
            method = recipe_of(base, parts={part: other}).built_method
        except ConfigurationError as err:
            refusal = str(err)
            matched = refusal.startswith("parts: ") and ": expected" in refusal
        else:
            matched = other in method.name
        assert matched, (base, part, other)
