"""An update made alone survives a kill of the device, and then one of the server."""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Callable, Mapping
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edge_sdk.errors import ConfigurationError, LinkError, StorageError
from edge_sdk.identity import Identity
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.data.load import load_dataset
from edge_sdk.training.device.kept_weights import (
    drop_update,
    load_personal,
    load_update,
    save_personal,
    save_update,
)
from edge_sdk.training.device.participate import participate
from edge_sdk.training.device.session import SessionCounts
from edge_sdk.training.device.trainer_client import (
    NotJoinedError,
    TrainerClient,
    TrainingEndedError,
)
from edge_sdk.training.protocol.client_part import ClientPart
from edge_sdk.training.protocol.http import Join
from edge_sdk.training.protocol.messages import (
    EndRound,
    FinishAlone,
    Ready,
    Reply,
    Request,
    StartRound,
    Step,
    Update,
    Weights,
)
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.training import Training
from edge_sdk.wire.address import Address
from server.registry.database import open_registry
from server.registry.operator import load_or_create_operator_secret
from server.training.core.server_state import ServerState
from server.training.fleet.late_updates import LateUpdates
from server.training.fleet.mailbox import Mailbox
from server.training.fleet.settings import TrainerSettings
from server.training.fleet.trainer import train
from server.training.recipe.recipe import read_recipe
from tests.training.worlds import PROFILE
from tests.waiting import wait_until

SHAPE = (1, 8, 8)
SAMPLES = 90


def start(number: int) -> StartRound:
    plan = Plan(
        backbone="tiny",
        input_shape=SHAPE,
        classes=10,
        mean=(0.5,),
        std=(1.0,),
        depth=2,
        training=Training(0.05, 30),
        part=ClientPart(exit_head=True, fusion="tpgf"),
    )
    state = ServerState(deepcopy(network_of(plan)), Training(0.1, 8))
    return StartRound(number, plan, state.weights(2, whole=False, exit_head=False))


def update_of(number: int) -> Update:
    weights = {"stage1.0.weight": torch.full((2, 2), float(number))}
    return Update(number, weights, SAMPLES, 0.5, 3, 0)


def alone() -> Update:
    """The update of a round that the device finished alone, after a batch without an answer."""
    data = load_dataset("digits")
    client = TrainingClient("pi", data.x_train[:SAMPLES], data.y_train[:SAMPLES])
    client.handle(start(1))
    client.handle(Step(1, 0))
    update = client.handle(FinishAlone(1))
    assert isinstance(update, Update)
    return update


@pytest.mark.deadline
def test_update_made_alone_is_handed_in_by_the_process_after_a_kill(
    make_trainer: Callable[..., Any], fork_server: Any, tmp_path: Path
) -> None:
    data = load_dataset("digits")
    np.savez(
        tmp_path / "own.npz",
        x_train=data.x_train[:SAMPLES],
        y_train=data.y_train[:SAMPLES],
        x_test=data.x_test[:10],
        y_test=data.y_test[:10],
    )
    trainer, state = make_trainer(SHAPE, no_reply_s=0.3), tmp_path / "pi"
    trainer.enrol("pi").save(state)
    mailbox: Mailbox = trainer.mailbox
    device = {"state": str(state), "data": str(tmp_path / "own.npz"), "trainer": trainer.url}
    # it hands in Ready and Features, and is killed as it is about to hand in the update
    killed = fork_server.start("device", kill=("hand_in", 3), **device)
    assert mailbox.wait_for_devices(1, 20) == ["pi"]
    assert list(mailbox.exchange({"pi": start(1)}, 10)) == ["pi"]
    assert list(mailbox.exchange({"pi": Step(1, 0)}, 10)) == ["pi"]
    assert killed.wait() == 9
    assert load_update(state, "test", "first") is not None
    # a later run of that name has no use for it
    assert load_update(state, "test", "second") is None

    mailbox.exchange({"other": start(2)}, 0.05)  # round 1 is over
    fork_server.start("device", **device)
    late = wait_until(mailbox.take_late, "a late update", 20.0)
    expected = alone()
    assert (late["pi"].round, late["pi"].steps, late["pi"].supervised) == (1, 3, 0)
    assert late["pi"].weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        assert torch.equal(late["pi"].weights[name], tensor), name
    wait_until(lambda: load_update(state, "test", "first") is None, "an empty store", 20.0)


