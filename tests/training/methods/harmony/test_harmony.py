"""HARMONY's server against plain torch, and whole rounds against other methods."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_sdk.errors import ConfigurationError
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.messages import (
    EndRound,
    Features,
    Outputs,
    Reply,
    Request,
    StartRound,
    Step,
)
from edge_sdk.training.protocol.plan import network_of
from edge_sdk.training.protocol.training import Training
from server.training.core.server_state import ServerState
from server.training.methods.harmony import harmony
from server.training.methods.method import Method
from server.training.methods.splitfed import multi_exit, splitfed_v1, splitgp
from server.training.recipe.recipe import read_recipe
from server.training.rounds.loop import RoundLoop
from server.training.rounds.transport import LocalTransport
from tests.training.methods.harmony.test_labels import Wiretap
from tests.training.methods.harmony.trainer import (
    BATCH,
    CLASSES,
    NAMES,
    RATE,
    SEED,
    Trainer,
    client,
    plan_for,
)

# against other methods and plain torch


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("sgd", [{}, {"momentum": 0.9, "weight_decay": 0.01}], ids=["", "momentum"])
def test_without_its_parts_it_is_splitfed_to_the_last_bit(
    depth: int, sgd: dict[str, float]
) -> None:
    """M = 0, gamma = 0 and no alignment: SplitFedV1, but for where labels are."""
    people = {name: client(name, 11 + 2 * k) for k, name in enumerate(NAMES)}
    bare = harmony(exit_share=0.0, adapt_steps=0, align_weight=0.0)
    ours = Trainer(bare, dict.fromkeys(NAMES, depth), people, sgd)
    theirs = Trainer(splitfed_v1(), dict.fromkeys(NAMES, depth), people, sgd)
    assert ours.run(2).participants == theirs.run(2).participants == NAMES
    got, want = ours.state.read(), theirs.state.read()
    for name, tensor in want.items():
        stage = name.split(".")[0]
        if stage.startswith("exit"):
            continue
        on_client = stage != "head" and int(stage.removeprefix("stage")) <= depth
        assert torch.equal(got[name if on_client else f"trunk.{name}"], tensor), name
    # and SplitFedV1 with one client is the whole network (test_split_equals_monolithic)


@pytest.mark.parametrize(
    ("theirs", "lam"),
    [(multi_exit, 0.0), (splitgp, 0.0), (splitgp, 0.2)],
    ids=["multi-exit", "splitgp 0", "splitgp .2"],
)
@pytest.mark.parametrize("gamma", [0.5, 0.3])
@pytest.mark.parametrize("depth", [1, 3])
def test_without_its_parts_it_minimises_what_the_methods_with_exits_do(
    theirs: Callable[..., Method], lam: float, gamma: float, depth: int
) -> None:
    """M = 0, no alignment, one depth: every weight, over the steps of two rounds."""
    sgd = {"momentum": 0.9, "weight_decay": 0.01}
    bare = harmony(
        exit_share=gamma, adapt_steps=0, align_weight=0.0, personal_share=lam, finetune_steps=0
    )
    numbers = {"exit_share": gamma} | ({} if theirs is multi_exit else {"personal_share": lam})
    weights = []
    for method in (bare, theirs(**numbers)):
        people = {name: client(name, 11 + 2 * k) for k, name in enumerate(NAMES)}
        trainer = Trainer(method, dict.fromkeys(NAMES, depth), people, sgd)
        begun = trainer.state.read()
        assert trainer.run(2).participants == NAMES
        weights.append(trainer.state.read())
    got, want = weights
    for name, tensor in want.items():
        stage = name.partition(".")[0]
        on_client = stage.removeprefix("stage") in map(str, range(1, depth + 1))
        held = on_client or stage.startswith("exit")
        ours = got[name if held else f"trunk.{name}"]
        torch.testing.assert_close(ours, tensor, rtol=1e-6, atol=1e-6)
        trained = not stage.startswith("exit") or stage == f"exit{depth}"
        assert torch.equal(tensor, begun[name]) is not trained, name


@pytest.mark.parametrize(("normalise", "margin"), [(False, 40.0), (True, 0.075)])
@pytest.mark.parametrize("entry", [1, 3])
def test_server_step_is_the_papers_in_plain_torch(
    entry: int, normalise: bool, margin: float
) -> None:
    """Two losses written out; the trunk enters z1 after `entry`, z2 after the client's depth."""
    gamma, weight, depth = 0.3, 0.7, 3
    owner = client("ada", BATCH)
    sgd = {"momentum": 0.9, "weight_decay": 0.01}
    method = harmony(
        exit_share=gamma,
        adapt_steps=0,
        align_weight=weight,
        margin=margin,
        normalise_embeddings=normalise,
        stochastic_depth=entry != depth,
    )
    number = next(n for n in range(1, 50) if entry_of(method, owner, depth, n) == entry)
    ours = Trainer(method, {"ada": depth}, {"ada": owner}, sgd)
    ours.loop.run_round(number, SEED)
    got = ours.state.read()

    seen = features_of(method, owner, depth, number)
    assert seen.view is not None
    assert seen.same is not None
    rows = np.random.default_rng([SEED, number, crc32(b"ada")]).permutation(BATCH)
    labels = torch.from_numpy(owner.y[rows])
    trunk = deepcopy(network_of(plan_for(method, depth))).train()
    parts = [*list(trunk.stages)[1:], trunk.head]  # all past the shallowest exit
    parameters = [parameter for part in parts for parameter in part.parameters()]
    *body_layers, last = trunk.head.children()
    body = nn.Sequential(*body_layers)

    def embed(z: Tensor, start: int) -> Tensor:
        for stage in list(trunk.stages)[start:]:
            z = stage(z)
        embedded: Tensor = body(z)
        return embedded

    first, second = embed(seen.view, entry), embed(seen.features, depth)
    server_loss = nn.functional.cross_entropy(last(second), labels)
    if normalise:
        first, second = (s / s.norm(dim=1, keepdim=True) for s in (first, second))
    distance = (first - second).norm(dim=1)
    same = seen.same.bool()
    apart = distance[~same] < margin
    assert apart.any()  # some are pushed
    assert not normalise or not apart.all()  # and some are far enough
    pairs = torch.where(same, distance**2, (margin - distance).clamp(min=0) ** 2) / 2
    total = (1 - gamma) * server_loss + weight * pairs.mean()
    optimiser = torch.optim.SGD(parameters, RATE, **sgd)  # type: ignore[arg-type]  # floats
    total.backward()  # type: ignore[no-untyped-call]  # torch
    optimiser.step()
    begun = network_of(plan_for(method, depth)).state_dict()
    for stage in range(2, 6):
        for name, tensor in trunk.stages[stage - 1].state_dict().items():
            ours_now = got[f"trunk.stage{stage}.{name}"]
            torch.testing.assert_close(ours_now, tensor, rtol=1e-4, atol=1e-6)
            # the stages before the entry are passed by: they do not even decay
            still = torch.equal(tensor, begun[f"stages.{stage - 1}.{name}"])
            assert still == (stage <= entry), (stage, name)
    for name, tensor in trunk.head.state_dict().items():
        torch.testing.assert_close(got[f"trunk.head.{name}"], tensor, rtol=1e-4, atol=1e-6)


