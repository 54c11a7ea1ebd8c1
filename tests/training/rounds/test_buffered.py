"""Rounds without a common beginning: one contract of both kinds of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from edge_sdk.errors import ConfigurationError, FrameError
from server.training.run.run import Simulation
from tests.training.paces import EQUAL, NAMES, ONE_SLOW, Pace, simulation_of
from tests.training.worlds import assert_same

FAST, SLOW = NAMES[:3], NAMES[3]
Start = Callable[..., Pace]


@pytest.fixture(params=["clock", "threads"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts buffered rounds of a simulation's clients: `start(here, seconds, clients)`."""
    with ExitStack() as stack:

        def make(here: Simulation, *more: Any) -> Pace:
            pace = Pace(request.param, here, *more)
            stack.callback(pace.close)
            return pace

        yield make


# compared with rounds in lockstep


@pytest.mark.parametrize("method", ["splitfed-v1", "fedavg", "splitgp", "splitlpf"])
def test_all_results_at_one_pace_are_the_lockstep_round_to_the_last_bit(
    method: str, start: Start
) -> None:
    together, buffered = simulation_of(method), simulation_of(method, buffer=4)
    pace = start(buffered, EQUAL)
    ours = [pace.run(number, *NAMES) for number in (1, 2, 3)]
    theirs = [together.loop.run_round(number, 0) for number in (1, 2, 3)]

    assert_same(buffered.state.read(), together.state.read())
    for name in NAMES:
        assert_same(buffered.clients[name].personal, together.clients[name].personal)
    assert [replace(r, seconds=0, simulated_s=None) for r in ours] == [
        replace(r, seconds=0) for r in theirs
    ]


def test_waiting_for_all_is_lockstep_whatever_their_pace(start: Start) -> None:
    together, buffered = simulation_of(), simulation_of(buffer=4)
    pace = start(buffered, ONE_SLOW)
    results = [pace.run(number, *NAMES) for number in (1, 2)]
    for number in (1, 2):
        together.loop.run_round(number, 0)
    assert_same(buffered.state.read(), together.state.read())
    assert [r.simulated_s for r in results] in ([3.5, 3.5], [None, None])


# merges, and clients that are still at work


def test_a_slow_client_holds_no_other_up_and_counts_when_it_comes(start: Start) -> None:
    pace = start(simulation_of(buffer=3, staleness_max=5), ONE_SLOW)
    results = [pace.run(number, *FAST) for number in (1, 2, 3)]
    # it ends at 3.5: after the third merge at 3, before the others end at 4
    results.append(pace.run(4, SLOW, "client-0", "client-1"))
    # the one left over at 4 is the first of the next merge
    results.append(pace.run(5, "client-2", "client-0", "client-1"))

    assert [r.participants for r in results[:3]] == [FAST] * 3
    assert results[3].participants == ("client-0", "client-1", "client-3")
    assert results[3].stale == {"client-3": 3}
    assert results[4].stale == {"client-2": 1}
    assert [r.simulated_s for r in results[:4]] in ([1.0] * 4, [None] * 4)
    assert all(r.merged and not r.missing and not r.refused for r in results)
    assert [number for number in pace.began("client-3") if number < 5] == [1]


def test_a_result_too_old_is_refused_by_name_and_its_client_begins_again(start: Start) -> None:
    pace = start(simulation_of(buffer=3, staleness_max=2), ONE_SLOW)
    for number in (1, 2, 3):
        pace.run(number, *FAST)
    fourth = pace.run(4, SLOW, *FAST)
    assert fourth.participants == FAST
    assert fourth.refused == {"client-3": "an update 3 rounds late: expected at most 2"}
    fifth = pace.run(5, *FAST)
    assert not fifth.refused
    fields, _ = pace.loop.state_dict()
    if "begun" in fields:
        assert fields["begun"]["client-3"] == [5, 4.0 + 3.5]
    else:
        assert fields["owed"] == [("client-3", 5)]


def test_everyone_starts_from_the_weights_of_the_round_it_begins_in(start: Start) -> None:
    here = simulation_of(buffer=2, staleness_max=9)
    pace = start(here, ONE_SLOW)
    sent = {}
    # by the clock: all begin again with the next merge, and client-3 ends at 3.5
    orders = ("01", "20", "10", "23", "01", "20")
    for number, order in enumerate(orders, 1):
        sent[number] = here.state.read()
        pace.run(number, *(f"client-{place}" for place in order))
    started = pace.watcher.started
    assert len({begin.round for _, begin in started}) > 3
    for _, begin in started:
        assert_same(begin.weights, {name: sent[begin.round][name] for name in begin.weights})
    began = [(name, begin.round) for name, begin in started]
    assert len(began) == len(set(began))  # one result a client and round


