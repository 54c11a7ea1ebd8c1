"""Buffered rounds with real devices: over HTTP, at once, with frozen ones, after a restart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from edge_sdk.errors import ConfigurationError
from edge_sdk.identity import Identity
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.data.load import load_dataset
from edge_sdk.training.protocol.messages import (
    EndRound,
    Evaluate,
    FinishAlone,
    Ready,
    Reply,
    Request,
    Scores,
    StartRound,
    Step,
    Update,
)
from edge_sdk.wire.address import Address
from server.registry.database import open_registry
from server.registry.operator import load_or_create_operator_secret
from server.training.fleet.mailbox import Mailbox
from server.training.fleet.settings import TrainerSettings
from server.training.fleet.trainer import train
from server.training.recipe.recipe import read_recipe
from server.training.rounds.buffered import BufferedLoop
from server.training.rounds.workers import ThreadedWorkers
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation
from tests.training.paces import Pace, simulation_of
from tests.training.worlds import PROFILE, assert_same

NAMES = ("pi-0", "pi-1", "pi-2")
SHAPE = (1, 8, 8)


def recipe_of(method: str = "fedavg", **round_numbers: Any) -> dict[str, Any]:
    return {
        "method": method,
        "data": {"name": "digits", "clients": 3, "train_max": 72, "test_max": 20},
        "train": {
            "backbone": "tiny",
            "rounds": 3,
            "learning_rate": 0.05,
            "momentum": 0.9,
            "batch": 8,
            "depth": None if method == "fedavg" else 2,
        },
        "round": {"step_deadline_s": 20.0} | round_numbers,
    }


def world_of(method: str = "fedavg", **round_numbers: Any) -> Simulation:
    numbers = recipe_of(method, **round_numbers)
    numbers["train"] = {k: v for k, v in numbers["train"].items() if v is not None}
    return build_simulation(read_recipe(numbers))


class Paced(TrainingClient):
    """Hands a round over only when it is its turn."""

    def __init__(self, like: TrainingClient, *, turns: int | None = 0) -> None:
        super().__init__(like.name, like.x, like.y, secret=like.secret)
        self._waits = turns is not None
        self._turn = threading.Semaphore(turns or 0)
        self.updates: dict[int, Update] = {}

    def go(self) -> None:
        """Its turn, once."""
        self._turn.release()

    def handle(self, message: Request | FinishAlone) -> Reply:
        if self._waits and isinstance(message, EndRound):
            assert self._turn.acquire(timeout=30)
        reply = super().handle(message)
        if isinstance(reply, Update):
            self.updates[reply.round] = reply
        return reply


def paced(here: Simulation, *, waiting: tuple[str, ...] = ()) -> dict[str, Paced]:
    """The world's clients by names of devices; those waiting have no turn yet."""
    clients = dict(zip(NAMES, here.clients.values(), strict=True))
    return {
        name: Paced(client, turns=0 if name in waiting else None)
        for name, client in clients.items()
    }


@pytest.fixture
def start(make_trainer: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Starts a trainer with a loop for a world's devices: `start(world, clients, ...)`."""
    with ExitStack() as stack:

        def make(
            here: Simulation, clients: Mapping[str, TrainingClient], **more: Any
        ) -> tuple[BufferedLoop, Any]:
            trainer = make_trainer(SHAPE, lockstep=False, **more)
            trainer.join(clients)
            loop = BufferedLoop(
                here.method,
                dict(zip(NAMES, here.plans.values(), strict=True)),
                here.state,
                trainer.mailbox,
                here.recipe.round,
                workers=ThreadedWorkers(),
                clients=len(NAMES),
            )
            for client in clients.values():
                if isinstance(client, Paced):
                    stack.callback(client.go)  # lets its thread end
            stack.callback(loop.close)
            stack.callback(trainer.mailbox.end_rounds)
            return loop, trainer

        yield make


# compared with rounds in lockstep


@pytest.mark.parametrize("method", ["fedavg", "splitfed-v1", "splitlpf"])
def test_merges_of_all_are_the_synchronous_rounds_to_the_last_bit(
    method: str, start: Callable[..., Any]
) -> None:
    ours, theirs = world_of(method, buffer=3), world_of(method)
    # what is drawn is keyed by the clients' names: both have those of the simulation
    loop, _ = start(ours, paced(ours))
    for number in (1, 2, 3):
        result, expected = loop.run_round(number, 0), theirs.loop.run_round(number, 0)
        assert result.participants == NAMES
        assert len(result.participants) == len(expected.participants)
        assert (result.bytes_up, result.bytes_down) == (expected.bytes_up, expected.bytes_down)
        assert not result.stale
        assert not result.missing
    assert_same(ours.state.read(), theirs.state.read())


@pytest.mark.parametrize("method", ["supersfl", "splitfed-v2", "harmony"])
def test_server_steps_of_devices_at_once_do_not_disturb_each_other(
    method: str, start: Callable[..., Any]
) -> None:
    here = world_of(method, buffer=2, staleness_max=9)
    loop, trainer = start(here, paced(here))
    before = here.state.read()
    results = [loop.run_round(number, 0) for number in range(1, 7)]
    for result in results:
        assert result.merged
        assert not result.refused
        assert not result.missing
        assert not result.missed_steps
        assert len(result.participants) == 2
    after = here.state.read()
    assert any(not torch.equal(after[name], before[name]) for name in after if "head" in name)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())
    trainer.mailbox.end_rounds()
    loop.close()
    assert not here.state.copy_sources