def features_of(method: Method, owner: TrainingClient, depth: int, number: int) -> Features:
    """The client's first features in that round, from the weights of the seed."""
    plan = plan_for(method, depth)
    state = ServerState(deepcopy(network_of(plan)), Training(RATE, 8))
    twin = TrainingClient(owner.name, owner.x, owner.y)
    weights = state.weights(depth, whole=False, exit_head=True)
    twin.handle(StartRound(number, plan, weights))
    reply = twin.handle(Step(number, 0))
    assert isinstance(reply, Features)
    return reply


def entry_of(method: Method, owner: TrainingClient, depth: int, number: int) -> int | None:
    return features_of(method, owner, depth, number).entry


def test_alignment_changes_the_trunk_and_nothing_on_the_client() -> None:
    """Its gradient stops at z1 and z2, and embeddings do not touch the classifier."""
    people = {"ada": client("ada", BATCH)}
    aligned = Trainer(harmony(margin=50.0, normalise_embeddings=False), {"ada": 2}, people)
    apart = Trainer(harmony(align_weight=0.0), {"ada": 2}, people)
    aligned.run()
    apart.run()
    got, want = aligned.state.read(), apart.state.read()
    for name, tensor in want.items():
        touched = name.startswith("trunk.") and not name.startswith("trunk.head.")
        if not touched:
            assert torch.equal(got[name], tensor), name
    assert not torch.equal(got["trunk.stage5.0.weight"], want["trunk.stage5.0.weight"])