def test_a_device_that_comes_after_the_end_is_told_so(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = make_trainer(SHAPE)
    trainer.enrol("pi").save(tmp_path / "pi")
    trainer.mailbox.end(0.0)
    counts = participate(tmp_path / "pi", "digits", trainer=trainer.url, say=print)
    assert counts == SessionCounts(updates=0, alone=0)


RECIPE = """
method = "splitfed-v1"
[data]
name = "digits"
clients = 2
[train]
backbone = "tiny"
rounds = 5
batch = 64
learning_rate = 0.05
depth = 1
[round]
quorum = 1.0
staleness_max = 5
"""


class DrivenByHand:
    """A device that declines all it is asked, and hands in its update of round 1 in another one.

    Args:
        at: the round in which it does.
        on_time: a round that it takes part in; None for none.
    """

    def __init__(self, link: TrainerClient, at: int, on_time: int | None = None) -> None:
        self._link = link
        self._at = at
        self._on_time = on_time
        self._weights: Weights = {}
        self._retry = threading.Event()
        self.update: Update | None = None

    def run(self) -> None:
        """Take part until the training is over."""
        after, joined = "", False
        while True:
            try:
                if not joined:
                    self._link.join(SAMPLES, SHAPE)
                    joined = True
                found = self._link.fetch(after, 5.0)
                if found is not None:
                    after = found[0]
                    self._answer(*found)
            except TrainingEndedError:
                return
            except NotJoinedError:
                joined = False
            except LinkError:  # the trainer is away for a while
                self._retry.wait(0.05)

    def _answer(self, identifier: str, request: Request) -> None:
        if isinstance(request, StartRound) and request.round == 1:
            self._weights = request.weights
        if isinstance(request, StartRound) and request.round == self._at:
            self.update = Update(1, self._weights, SAMPLES, 1.0, 1, 1)
            assert self._link.reply("", self.update) == "kept"
        if request.round != self._on_time:
            self._link.decline(identifier, "driven by hand")
        elif isinstance(request, StartRound):
            self._weights = request.weights
            assert self._link.reply(identifier, Ready(request.round, SAMPLES, 0, ())) == "taken"
        else:
            update = Update(request.round, self._weights, SAMPLES, 1.0, 1, 1)
            assert self._link.reply(identifier, update) == "taken"


class Stopped(Exception):  # noqa: N818 - stands for a kill, not for a fault
    """The trainer ends here."""


@pytest.mark.deadline
@pytest.mark.parametrize("on_time", [None, 3])
def test_a_late_update_counts_once_though_a_round_lacked_others_and_the_trainer_was_killed(
    on_time: int | None, tmp_path: Path, free_port: int
) -> None:
    """Also where the device answered on time in the round that lacked others."""
    load_or_create_operator_secret(tmp_path)
    devices = []
    with closing(open_registry(tmp_path)) as registry:
        for name, at, answers in (("pi-0", 2, on_time), ("pi-1", 3, None)):
            device, secret = registry.redeem_token(registry.create_token(), name, PROFILE)
            identity = Identity("http://127.0.0.1:1", device.id, device.fleet, secret)
            link = TrainerClient(identity, f"http://127.0.0.1:{free_port}")
            devices.append(DrivenByHand(link, at, answers))
    threads = [threading.Thread(target=each.run, daemon=True) for each in devices]
    for thread in threads:
        thread.start()
    recipe = read_recipe(tomllib.loads(RECIPE))
    settings = TrainerSettings(tmp_path, "run", Address("127.0.0.1", free_port), join_s=30)

    def stop_after_four(row: Mapping[str, Any]) -> None:
        if row["round"] == 4:
            raise Stopped

    with pytest.raises(Stopped):
        train(recipe, settings, say=print, on_round=stop_after_four)
    # as if it had been killed before it removed the file of what the checkpoint holds
    update = devices[0].update
    assert update is not None
    LateUpdates(settings.folder).keep("pi-0", update)
    report = train(recipe, replace(settings, resume=True), say=print, on_round=print)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    # round 3 has one of two, too few; round 4 has both
    assert [row["merged"] for row in report["rounds"]] == [False, False, False, True, False]
    assert [row["stale"] for row in report["rounds"]] == [
        {},
        {},
        {"pi-0": 2} if on_time is None else {},
        {"pi-0": 3, "pi-1": 3},
        {},
    ]


def test_late_update_is_on_the_servers_disk_before_the_device_is_told(tmp_path: Path) -> None:
    late = LateUpdates(tmp_path)
    mailbox = Mailbox([("pi", 4)], keep=late.keep)
    assert mailbox.reply("pi", "", update_of(4)) == "duplicate"
    assert mailbox.reply("pi", "", update_of(3)) == "kept"
    late.prune(mailbox.kept)

    # killed and resumed: it is there once, and no second one is taken
    again = Mailbox([("pi", 4)], late=LateUpdates(tmp_path).load(), keep=late.keep)
    assert again.reply("pi", "", update_of(3)) == "duplicate"
    (found,) = again.take_late().values()
    assert found.round == 3
    assert torch.equal(found.weights["stage1.0.weight"], torch.full((2, 2), 3.0))
    assert list(late.load()) == ["pi"]  # until a checkpoint holds what it was merged into
    late.prune(again.kept)
    assert late.load() == {}


class SlowDisk:
    """Writes when the test lets it; fails when the test says so."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.fails = False

    def keep(self, _device: str, _update: Update) -> None:
        self.begun.set()
        assert self.go_on.wait(10)
        if self.fails:
            raise StorageError("the disk is full")


def handing_in(mailbox: Mailbox, update: Update, told: list[str]) -> threading.Thread:
    """A device's reply, in a thread of its own."""

    def hand_in() -> None:
        try:
            told.append(mailbox.reply("pi", "", update))
        except StorageError:
            told.append("failed")

    thread = threading.Thread(target=hand_in, daemon=True)
    thread.start()
    return thread


def test_only_a_second_copy_of_the_update_waits_for_the_disk() -> None:
    disk = SlowDisk()
    mailbox = Mailbox([("pi", 4)], keep=disk.keep)
    told: list[str] = []
    threads = [handing_in(mailbox, update_of(3), told)]
    assert disk.begun.wait(10)
    others = threading.Thread(target=mailbox.fetch, args=("ada", ""), daemon=True)
    others.start()
    others.join(5)
    assert not others.is_alive(), "a poll waits for the disk"
    assert mailbox.kept() == {("pi", 3)}  # its file may be there already and must not be removed
    assert mailbox.take_late() == {}
    threads.append(handing_in(mailbox, update_of(3), told))
    threads[1].join(0.2)
    assert told == []  # a device that is told forgets it
    disk.go_on.set()
    for thread in threads:
        thread.join(10)
    assert sorted(told) == ["duplicate", "kept"]
    assert list(mailbox.take_late()) == ["pi"]


def test_an_update_that_the_disk_did_not_take_may_come_again() -> None:
    disk = SlowDisk()
    disk.fails = True
    disk.go_on.set()
    mailbox = Mailbox([("pi", 4)], keep=disk.keep)
    told: list[str] = []
    handing_in(mailbox, update_of(3), told).join(10)
    assert (told, mailbox.kept(), mailbox.take_late()) == (["failed"], set(), {})
    disk.fails = False
    assert mailbox.reply("pi", "", update_of(3)) == "kept"


@pytest.mark.deadline
def test_an_update_asked_for_as_it_is_written_answers() -> None:
    disk = SlowDisk()
    mailbox = Mailbox([("pi", 2)], keep=disk.keep)
    mailbox.join("pi", Join(SAMPLES, SHAPE))
    assert mailbox.exchange({"pi": start(3)}, 0.0) == {}
    told: list[str] = []
    thread = handing_in(mailbox, update_of(3), told)
    assert disk.begun.wait(10)
    asked: dict[str, Reply] = {}
    asking = threading.Thread(
        target=lambda: asked.update(mailbox.exchange({"pi": EndRound(3)}, 10.0)), daemon=True
    )
    asking.start()
    wait_until(lambda: mailbox.fetch("pi", ""), "the request")
    disk.go_on.set()
    thread.join(10)
    asking.join(10)
    assert told == ["taken"]
    assert list(asked) == ["pi"]
    assert mailbox.kept() == set()


def test_damaged_late_update_is_lost_alone(tmp_path: Path) -> None:
    late = LateUpdates(tmp_path)
    late.keep("pi", update_of(3))
    late.keep("ada", update_of(2))
    path = tmp_path / "late" / "000003-pi.update"
    path.write_bytes(path.read_bytes()[:-5])
    assert list(late.load()) == ["ada"]


def test_one_device_does_not_fill_the_disk_with_late_updates(tmp_path: Path) -> None:
    late = LateUpdates(tmp_path)
    mailbox = Mailbox([("ada", 9)], keep=late.keep)
    for number in (8, 2, 3, 4, 5):
        assert mailbox.reply("pi", "", update_of(number)) == "kept"
    assert mailbox.reply("ada-pi", "", update_of(1)) == "kept"
    names = sorted(path.name for path in (tmp_path / "late").iterdir())
    assert names == ["000001-ada-pi.update", "000005-pi.update", "000008-pi.update"]


def test_what_a_device_keeps_belongs_to_one_run(tmp_path: Path) -> None:
    save_personal(tmp_path, "digits", {"exit1.0.weight": torch.ones(2)}, "first")
    assert list(load_personal(tmp_path, "digits", "first")) == ["exit1.0.weight"]
    assert list(load_personal(tmp_path, "digits")) == ["exit1.0.weight"]
    assert load_personal(tmp_path, "digits", "second") == {}

    drop_update(tmp_path, "digits")  # there is none
    save_update(tmp_path, "digits", "first", update_of(1))
    found = load_update(tmp_path, "digits", "first")
    assert found is not None
    assert found.round == 1
    path = tmp_path / "training" / "digits.update"
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(path.read_bytes()[:-5])
    assert load_update(tmp_path, "digits", "first") is None  # lost, and no reason to stop
    drop_update(tmp_path, "digits")
    assert not path.exists()
    with pytest.raises(ConfigurationError, match="name"):
        save_update(tmp_path, "../digits", "first", update_of(1))