# merges, and devices that are still at work


def test_a_device_refused_as_too_old_begins_again_and_counts() -> None:
    pace = Pace("threads", simulation_of(buffer=1, staleness_max=1), {})
    for number in (1, 2):
        pace.run(number, "client-0")
    third = pace.run(3, "client-2", "client-0")
    assert third.refused == {"client-2": "an update 2 rounds late: expected at most 1"}
    assert third.participants == ("client-0",)
    fourth = pace.run(4, "client-2")
    assert fourth.participants == ("client-2",)
    assert not fourth.stale
    assert {r for name, r in pace.watcher.updates if name == "client-2"} == {1, 4}
    pace.close()


def test_a_device_that_joins_begins_with_the_next_merge(start: Callable[..., Any]) -> None:
    here = world_of(buffer=1, staleness_max=5)
    clients = paced(here, waiting=NAMES)
    loop, trainer = start(here, clients)
    plans = dict(zip(NAMES, here.plans.values(), strict=True))
    loop.set_clients({name: plans[name] for name in NAMES[:2]}, trainer.mailbox)
    clients["pi-0"].go()
    loop.run_round(1, 0)
    loop.set_clients(plans, trainer.mailbox)
    clients["pi-2"].go()
    second = loop.run_round(2, 0)
    assert second.participants == ("pi-2",)
    assert not second.stale
    for name in ("pi-0", "pi-1"):
        clients[name].go()


@pytest.mark.deadline
def test_merges_go_on_with_a_slow_device_and_a_frozen_one(start: Callable[..., Any]) -> None:
    here = world_of("supersfl", buffer=1, staleness_max=3)
    clients = paced(here)

    class Slow(TrainingClient):
        def handle(self, message: Request | FinishAlone) -> Reply:
            time.sleep(0.15)
            return super().handle(message)

    likes = clients["pi-1"]
    slow = Slow("pi-1", likes.x, likes.y, secret=likes.secret)
    loop, trainer = start(here, {"pi-0": clients["pi-0"], "pi-1": slow}, silence_s=1.0)
    frozen = trainer.link(trainer.enrol("pi-2"))
    frozen.join(24, SHAPE)
    asking: list[tuple[str, Request]] = []
    fetching = threading.Thread(target=lambda: asking.append(frozen.fetch("", 20.0)))
    fetching.start()

    results = [loop.run_round(1, 0)]
    fetching.join(5)
    assert isinstance(asking[0][1], StartRound)  # and there it is, frozen
    end = time.monotonic() + 15
    while not (any(r.missing for r in results) and any(r.refused for r in results)):
        assert time.monotonic() < end
        results.append(loop.run_round(len(results) + 1, 0))
    assert len(results) > 3
    assert all(r.merged and len(r.participants) == 1 for r in results)
    assert {name for r in results for name in r.missing} == {"pi-2"}
    assert {m.why for m in trainer.mailbox.take_missed()} == {"it is away"}
    # the slow one's round takes 0.75 s: the fast one's merges have made it too old
    late = {name: why for r in results for name, why in r.refused.items()}
    assert late.keys() == {"pi-1"}
    assert "expected at most 3" in late["pi-1"]

    # woken, it finishes that round alone; what it brings is too old, and it is asked again
    likes = clients["pi-2"]
    likes.handle(asking[0][1])
    likes.handle(Step(1, 0))
    assert frozen.reply("", likes.handle(FinishAlone(1))) == "kept"
    number = len(results) + 1
    last = [loop.run_round(r, 0, trainer.mailbox.take_late()) for r in (number, number + 1)]
    assert last[0].merged
    # in the first of both where its own round had ended by then, else in the second
    [(rounds, why)] = [(r.round - 1, r.refused["pi-2"]) for r in last if "pi-2" in r.refused]
    assert why == f"an update {rounds} rounds late: expected at most 3"
    trainer.mailbox.leave("pi-2")