def test_trunk_is_averaged_by_samples_and_apart_from_the_clients() -> None:
    people = {"ada": client("ada", 4), "bob": client("bob", 12)}
    both = Trainer(harmony(), {"ada": 1, "bob": 3}, people, numbers={"batch": 12})
    alone = {
        name: Trainer(harmony(), {name: depth}, {name: people[name]}, numbers={"batch": 12})
        for name, depth in (("ada", 1), ("bob", 3))
    }
    both.run()
    for trainer in alone.values():
        trainer.run()
    got = both.state.read()
    ada, bob = (alone[name].state.read() for name in ("ada", "bob"))
    for name, tensor in got.items():
        if name.startswith(("trunk.", "stage1.")):
            expected = (4 * ada[name] + 12 * bob[name]) / 16
        elif name.startswith(("stage2.", "stage3.", "exit3.")):  # bob's alone
            expected = bob[name]
        elif name.startswith("exit1."):
            expected = ada[name]
        else:
            continue
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-7)
    # the server's stage 2 is not the clients'
    assert not torch.equal(got["trunk.stage2.0.weight"], got["stage2.0.weight"])


def test_sixteen_bits_halve_the_features_and_change_little() -> None:
    people = {name: client(name, 10) for name in NAMES}
    depths = {"ada": 1, "bob": 2, "cyd": 3}
    full = Trainer(harmony(), depths, people)
    half = Trainer(harmony(), depths, people, numbers={"codec": "fp16"})
    bytes_full = full.run().bytes_by_kind["up features"]
    assert half.run().bytes_by_kind["up features"] * 2 == bytes_full
    for name, tensor in full.state.read().items():
        torch.testing.assert_close(half.state.read()[name], tensor, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"align_weight": 0.0},
        {"stochastic_depth": False},
        {"adapt_steps": 0, "stochastic_depth": False, "personal_share": 0.9, "finetune_steps": 0},
        {"head": "client", "noise": 10.0},
    ],
    ids=["harmony", "no CSA", "one depth", "SplitGP with CSA", "guarded"],
)
def test_every_ablation_trains(numbers: dict[str, Any]) -> None:
    people = {name: client(name, 10) for name in NAMES}
    trainer = Trainer(harmony(**numbers), {"ada": 1, "bob": 2, "cyd": 3}, people)
    result = trainer.run(3)
    assert result.participants == NAMES
    assert not result.refused
    assert all(torch.isfinite(tensor).all() for tensor in trainer.state.read().values())
    assert trainer.method.finetune_steps == numbers.get(
        "finetune_steps", numbers.get("adapt_steps", 3)
    )


def test_the_task_is_learnt() -> None:
    people = {name: client(name, 40) for name in ("ada", "bob")}
    trainer = Trainer(harmony(), {"ada": 1, "bob": 3}, people, {"momentum": 0.9})
    losses = [trainer.loop.run_round(number, SEED).loss or 0.0 for number in range(1, 16)]
    assert losses[-1] < losses[0] / 2
    fresh = client("new", 200)
    for depth in (1, 3):
        net = trainer.state.whole(depth).eval()
        with torch.no_grad():
            right = net(torch.from_numpy(fresh.x)).argmax(1).numpy() == fresh.y
        assert right.mean() > 0.8  # a quarter by guessing


# what could break it


def test_one_client_and_a_class_that_no_client_has() -> None:
    trainer = Trainer(harmony(), {"ada": 2}, {"ada": client("ada", 13, classes=2)})
    assert trainer.run(2).participants == ("ada",)
    assert all(torch.isfinite(tensor).all() for tensor in trainer.state.read().values())


@pytest.mark.parametrize("classes", [1, CLASSES])
def test_all_pairs_equal_and_none_equal(classes: int) -> None:
    people = {"ada": client("ada", 10, classes)}
    if classes > 1:  # one sample a batch, and never paired with itself
        people["ada"].y = np.arange(10) % CLASSES
    trainer = Trainer(harmony(), {"ada": 2}, people, numbers={"batch": 10 if classes == 1 else 1})
    assert trainer.run().participants == ("ada",)
    assert all(torch.isfinite(tensor).all() for tensor in trainer.state.read().values())


def test_batches_of_one_and_an_odd_last_batch() -> None:
    people = {"ada": client("ada", 3), "bob": client("bob", 1), "cyd": client("cyd", 7)}
    for batch in (1, 3):
        trainer = Trainer(
            harmony(), {"ada": 1, "bob": 3, "cyd": 2}, people, numbers={"batch": batch}
        )
        assert trainer.run(2).participants == NAMES
        assert all(torch.isfinite(tensor).all() for tensor in trainer.state.read().values())


