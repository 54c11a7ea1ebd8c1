"""Clipping, capping and trimming: by hand, against SciPy, and with clients that mean harm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import trim_mean

from edge_sdk.errors import ConfigurationError
from edge_sdk.training.protocol.messages import Ready, Reply, Request, Update, Weights
from server.training.core import trimmed_mean
from server.training.core.spool import Spool
from server.training.core.trimmed_mean import (
    cap_shares,
    cap_weights,
    change_ratios,
    clipped_clients,
    trimmed_merge,
)
from server.training.core.weighted_mean import Contribution, merge
from server.training.recipe.recipe import read_recipe
from server.training.rounds.loop import RoundLoop
from server.training.rounds.round import RoundResult, RoundSettings
from server.training.rounds.transport import LocalTransport, Transport
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation

FLEET = 10


def contribution(samples: int = 1, **weights: list[float]) -> Contribution:
    tensors = {n.replace("_", "."): torch.tensor(values) for n, values in weights.items()}
    return Contribution(1, Update(1, tensors, samples, 1.0, 1, 1))


def trimmed(
    fleet: Mapping[str, Contribution],
    weights: Mapping[str, float],
    start: Weights,
    *,
    trim: float = 0.2,
    clip: float = 1e9,
    vote: float = 0.0,
) -> Weights:
    return trimmed_merge(
        fleet,
        weights,
        start,
        vote,
        start=start,
        ratios=change_ratios(fleet, start),
        clip_factor=clip,
        trim=trim,
    )


def random_fleet(count: int, shape: tuple[int, ...] = (6, 7)) -> dict[str, Contribution]:
    generator = torch.Generator().manual_seed(count)
    return {
        str(i): Contribution(
            2,
            Update(1, {"stage1.w": torch.randn(shape, generator=generator)}, i + 1, 1.0, 1, 1),
            {"stage2.w": torch.randn(shape, generator=generator)},
        )
        for i in range(count)
    }


START = {"stage1.w": torch.zeros(6, 7), "stage2.w": torch.ones(6, 7)}


# the mean


def test_a_trimmed_mean_by_hand() -> None:
    # five clients, a fifth trimmed: one value on each side; weights 1, 2, 3, 4, 10
    values = [[1.0, 9.0], [2.0, 1.0], [3.0, 2.0], [4.0, 3.0], [100.0, -50.0]]
    fleet = {str(i): contribution(stage1_w=v) for i, v in enumerate(values)}
    weights = {"0": 1.0, "1": 2.0, "2": 3.0, "3": 4.0, "4": 10.0}
    start = {"stage1.w": torch.tensor([7.0, 7.0])}
    # first column: 1 and 100 go, (2*2 + 3*3 + 4*4) / 9; second: -50 and 9 go, (2*1+3*2+4*3)/9
    merged = trimmed(fleet, weights, start)["stage1.w"]
    assert merged.tolist() == pytest.approx([29 / 9, 20 / 9])
    # the clients' weights sum to 20 whichever client was left out; the server's 5 joins them
    with_vote = trimmed(fleet, weights, start, vote=5.0)["stage1.w"]
    assert with_vote.tolist() == pytest.approx(
        [(20 * 29 / 9 + 5 * 7) / 25, (20 * 20 / 9 + 5 * 7) / 25]
    )


@pytest.mark.parametrize("count", [5, 10, 11, 23])
@pytest.mark.parametrize("trim", [0.1, 0.2, 0.3, 0.49])
def test_equal_weights_give_scipys_trimmed_mean(count: int, trim: float) -> None:
    fleet = random_fleet(count)
    merged = trimmed(fleet, dict.fromkeys(fleet, 0.3), START, trim=trim)
    for name, tensor in merged.items():
        stacked = np.stack([c.tensor(name).numpy() for c in fleet.values()])
        # both from float32, SciPy's sum in float32 too
        np.testing.assert_allclose(
            tensor.numpy(), trim_mean(stacked, trim + 1e-9, axis=0), rtol=1e-5, atol=1e-6
        )


def test_nothing_to_trim_clip_or_cap_is_the_plain_merge_to_the_last_bit() -> None:
    fleet = random_fleet(7)
    weights = {name: 1 / (2 + int(name)) for name in fleet}
    plain = merge(fleet, weights, START, 0.01)
    for trim in (0.0, 0.14):  # 0.14 * 7 is not yet a client
        ours = trimmed(fleet, cap_shares(weights, 10), START, trim=trim, vote=0.01)
        assert all(torch.equal(ours[name], plain[name]) for name in plain)


def test_blocks_of_columns_and_the_disk_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fleet = random_fleet(10)
    weights = {name: 1.0 + int(name) for name in fleet}
    whole = trimmed(fleet, weights, START, clip=1.05)
    monkeypatch.setattr(trimmed_mean, "BLOCK_VALUES", 50)  # five columns of ten clients
    with Spool(tmp_path) as spool:
        on_disk = {name: c.spool(spool) for name, c in fleet.items()}
        ours = trimmed(on_disk, weights, START, clip=1.05)
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


def test_each_stage_is_trimmed_among_the_clients_that_hold_it() -> None:
    fleet = {str(i): contribution(stage1_w=[float(i)]) for i in range(10)}
    fleet |= {"deep": contribution(stage1_w=[10.0], stage2_w=[50.0])}
    start = {name: torch.zeros(1) for name in ("stage1.w", "stage2.w", "stage3.w")}
    merged = trimmed(fleet, dict.fromkeys(fleet, 1.0), start, trim=0.25)
    assert merged["stage1.w"].item() == pytest.approx(5)  # 2 and 2 of 0..10 left out
    assert merged["stage2.w"].item() == 50  # one holder: nothing to leave out
    assert merged["stage3.w"].item() == 0  # no client holds it: the server's stays


def test_a_client_of_weight_0_takes_no_honest_value_with_it() -> None:
    fleet = {str(i): contribution(stage1_w=[float(i)]) for i in range(5)}
    fleet["none"] = contribution(stage1_w=[-1000.0])
    weights = dict.fromkeys(fleet, 1.0) | {"none": 0.0}
    merged = trimmed(fleet, weights, {"stage1.w": torch.zeros(1)})
    assert merged["stage1.w"].item() == pytest.approx(2)  # 1, 2 and 3 are left of 0..4


# clipping


def test_changes_are_clipped_to_a_multiple_of_the_median_by_hand() -> None:
    # changes of 3, 4 and 100 from a start of 1: the median is 4, twice that is 8
    fleet = {n: contribution(stage1_w=[1 + v]) for n, v in (("a", 3.0), ("b", -4.0), ("c", 100.0))}
    start = {"stage1.w": torch.ones(1)}
    ratios = change_ratios(fleet, start)
    assert {name: of["stage1"] for name, of in ratios.items()} == {"a": 0.75, "b": 1.0, "c": 25.0}
    merged = trimmed(fleet, dict.fromkeys(fleet, 1.0), start, trim=0.0, clip=2.0)
    assert merged["stage1.w"].item() == pytest.approx(1 + (3 - 4 + 8) / 3)
    assert clipped_clients(ratios, 2.0) == {"c": "stage1 changed 25 times as much as the median's"}
    assert clipped_clients(ratios, 25.0) == {}


def test_of_two_the_smaller_change_is_the_measure() -> None:
    pair = {"a": contribution(stage1_w=[1.0]), "b": contribution(stage1_w=[1000.0])}
    start = {"stage1.w": torch.zeros(1)}
    merged = trimmed(pair, dict.fromkeys(pair, 1.0), start, clip=3.0)
    assert merged["stage1.w"].item() == pytest.approx((1 + 3) / 2)


def test_a_client_that_changed_nothing_does_not_lower_the_median() -> None:
    fleet = {name: contribution(stage1_w=[0.0]) for name in "abc"}
    fleet["d"] = contribution(stage1_w=[8.0])
    start = {"stage1.w": torch.zeros(1)}
    assert change_ratios(fleet, start)["d"] == {"stage1": 1.0}
    merged = trimmed(fleet, dict.fromkeys(fleet, 1.0), start)
    assert merged["stage1.w"].item() == pytest.approx(2)


def test_statistics_are_measured_by_themselves_and_so_is_the_servers_trunk() -> None:
    names = {"stage1.1.running_var": 900.0, "stage1.1.weight": 1.0, "trunk.stage3.0.weight": 2.0}
    update = Update(1, {n: torch.tensor([v]) for n, v in names.items()}, 1, 1.0, 1, 1)
    start = dict.fromkeys(names, torch.zeros(1))
    found = change_ratios({"a": Contribution(2, update)}, start)["a"]
    assert found == {"stage1 statistics": 1.0, "stage1": 1.0, "trunk.stage3": 1.0}


# weights


def test_no_weight_exceeds_a_multiple_of_the_median() -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 1e6, "e": 0.0}
    assert cap_weights(weights, 10.0) == {"a": 1.0, "b": 2.0, "c": 3.0, "d": 20.0, "e": 0.0}
    assert cap_weights({"a": 0.0}, 10.0) == {"a": 0.0}
    assert cap_shares(weights, 10.0) == pytest.approx(
        {name: weight * 1_000_006 / 26 for name, weight in cap_weights(weights, 10.0).items()}
    )
    assert cap_shares({"a": 0.0}, 10.0) == {"a": 0.0}


@pytest.mark.parametrize("least", [0.5, 1e-3, 1e-6, 0.0])
def test_a_client_that_is_very_sure_leaves_the_servers_vote_as_it_is(least: float) -> None:
    """FAULTS row 23: Eq. 6 gives such a client nearly all of the weight, and the cap takes it."""

    def as_sure(name: str, reply: Reply) -> Reply:
        if not isinstance(reply, Update):
            return reply
        return replace(reply, loss=least if name == "client-3" else 0.5)

    here = world(method="supersfl", robust="trimmed", depth=2)
    [result] = run(here, as_sure)
    # equal depths: the weights sum to 1/10, against which lambda is 0.01
    assert sum(result.weights.values()) == pytest.approx(1 / FLEET)
    others = [weight for name, weight in result.weights.items() if name != "client-3"]
    assert result.weights["client-3"] <= 10.001 * max(others)


# whole rounds


Change = Callable[[str, Reply], Reply]


class Attackers:
    """Clients in this process; some of their replies are changed on the way."""

    def __init__(self, inner: Transport, change: Change) -> None:
        self._inner = inner
        self._change = change

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        replies = self._inner.exchange(requests, deadline_s)
        return {name: self._change(name, reply) for name, reply in replies.items()}


def world(method: str = "fedavg", depth: int | None = None, **round_numbers: Any) -> Simulation:
    return build_simulation(
        read_recipe(
            {
                "method": method,
                "data": {"name": "digits", "clients": FLEET, "train_max": 600, "test_max": 300},
                "train": {
                    "backbone": "tiny",
                    "rounds": 1,
                    "learning_rate": 0.1,
                    "momentum": 0.8,
                    "batch": 16,
                    **({} if depth is None else {"depth": depth}),
                },
                "round": round_numbers,
            }
        )
    )


def run(here: Simulation, change: Change | None = None, rounds: int = 1) -> list[RoundResult]:
    transport: Transport = LocalTransport(here.clients)
    if change is not None:
        transport = Attackers(transport, change)
    loop = RoundLoop(here.method, here.plans, here.state, transport, here.recipe.round)
    return [loop.run_round(number, 0) for number in range(1, rounds + 1)]


def pulling(here: Simulation, factor: float, bad: set[str]) -> Change:
    """Bad clients send their own change times `factor`."""

    def change(name: str, reply: Reply) -> Reply:
        if not isinstance(reply, Update) or name not in bad:
            return reply
        start = here.state.read()
        weights = {k: start[k] + factor * (v - start[k]) for k, v in reply.weights.items()}
        return replace(reply, weights=weights)

    return change


def test_a_huge_update_does_not_move_the_result_beyond_the_honest_range() -> None:
    here = world(robust="trimmed", clip_factor=1e6)  # trimming alone
    kept: dict[str, Weights] = {}
    bad = pulling(here, -1e6, {"client-3"})

    def change(name: str, reply: Reply) -> Reply:
        if isinstance(reply, Update) and name != "client-3":
            kept[name] = reply.weights
        return bad(name, reply)

    run(here, change)
    after = here.state.read()
    for name in kept["client-0"]:
        honest = torch.stack([weights[name] for weights in kept.values()])
        slack = 1e-5 * honest.abs().max()  # of rounding to float32
        assert (after[name] >= honest.amin(0) - slack).all()
        assert (after[name] <= honest.amax(0) + slack).all()


def test_a_client_that_claims_a_million_samples_is_one_voice_among_ten() -> None:
    def boast(name: str, reply: Reply) -> Reply:
        if name != "client-3" or not isinstance(reply, Ready | Update):
            return reply
        if isinstance(reply, Ready):
            return replace(reply, samples=10**6, label_counts=())
        return replace(reply, samples=10**6)

    plain, capped_world = world(), world(robust="trimmed", trim=0.0, clip_factor=1e9)
    [taken_in] = run(plain, boast)
    [bounded] = run(capped_world, boast)
    assert taken_in.weights["client-3"] > 0.99
    others = [weight for name, weight in bounded.weights.items() if name != "client-3"]
    assert bounded.weights["client-3"] == pytest.approx(10 * others[0])
    assert sum(others) / sum(bounded.weights.values()) == pytest.approx(9 / 19)


@pytest.mark.parametrize("factor", [-10.0, 100.0])
def test_two_poisoners_of_ten_hardly_move_the_result_and_are_listed(factor: float) -> None:
    bad = {"client-2", "client-7"}
    honest, attacked, bent = world(), world(robust="trimmed"), world()
    updates: dict[str, Weights] = {}

    def keep(name: str, reply: Reply) -> Reply:
        if isinstance(reply, Update):
            updates[name] = reply.weights
        return reply

    run(honest, keep)
    [result] = run(attacked, pulling(attacked, factor, bad))
    run(bent, pulling(bent, factor, bad))

    def distance(one: Weights, other: Weights) -> float:
        return float(torch.cat([(one[name] - other[name]).flatten() for name in one]).norm())

    wanted = honest.state.read()
    of_clients = [
        distance(weights, {name: wanted[name] for name in weights}) for weights in updates.values()
    ]
    spread = float(np.median(of_clients))
    assert distance(attacked.state.read(), wanted) < spread  # closer than an honest client
    assert distance(bent.state.read(), wanted) > 1.5 * spread
    assert set(result.suspects) == bad


def test_honest_clients_are_merged_by_default_as_ever() -> None:
    default, named = world(), world(robust="none")
    run(default)
    run(named)
    ours, theirs = default.state.read(), named.state.read()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# settings


def test_real_devices_are_not_trusted_unless_the_recipe_says_so() -> None:
    assert RoundSettings().with_devices().robust == "trimmed"
    assert RoundSettings(robust="none").with_devices().robust == "none"


def test_a_round_of_real_devices_is_bounded_in_samples_and_time() -> None:
    there = RoundSettings(round_deadline_s=90).with_devices()
    assert (there.samples_max, there.steps_deadline_s) == (1_000_000, 90)
    kept = RoundSettings(samples_max=5_000_000, steps_deadline_s=7_200).with_devices()
    assert (kept.samples_max, kept.steps_deadline_s) == (5_000_000, 7_200)
    with pytest.raises(ConfigurationError, match="steps_deadline_s"):
        RoundSettings(steps_deadline_s=0)


@pytest.mark.parametrize(
    "numbers",
    [{"robust": "median"}, {"trim": 0.5}, {"trim": -0.1}, {"clip_factor": 0.5}, {"weight_cap": 0}],
)
def test_numbers_that_make_no_mean_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(numbers))):
        RoundSettings(**numbers)