def test_clients_that_never_answer_do_not_keep_a_merge_waiting(start: Start) -> None:
    here = simulation_of(buffer=3, quorum=0.6)
    clients = {name: here.clients[name] for name in NAMES[:2]}
    result = start(here, EQUAL, clients).run(1, *NAMES)
    assert result.merged  # 2 of 3 are a quorum
    assert result.participants == ("client-0", "client-1")
    assert result.missing == ("client-2", "client-3")


def test_below_the_quorum_nothing_changes(start: Start) -> None:
    here = simulation_of(buffer=3, quorum=0.9)
    before = here.state.read()
    clients = {name: here.clients[name] for name in NAMES[:2]}
    result = start(here, EQUAL, clients).run(1, *NAMES)
    assert not result.merged
    assert_same(here.state.read(), before)


# what counts of a late result


@pytest.mark.parametrize(("late", "seconds"), [(1, 1.5), (2, 2.5)])
def test_a_late_client_s_part_is_what_it_made_of_the_weights_it_began_with(
    late: int, seconds: float, start: Start
) -> None:
    here = simulation_of("fedavg", buffer=1, staleness_max=3, staleness_power=1.0)
    pace = start(here, {"client-0": 1.0, "client-1": seconds, "client-2": 9.0, "client-3": 9.0})
    began = here.state.read()
    for number in range(1, late + 1):
        assert pace.run(number, "client-0").participants == ("client-0",)
    between = here.state.read()
    result = pace.run(late + 1, "client-1")
    assert result.participants == ("client-1",)
    assert result.stale == {"client-1": late}
    assert not result.missing
    after = here.state.read()
    # one result: (1 + late)^-1 of its change, on top of what the other made meanwhile
    for name, tensor in pace.watcher.updates["client-1", 1].weights.items():
        wanted = between[name] + (tensor - began[name]) / (1 + late)
        torch.testing.assert_close(after[name], wanted)


@pytest.mark.parametrize("method", ["supersfl", "splitlpf", "harmony", "splitfed-v2"])
def test_shared_suffixes_and_trunks_of_the_server_train_at_any_pace(
    method: str, start: Start
) -> None:
    here = simulation_of(method, buffer=2, staleness_max=9)
    before = here.state.read()
    pace = start(here, ONE_SLOW)
    orders = ("01", "20", "10", "23")
    results = [
        pace.run(number, *(f"client-{place}" for place in order))
        for number, order in enumerate(orders, 1)
    ]
    assert all(r.merged and not r.refused for r in results)
    assert any(r.stale for r in results)
    after = here.state.read()
    # no client has the last stage; the layer behind it is the clients' own with SplitLPF
    last = [name for name in after if name.endswith(f"stage{here.state.net.L}.0.weight")]
    assert any(not torch.allclose(after[name], before[name], atol=1e-4) for name in last)


# checkpoints


def test_a_state_dict_of_another_form_is_refused(start: Start) -> None:
    loop = start(simulation_of(buffer=2), EQUAL).loop
    with pytest.raises(FrameError, match=r"no (simulated )?buffered training"):
        loop.load_state_dict({}, {})
    with pytest.raises(FrameError, match="do not fit"):
        loop.load_state_dict(
            {"clock_s": 1.0, "begun": {"client-0": [1, 2.0]}, "owed": [["client-0", 1]]}, {}
        )
    with pytest.raises(FrameError, match="named by a round"):
        loop.load_state_dict(
            {"clock_s": 1.0, "begun": {}, "owed": []}, {"head.weight": torch.ones(1)}
        )


# what cannot


@pytest.mark.parametrize("method", ["minibatch-sfl", "besplit"])
def test_methods_with_a_step_over_all_clients_are_refused(method: str, start: Start) -> None:
    here = simulation_of(method)
    here = replace(here, recipe=replace(here.recipe, round=replace(here.recipe.round, buffer=2)))
    with pytest.raises(ConfigurationError, match="needs all participants of a step at once"):
        start(here, EQUAL)


@pytest.mark.parametrize(
    "numbers",
    [{"buffer": 5}, {"buffer": 2, "participation": 0.5}, {"buffer": 2, "cohort": 2}],
)
def test_settings_that_need_a_common_round_are_refused(
    numbers: dict[str, Any], start: Start
) -> None:
    here = simulation_of()
    settings = replace(here.recipe.round, **numbers)
    here = replace(here, recipe=replace(here.recipe, round=settings))
    with pytest.raises(ConfigurationError, match="buffer"):
        start(here, EQUAL)
    with pytest.raises(ConfigurationError, match="buffer"):
        simulation_of(**numbers)