def test_what_comes_after_everybody_left_counts_by_its_change_after_a_restart_too() -> None:
    here = world_of(buffer=1, staleness_max=3, staleness_power=1.0)
    again = world_of(buffer=1, staleness_max=3, staleness_power=1.0)
    plans = {"pi-0": next(iter(here.plans.values()))}
    client = next(iter(here.clients.values()))

    class Breaks:
        """Lets a device begin, and gets nothing of it any more."""

        def exchange(self, requests: Mapping[str, Request], _deadline_s: float) -> dict[str, Reply]:
            return {n: client.handle(r) for n, r in requests.items() if isinstance(r, StartRound)}

    def loop_of(world: Simulation) -> BufferedLoop:
        how = replace(world.recipe.round, quorum=0.0)
        return BufferedLoop(
            world.method, plans, world.state, Breaks(), how, workers=ThreadedWorkers(), clients=1
        )

    began, first = here.state.read(), loop_of(here)
    assert first.run_round(1, 0).missing == ("pi-0",)
    update = client.handle(EndRound(1))
    assert isinstance(update, Update)
    fields, tensors = first.state_dict()
    assert fields == {"owed": [("pi-0", 1)]}

    # others have added 1 to every weight meanwhile, and the trainer is another process
    again.state.write({name: tensor + 1 for name, tensor in began.items()})
    second = loop_of(again)
    second.load_state_dict(orjson.loads(orjson.dumps(fields)), tensors)
    between = again.state.read()
    result = second.run_round(2, 0, {"pi-0": update})
    assert result.participants == ("pi-0",)
    assert result.stale == {"pi-0": 1}
    after = again.state.read()
    for name, tensor in update.weights.items():  # one merge late: half of its change counts
        torch.testing.assert_close(after[name], between[name] + (tensor - began[name]) / 2)
    assert second.state_dict() == ({"owed": []}, {})
    twice = second.run_round(3, 0, {"pi-0": update})
    assert "not known to have begun" in twice.refused["pi-0"]


@pytest.mark.parametrize("steps", [1, 0])
def test_a_late_result_that_was_not_merged_for_want_of_others_may_come_again(steps: int) -> None:
    here = world_of(buffer=2, quorum=1.0, staleness_max=3)
    client, *_ = here.clients.values()

    class Breaks:
        """Lets one device begin, and gets nothing of it any more; the other has no samples."""

        def exchange(self, requests: Mapping[str, Request], _deadline_s: float) -> dict[str, Reply]:
            starts = {n: r for n, r in requests.items() if isinstance(r, StartRound)}
            replies = {name: client.handle(request) for name, request in starts.items()}
            return {
                name: replace(reply, samples=0) if name == "pi-1" else reply
                for name, reply in replies.items()
                if isinstance(reply, Ready)
            }

    loop = BufferedLoop(
        here.method,
        dict(zip(NAMES[:2], here.plans.values(), strict=False)),
        here.state,
        Breaks(),
        here.recipe.round,
        workers=ThreadedWorkers(),
    )
    assert not loop.run_round(1, 0).merged
    update = client.handle(EndRound(1))
    assert isinstance(update, Update)
    for number in (2, 3):
        result = loop.run_round(number, 0, {"pi-0": replace(update, steps=steps)})
        assert result.refused.keys() == {"pi-1"}
        # one that learnt from no batch brings nothing, and is no fault
        assert (result.merged, result.stale) == (False, {"pi-0": number - 1} if steps else {})
        assert (result.keeps("pi-0"), result.keeps("pi-1")) == (True, False)


# the end


@pytest.mark.deadline
def test_at_the_end_devices_at_work_are_left_and_score_what_was_learnt(
    start: Callable[..., Any],
) -> None:
    here = world_of("supersfl", buffer=1, staleness_max=3)
    clients = paced(here, waiting=("pi-2",))
    loop, trainer = start(here, clients)
    assert loop.run_round(1, 0).merged
    began = time.monotonic()
    trainer.mailbox.end_rounds()
    loop.close()
    assert time.monotonic() - began < 2
    assert not here.state.copy_sources
    assert not here.state.copies
    clients["pi-2"].go()
    plan = next(iter(here.plans.values()))
    replies = trainer.mailbox.exchange(dict.fromkeys(NAMES, Evaluate(1, plan, {})), 10)
    assert tuple(replies) == NAMES
    assert all(isinstance(reply, Scores) for reply in replies.values())