def test_no_share_for_the_server_leaves_its_trunk_alone() -> None:
    """gamma 1 and no alignment: every gradient of the trunk is 0."""
    people = {"ada": client("ada", 8)}
    trainer = Trainer(harmony(exit_share=1.0, align_weight=0.0), {"ada": 2}, people)
    begun = trainer.state.read()
    trainer.run()
    for name, tensor in trainer.state.read().items():
        if name.startswith("trunk."):
            assert torch.equal(tensor, begun[name])
    assert not torch.equal(trainer.state.read()["stage1.0.weight"], begun["stage1.0.weight"])


def test_client_with_nan_losses_hurts_no_other() -> None:
    people = {name: client(name, 10) for name in NAMES}
    people["bob"].x = np.full_like(people["bob"].x, np.nan)
    without = {name: people[name] for name in ("ada", "cyd")}
    depths = dict.fromkeys(NAMES, 2)
    with_bob, apart = Trainer(harmony(), depths, people), Trainer(harmony(), depths, without)
    result = with_bob.run(2)
    apart.run(2)
    assert result.participants == ("ada", "cyd")
    got, want = with_bob.state.read(), apart.state.read()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_trunk_that_is_no_number_gives_no_feedback(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(harmony(), {"ada": 2}, {"ada": client("ada", 10)})
    with torch.no_grad():
        next(iter(trainer.state.trunk.stages[4].parameters())).fill_(1e38)  # overflows in a sum
    with caplog.at_level(logging.WARNING):
        result = trainer.loop.run_round(1, SEED)
    assert "its outputs are not finite" in caplog.text
    assert result.participants == ("ada",)  # by its exit head alone
    assert result.bytes_by_kind.get("down gradients", 0) == 0


def test_client_that_does_not_score_learns_alone() -> None:
    class Silent(LocalTransport):
        def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
            asked = {
                name: request
                for name, request in requests.items()
                if not (name == "bob" and isinstance(request, Outputs))
            }
            return super().exchange(asked, deadline_s)

    people = {name: client(name, 10) for name in NAMES}
    trainer = Trainer(harmony(), dict.fromkeys(NAMES, 2), people, transport=Silent)
    result = trainer.run()
    assert result.participants == NAMES
    assert result.missed_steps == {"bob": 2}


def test_view_from_a_depth_where_nothing_is_cut_is_refused() -> None:
    class Wrong(LocalTransport):
        def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
            replies = super().exchange(requests, deadline_s)
            return {
                name: replace(reply, entry=1) if isinstance(reply, Features) else reply
                for name, reply in replies.items()
            }

    owner = client("ada", 10)
    owner.x = np.repeat(owner.x, 4, 2).repeat(4, 3)[:, :, :28, :28]
    method = harmony(stochastic_depth=False)
    plan = replace(plan_for(method, 3), backbone="cnn6", input_shape=(1, 28, 28))
    assert network_of(plan).cuts == (2, 3)
    state = ServerState(deepcopy(network_of(plan)), Training(RATE, 8), "own")
    loop = RoundLoop(method, {"ada": plan}, state, Wrong({"ada": owner}))
    result = loop.run_round(1, SEED)
    assert "view" in result.refused["ada"]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"align_weight": -1.0}, "align_weight: expected a finite number of at least 0"),
        ({"margin": float("nan")}, "margin: expected a finite number of at least 0"),
        ({"margin": 2.5}, "margin: expected at most 2, since embeddings of length 1 are at most 2"),
        ({"normalise_embeddings": 1}, "normalise_embeddings: expected true or false, got 1"),
        ({"adapt_steps": 1.5}, "adapt_steps: expected a whole number"),
        ({"exit_share": 2}, "exit_share: expected a finite number from 0 to 1"),
        ({"head": "both"}, "head: expected one of server, client"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_recipe(
            {
                "method": "harmony",
                "method_numbers": numbers,
                "data": {"name": "digits", "clients": 2},
                "train": {"backbone": "tiny", "rounds": 1, "learning_rate": 0.1, "batch": 4},
            }
        )


def test_end_of_round_is_heard_once() -> None:
    people = {"ada": client("ada", 10)}
    trainer = Trainer(harmony(), {"ada": 2}, people, transport=Wiretap)
    trainer.run()
    kinds = [type(request) for _, request, _ in trainer.wire.heard]
    assert kinds == [StartRound, Step, Outputs, Step, Outputs, EndRound]