def test_an_update_made_alone_is_of_a_round_under_way_whatever_round_others_are_at() -> None:
    update = Update(1, {"a": torch.ones(1)}, 3, 0.5, 1, 0)
    for lockstep in (True, False):
        mailbox = Mailbox(lockstep=lockstep, fetch_s=0.05)
        begin = StartRound(1, next(iter(world_of().plans.values())), {})
        mailbox.exchange({"pi-0": begin}, 0.01)
        mailbox.exchange({"pi-1": replace(begin, round=2)}, 0.01)
        assert mailbox.reply("pi-0", "", update) == "kept"
        assert mailbox.kept() == {("pi-0", 1)}
        late = mailbox.take_late()
        assert list(late) == (["pi-0"] if lockstep else [])
        # it is what its own round ends with, where that is not over
        ended = mailbox.exchange({"pi-0": EndRound(1)}, 0.01)
        assert list(ended) == ([] if lockstep else ["pi-0"])


# what cannot


def test_what_needs_a_common_round_is_refused_before_anybody_is_waited_for(tmp_path: Path) -> None:
    load_or_create_operator_secret(tmp_path)
    open_registry(tmp_path).close()
    settings = TrainerSettings(tmp_path, "run", Address("127.0.0.1", 0), join_s=0.1)

    def refused(numbers: dict[str, Any], why: str, **more: Any) -> None:
        numbers["train"] = {k: v for k, v in numbers["train"].items() if v is not None}
        with pytest.raises(ConfigurationError, match=why):
            train(read_recipe(numbers), replace(settings, **more), say=print, on_round=print)

    refused(recipe_of("minibatch-sfl", buffer=2), "needs all participants of a step at once")
    refused(recipe_of(buffer=2, cohort=2), "leave `participation` and `cohort` out")
    refused(recipe_of(buffer=3), "expected 1 to 2", min_devices=2)
    noisy = recipe_of(buffer=2) | {"privacy": {"update_clip": 1.0, "update_sigma": 1.0}}
    refused(noisy, "no row accounts for those under way")


# processes


@pytest.mark.deadline
def test_a_trainer_killed_and_resumed_merges_on_with_devices_of_any_pace(
    tmp_path: Path, fork_server: Any, free_port: int
) -> None:
    state, data = tmp_path / "server", load_dataset("digits")
    load_or_create_operator_secret(state)
    text = """
    method = "supersfl"
    [data]
    name = "digits"
    clients = 3
    [train]
    backbone = "tiny"
    rounds = 5
    batch = 32
    learning_rate = 0.05
    depth = 2
    [round]
    buffer = 2
    staleness_max = 4
    """
    (tmp_path / "run.toml").write_text(text)
    registry = open_registry(state)
    for place, name in enumerate(NAMES):
        token = registry.create_token()
        device, secret = registry.redeem_token(token, name, PROFILE)
        where = f"http://127.0.0.1:{free_port}"
        Identity(where, device.id, device.fleet, secret).save(tmp_path / name)
        np.savez(
            tmp_path / f"{name}.npz",
            x_train=data.x_train[place:288:3],
            y_train=data.y_train[place:288:3],
            x_test=data.x_test[:10],
            y_test=data.y_test[:10],
        )
    registry.close()

    def trainer(**more: Any) -> Any:
        recipe = str(tmp_path / "run.toml")
        return fork_server.start("trainer", state=str(state), recipe=recipe, port=free_port, **more)

    killed = trainer(kill=("save", 3))
    for name in NAMES:
        fork_server.start(
            "device",
            state=str(tmp_path / name),
            data=str(tmp_path / f"{name}.npz"),
            trainer=f"http://127.0.0.1:{free_port}",
        )
    assert killed.wait() == 9
    resumed = trainer(resume=True)
    assert resumed.wait() == 0, resumed.log.read_text()[-2000:]
    folder = state / "training" / "run"
    report = orjson.loads((folder / "report.json").read_bytes())
    assert [row["round"] for row in report["rounds"]] == [1, 2, 3, 4, 5]
    assert all(row["merged"] for row in report["rounds"])
    assert {len(row["participants"]) for row in report["rounds"]} == {2}
    counted = [
        (name, row["round"] - row["stale"].get(name, 0))
        for row in report["rounds"]
        for name in row["participants"]
    ]
    assert len(counted) == len(set(counted))  # one result a device and round
    log = (folder / "log.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["round"] for line in log] == [1, 2, 3, 4, 5]
    assert report["final"]["accuracy_id"] is not None
