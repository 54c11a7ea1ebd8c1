"""The mailbox over HTTP: which reply counts, which device is awaited, and which goes on alone."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import urllib3
from torch import Tensor

from edge_sdk.errors import ConfigurationError, FrameError, LinkError
from edge_sdk.identity import Identity
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.device.kept_weights import load_personal, save_personal
from edge_sdk.training.device.participate import _LocalStore
from edge_sdk.training.device.session import (
    STRANGE_CLASSES,
    SessionStore,
    TrainingSession,
)
from edge_sdk.training.device.trainer_address import resolve_trainer_url
from edge_sdk.training.device.trainer_client import (
    NotJoinedError,
    RefusedReplyError,
    TrainerClient,
    TrainingEndedError,
)
from edge_sdk.training.protocol.client_part import ClientPart
from edge_sdk.training.protocol.http import Welcome
from edge_sdk.training.protocol.messages import (
    EndRound,
    Features,
    FinishAlone,
    Ready,
    Reply,
    StartRound,
    Step,
    Update,
    to_bytes,
)
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.training import Training
from edge_sdk.wire.address import Address
from server.training.core.server_state import ServerState
from server.training.fleet.settings import TrainerSettings
from server.training.methods.splitfed import splitfed_v1
from server.training.methods.supersfl import supersfl
from server.training.rounds.loop import RoundLoop
from server.training.rounds.round import RoundSettings
from server.training.rounds.transport import LocalTransport
from tests.waiting import wait_until

pytestmark = pytest.mark.deadline

SHAPE = (1, 8, 8)
GOOD = Ready(1, 30, 2, ())


def plan_with(*, exit_head: bool) -> Plan:
    return Plan(
        backbone="tiny",
        input_shape=SHAPE,
        classes=4,
        mean=(0.5,),
        std=(1.0,),
        depth=1,
        training=Training(0.1, 10),
        part=ClientPart(exit_head=exit_head, fusion="tpgf" if exit_head else "server"),
    )


def start(number: int = 1, *, exit_head: bool = True) -> StartRound:
    plan = plan_with(exit_head=exit_head)
    state = ServerState(deepcopy(network_of(plan)), Training(0.1, 8))
    return StartRound(number, plan, state.weights(1, whole=False, exit_head=False))


def client(name: str = "pi", samples: int = 30) -> TrainingClient:
    generator = np.random.default_rng(samples)
    x = generator.random((samples, *SHAPE), np.float32)
    return TrainingClient(name, x, np.arange(samples) % 4)


class Asking:
    """An exchange under way in a thread."""

    def __init__(self, trainer: Any, requests: dict[str, Any], deadline_s: float) -> None:
        self._replies: list[dict[str, Reply]] = []
        self._thread = threading.Thread(
            target=lambda: self._replies.append(trainer.mailbox.exchange(requests, deadline_s)),
            daemon=True,
        )
        self._thread.start()

    def replies(self) -> dict[str, Reply]:
        """The replies at its end."""
        self._thread.join(20)
        return self._replies[0]


@pytest.fixture
def trainer(make_trainer: Callable[..., Any]) -> Any:
    return make_trainer(SHAPE, fetch_s=0.5)


@pytest.fixture
def pi(trainer: Any) -> TrainerClient:
    """A device that is there, driven by hand."""
    link: TrainerClient = trainer.link(trainer.enrol("pi"))
    link.join(30, SHAPE)
    return link


def fetched(link: TrainerClient, after: str = "") -> str:
    """The id of the next message."""
    found = link.fetch(after, 5.0)
    assert found is not None
    return found[0]


def test_slow_device_misses_this_message_and_gets_the_next(trainer: Any, pi: TrainerClient) -> None:
    asking = Asking(trainer, {"pi": start()}, 0.3)
    late = fetched(pi)
    assert asking.replies() == {}
    assert pi.reply(late, GOOD) == "late"
    assert [(m.device, m.what, m.why) for m in trainer.mailbox.take_missed()] == [
        ("pi", "start", "no reply within 0.3 s")
    ]
    asking = Asking(trainer, {"pi": start(2)}, 10)
    assert pi.reply(fetched(pi, late), Ready(2, 30, 2, ())) == "taken"
    assert asking.replies() == {"pi": Ready(2, 30, 2, ())}
    assert trainer.mailbox.take_counts() == {"late": 1}


def test_a_device_that_takes_no_part_is_not_waited_for_and_its_reason_is_kept(
    trainer: Any, pi: TrainerClient
) -> None:
    asking = Asking(trainer, {"pi": start()}, 60)
    fetched(pi)
    pi.decline("", "another network")
    assert asking.replies() == {}
    assert [(m.device, m.why) for m in trainer.mailbox.take_missed()] == [("pi", "another network")]
    assert trainer.mailbox.wait_for_devices(0, 0) == []
    pi.join(30, SHAPE)
    assert trainer.mailbox.wait_for_devices(1, 0) == ["pi"]


def test_reason_that_would_forge_lines_is_kept_as_one_line(
    trainer: Any, pi: TrainerClient, caplog: pytest.LogCaptureFixture
) -> None:
    """FAULTS row 26: it goes to the log, to a terminal and to the report."""
    asking = Asking(trainer, {"pi": start()}, 60)
    fetched(pi)
    pi.decline("", "no\nround=9 all is well\x1b[2K\r\u202e")
    assert asking.replies() == {}
    (missed,) = trainer.mailbox.take_missed()
    assert missed.why == "no round=9 all is well [2K"
    assert "declines: no round=9" in caplog.text


def test_device_that_missed_a_deadline_is_not_waited_for_until_it_is_heard_of(
    trainer: Any, pi: TrainerClient
) -> None:
    assert Asking(trainer, {"pi": start()}, 30).replies() == {}  # nobody fetches: 0.5 s
    began = time.monotonic()
    assert Asking(trainer, {"pi": start(2)}, 30).replies() == {}
    assert time.monotonic() - began < 0.3
    assert pi.fetch("", 0.0) is None  # heard of; what it missed is not brought again
    asking = Asking(trainer, {"pi": start(3)}, 30)
    pi.reply(fetched(pi), Ready(3, 30, 2, ()))
    assert tuple(asking.replies()) == ("pi",)


def test_message_is_fetched_again_until_it_is_answered(trainer: Any, pi: TrainerClient) -> None:
    asking = Asking(trainer, {"pi": start()}, 10)
    first = fetched(pi)
    assert fetched(pi) == first  # the answer to the poll before was lost on its way, say
    assert pi.reply(first, GOOD) == "taken"
    assert pi.fetch("", 0.0) is None
    assert tuple(asking.replies()) == ("pi",)


def test_first_complete_reply_counts_and_others_are_counted(
    trainer: Any, pi: TrainerClient
) -> None:
    """FAULTS row 9."""
    asking = Asking(trainer, {"pi": start(), "other": start()}, 1.5)
    now = fetched(pi)
    assert pi.reply(now, Ready(7, 1, 1, ())) == "foreign"  # of another round
    features = Features(1, 0, torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), None)
    assert pi.reply(now, features) == "foreign"
    assert pi.reply("made-up", GOOD) == "foreign"
    assert pi.reply(now, GOOD) == "taken"
    assert pi.reply(now, Ready(1, 99, 9, ())) == "duplicate"
    assert asking.replies() == {"pi": GOOD}
    assert pi.reply(now, GOOD) == "duplicate"
    assert trainer.mailbox.take_counts() == {"foreign": 3, "duplicate": 2}


def test_hostile_bytes_are_refused_and_leave_the_place_to_a_sound_reply(
    make_trainer: Callable[..., Any],
) -> None:
    """FAULTS row 26."""
    trainer = make_trainer(SHAPE, reply_bytes_max=100_000)
    identity = trainer.enrol("pi")
    link = trainer.link(identity)
    link.join(30, SHAPE)
    asking = Asking(trainer, {"pi": start()}, 20)
    now = fetched(link)
    good = to_bytes(GOOD)
    hostile = {
        b"": 400,
        b"\xff" * 64: 400,
        good[:-3][:20]: 400,
        (2**62).to_bytes(8, "little") + good[8:]: 400,
        pickle.dumps({"kind": "Ready"}): 400,
        to_bytes(start()): 400,
        b"\0" * 100_001: 413,
    }
    url = f"{trainer.url}/api/v1/training/reply?message={now}"
    headers = {"Authorization": identity.authorization}
    for body, status in hostile.items():
        reply = urllib3.request("POST", url, body=body, headers=headers, retries=False)
        assert reply.status == status, (body[:20], reply.data)
        assert list(reply.json()) == ["error"]
    assert link.reply(now, GOOD) == "taken"
    assert asking.replies() == {"pi": GOOD}


def test_a_device_has_one_reply_in_the_trainers_memory(trainer: Any) -> None:
    identity = trainer.enrol("pi")
    pi: TrainerClient = trainer.link(identity)
    pi.join(30, SHAPE)
    asking = Asking(trainer, {"pi": start()}, 30)
    now = fetched(pi)
    good = to_bytes(GOOD)
    head = (
        f"POST /api/v1/training/reply?message={now} HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: {identity.authorization}\r\nContent-Length: {len(good)}\r\n\r\n"
    ).encode()
    url = urllib3.util.parse_url(trainer.url)
    with ExitStack() as stack:
        slow: list[socket.socket] = []
        for _ in range(3):  # each stops one byte before its end, and is given up for the next
            sock = stack.enter_context(socket.create_connection((url.host, url.port), 10))
            sock.sendall(head + good[:-1])
            if slow:
                assert slow[-1].recv(12) == b"HTTP/1.1 429"
            slow.append(sock)
            time.sleep(0.1)  # else the next may be read first, which nothing outside shows
        # a connection that hangs does not keep the device from sending the same reply again
        assert pi.reply(now, GOOD) == "taken"
        assert slow[-1].recv(12) == b"HTTP/1.1 429"
    assert asking.replies() == {"pi": GOOD}


def test_a_reply_is_refused_while_another_is_decoded_and_may_come_again(
    trainer: Any, pi: TrainerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = Asking(trainer, {"pi": start()}, 30)
    now = fetched(pi)
    taken, decoding, go_on = trainer.mailbox.reply, threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> Any:
        decoding.set()
        assert go_on.wait(10)
        return taken(*arguments)

    monkeypatch.setattr(trainer.mailbox, "reply", slowly)
    first = threading.Thread(target=pi.reply, args=(now, GOOD), daemon=True)
    first.start()
    assert decoding.wait(10)
    with pytest.raises(LinkError, match="one reply at a time"):
        pi.reply(now, GOOD)
    go_on.set()
    first.join(10)
    assert asking.replies() == {"pi": GOOD}
    assert pi.reply(now, GOOD) == "duplicate"


def test_a_device_answers_only_for_itself(trainer: Any, pi: TrainerClient) -> None:
    eve = trainer.enrol("eve")
    asking = Asking(trainer, {"pi": start()}, 10)
    now = fetched(pi)
    stranger = trainer.link(Identity("http://127.0.0.1:1", "pi", "default", "x" * 43))
    with pytest.raises(RefusedReplyError, match="401"):
        stranger.reply(now, GOOD)
    with pytest.raises(NotJoinedError):
        trainer.link(eve).reply(now, GOOD)
    other = trainer.link(eve)
    other.join(30, SHAPE)
    assert other.reply(now, Ready(1, 1, 1, ())) == "foreign"
    operator = trainer.link(Identity("http://127.0.0.1:1", "operator", "default", trainer.operator))
    with pytest.raises(RefusedReplyError, match="403"):
        operator.join(30, SHAPE)
    assert pi.reply(now, GOOD) == "taken"
    assert asking.replies() == {"pi": GOOD}
    trainer.registry.revoke("pi")
    with pytest.raises(RefusedReplyError, match="revoked"):
        pi.fetch("", 0.0)


def test_device_with_other_data_is_told_so(trainer: Any) -> None:
    link = trainer.link(trainer.enrol("pi"))
    with pytest.raises(NotJoinedError):
        link.fetch("", 0.0)
    with pytest.raises(RefusedReplyError, match=r"expected inputs \(1, 8, 8\)"):
        link.join(30, (3, 8, 8))


def test_labels_are_numbered_by_the_names_that_the_training_has(
    make_trainer: Callable[..., Any],
) -> None:
    trainer = make_trainer(SHAPE, class_names=("ant", "bee", "cow", "dog"))
    x = np.zeros((6, *SHAPE), np.float32)
    y = np.array([0, 1, 1, 0, 1, 0])
    found = TrainingClient("pi", x, y, held_out=(x[:2], y[:2]), class_names=("bee", "dog"))
    trainer.join({"pi": found})
    wait_until(lambda: found.y.tolist() == [1, 3, 3, 1, 3, 1], lambda: found.y)
    assert found.held_out is not None
    assert found.held_out[1].tolist() == [1, 3]
    # as after a restart of the trainer: the device's own labels count, not those made of them
    found.number_classes(("dog", "bee"))
    assert found.y.tolist() == [1, 0, 0, 1, 0, 1]


def test_a_device_with_a_class_of_another_name_takes_no_part_and_tells_it_nobody(
    make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(SHAPE, class_names=("ant", "bee", "cow", "dog"))
    x, y = np.zeros((4, *SHAPE), np.float32), np.arange(4) % 2
    strange = TrainingClient("pi", x, y, class_names=("bee", "gnu"))
    session = TrainingSession(strange, trainer.link(trainer.enrol("pi")))
    with pytest.raises(ConfigurationError, match=r"the classes gnu, which .* ant, bee, cow, dog"):
        session.run()
    assert f"device=pi declines: {STRANGE_CLASSES}" in caplog.text
    assert "gnu" not in caplog.text
    assert trainer.mailbox.wait_for_devices(0, 0) == []


def test_device_weighs_no_more_than_it_said_when_it_came(
    trainer: Any, pi: TrainerClient, make_trainer: Callable[..., Any]
) -> None:
    asking = Asking(trainer, {"pi": start()}, 30)
    now = fetched(pi)
    assert pi.reply(now, Ready(1, 10**9, 2, ())) == "foreign"
    assert asking.replies() == {}
    assert trainer.mailbox.take_missed()[0].why == "it reported more samples than when it joined"
    update = alone()
    assert pi.reply("", replace(update, samples=31)) == "foreign"
    assert pi.reply("", update) == "kept"

    small = make_trainer(SHAPE, samples_max=29)
    with pytest.raises(RefusedReplyError, match=r"30 samples: .* at most 29 .*samples_max"):
        small.link(small.enrol("ada")).join(30, SHAPE)


def test_samples_beyond_the_recipes_most_are_refused_and_named() -> None:
    plans = dict.fromkeys(("ada", "bob"), plan_with(exit_head=True))
    state = ServerState(deepcopy(network_of(plans["ada"])), Training(0.1, 8))
    clients = {"ada": client("ada", 30), "bob": client("bob", 31)}
    settings = RoundSettings(samples_max=30, staleness_max=1)
    loop = RoundLoop(supersfl(), plans, state, LocalTransport(clients), settings)
    result = loop.run_round(1, 0)
    assert result.participants == ("ada",)
    assert "31 samples: the recipe takes at most 30" in result.refused["bob"]
    late = replace(alone(), samples=31)
    plans["pi"] = plan_with(exit_head=True)
    loop = RoundLoop(supersfl(), plans, state, LocalTransport(clients), settings)
    assert "at most 30" in loop.run_round(2, 0, {"pi": late}).refused["pi"]
    with pytest.raises(ConfigurationError, match="samples_max"):
        RoundSettings(samples_max=0)


def test_a_device_is_welcomed_in_the_words_of_the_protocol(trainer: Any) -> None:
    identity = trainer.enrol("pi")
    answer = urllib3.request(
        "POST",
        f"{trainer.url}/api/v1/training/hello",
        body=b'{"samples":30,"input_shape":[1,8,8]}',
        headers={"Authorization": identity.authorization, "Content-Type": "application/json"},
        retries=False,
    )
    assert (answer.status, answer.data) == (
        200,
        b'{"training":"test","run":"first","no_reply_s":10.0,"alive_s":3.75,"backbone":"","fine_tuning":{"steps":0,"rate":null,"refit_epochs":0},"class_names":[]}',
    )


def test_restarted_device_is_not_waited_for(trainer: Any, pi: TrainerClient) -> None:
    asking = Asking(trainer, {"pi": start()}, 30)
    fetched(pi)
    pi.join(30, SHAPE)  # a new process: what the old one fetched is lost
    began = time.monotonic()
    assert asking.replies() == {}
    assert time.monotonic() - began < 5
    assert trainer.mailbox.take_missed()[0].why == "it was restarted"


def test_end_reaches_devices_that_poll(trainer: Any, pi: TrainerClient) -> None:
    ends: list[type[Exception]] = []

    def poll() -> None:
        with pytest.raises(TrainingEndedError):
            pi.fetch("", 10.0)
        ends.append(TrainingEndedError)

    waiting = threading.Thread(target=poll, daemon=True)
    waiting.start()
    wait_until(lambda: trainer.mailbox._listeners["pi"], "a poll that is held")
    began = time.monotonic()
    trainer.mailbox.end(10)
    assert time.monotonic() - began < 2
    waiting.join(5)
    assert ends == [TrainingEndedError]


def alone(samples: int = 30) -> Update:
    """The update of a round that phase 1 finished alone, after a first batch without an answer."""
    here = client(samples=samples)
    here.handle(start())
    here.handle(Step(1, 0))
    update = here.handle(FinishAlone(1))
    assert isinstance(update, Update)
    return update


def equal(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(got[k], expected[k]) for k in got)


def test_device_goes_on_alone_and_hands_in_the_round_it_finished(
    make_trainer: Callable[..., Any],
) -> None:
    trainer = make_trainer(SHAPE, no_reply_s=0.3)
    trainer.join({"pi": client()})
    trainer.mailbox.exchange({"pi": start()}, 10)
    trainer.mailbox.exchange({"pi": Step(1, 0)}, 10)
    # the server is silent for longer than the device waits
    wait_until(lambda: trainer.mailbox.kept() == {("pi", 1)}, "an update made alone")
    assert trainer.sessions["pi"].counts.alone == 1
    assert trainer.mailbox.exchange({"pi": Step(1, 1)}, 10) == {}
    assert trainer.mailbox.take_missed()[0].why == "it finished the round without the server"
    update = trainer.mailbox.exchange({"pi": EndRound(1)}, 10)["pi"]
    assert isinstance(update, Update)
    assert (update.steps, update.supervised) == (3, 0)  # 30 samples in batches of 10
    assert equal(update.weights, alone().weights)
    assert trainer.mailbox.take_late() == {}


def test_update_of_a_past_round_counts_within_the_staleness_limit(
    make_trainer: Callable[..., Any],
) -> None:
    trainer = make_trainer(SHAPE, no_reply_s=0.3)
    trainer.join({"pi": client()})
    trainer.mailbox.exchange({"pi": start()}, 10)
    trainer.mailbox.exchange({"pi": Step(1, 0)}, 10)
    trainer.mailbox.exchange({"other": start(2)}, 0.1)  # round 1 ended without it
    late = wait_until(trainer.mailbox.take_late, "a late update")
    assert equal(late["pi"].weights, alone().weights)
    ada = client("ada", 20)
    plans = {"ada": plan_with(exit_head=True), "pi": plan_with(exit_head=True)}
    results = {}
    for limit in (1, 2):
        state = ServerState(deepcopy(network_of(plans["pi"])), Training(0.1, 8))
        settings = RoundSettings(staleness_max=limit)
        loop = RoundLoop(supersfl(), plans, state, LocalTransport({"ada": ada}), settings)
        for number in (1, 2):
            loop.run_round(number, 0)
        results[limit] = loop.run_round(3, 0, late)
    assert results[1].stale == {}
    assert "2 rounds late: expected at most 1" in results[1].refused["pi"]
    assert results[1].participants == ("ada",)
    assert results[2].stale == {"pi": 2}
    assert results[2].participants == ("ada", "pi")


def test_without_an_exit_head_a_silent_round_is_given_up() -> None:
    here = client()
    here.handle(start(exit_head=False))
    here.handle(Step(1, 0))
    with pytest.raises(FrameError, match="given up"):
        here.handle(FinishAlone(1))
    assert isinstance(here.handle(start(2, exit_head=False)), Ready)


class Noisy(TrainerClient):
    """A network that brings replies twice, and those of the past again."""

    def __init__(self, identity: Identity, url: str) -> None:
        super().__init__(identity, url)
        self._sent: list[tuple[str, Reply]] = []

    def reply(self, identifier: str, reply: Reply, timeout_s: float = 5.0) -> str:
        outcome = super().reply(identifier, reply, timeout_s)
        for old_identifier, old_reply in [(identifier, reply), *self._sent[-2:]]:
            super().reply(old_identifier, old_reply, timeout_s)
        self._sent.append((identifier, reply))
        return outcome


def test_duplicate_and_reordered_replies_leave_no_trace_in_the_weights(trainer: Any) -> None:
    """FAULTS row 9."""

    def weights(transport: Any) -> dict[str, Tensor]:
        plans = {name: plan_with(exit_head=False) for name in ("ada", "bob")}
        state = ServerState(deepcopy(network_of(plans["ada"])), Training(0.1, 8))
        loop = RoundLoop(splitfed_v1(), plans, state, transport)
        for number in (1, 2):
            assert loop.run_round(number, 0).participants == ("ada", "bob")
        return state.read()

    begun = network_of(plan_with(exit_head=False))
    untouched = {key: tensor.clone() for key, tensor in begun.state_dict().items()}
    expected = weights(LocalTransport({n: client(n) for n in ("ada", "bob")}))
    begun.load_state_dict(untouched)
    threads = []
    for name in ("ada", "bob"):
        session = TrainingSession(client(name), Noisy(trainer.enrol(name), trainer.url))
        threads.append(threading.Thread(target=session.run, daemon=True))
        threads[-1].start()
    trainer.mailbox.wait_for_devices(2, 10)
    got = weights(trainer.transport)
    counts = trainer.mailbox.take_counts()
    trainer.mailbox.end(5)
    for thread in threads:
        thread.join(10)
    begun.load_state_dict(untouched)
    assert counts["duplicate"] > 8
    assert equal(got, expected)


class Moving:
    """A client of a trainer that is gone for a while, and of another one when it is back.

    Attributes:
        loses_updates: whether an update does not reach the trainer, though smaller calls do.
    """

    def __init__(self, identity: Identity, *trainers: Any) -> None:
        self.gone = False
        self.loses_updates = False
        self._links = [trainer.link(identity) for trainer in trainers]

    def move(self) -> None:
        """Be back, at the next trainer."""
        self._links.pop(0)
        self.gone = False

    def __getattr__(self, name: str) -> Any:
        if self.gone:
            raise LinkError("refused")
        return getattr(self._links[0], name)

    def reply(self, identifier: str, reply: Reply, timeout_s: float = 5.0) -> str:
        if self.gone or (self.loses_updates and isinstance(reply, Update)):
            raise LinkError("refused")
        return str(self._links[0].reply(identifier, reply, timeout_s))


class OneRun(SessionStore):
    """A store that knows the run that it was opened for last, and keeps nothing."""

    run = ""

    def open(self, welcome: Welcome) -> bool:
        before, self.run = self.run, welcome.run
        return before != self.run


@contextmanager
def moving_session(first: Any, second: Any) -> Iterator[tuple[Moving, TrainingSession]]:
    """A session that has answered a step of round 1 at the first trainer, in a thread."""
    link = Moving(first.enrol("pi"), first, second)
    session = TrainingSession(client(), link, store=OneRun())
    thread = threading.Thread(target=session.run, daemon=True)
    thread.start()
    assert first.mailbox.wait_for_devices(1, 10) == ["pi"]
    for request in (start(), Step(1, 0)):
        assert tuple(first.mailbox.exchange({"pi": request}, 10)) == ("pi",)
    wait_until(lambda: first.mailbox._listeners["pi"], "a poll that is held")
    yield link, session
    first.mailbox.end(0)
    second.mailbox.end(5)
    thread.join(10)
    assert not thread.is_alive()


def test_session_waits_out_a_trainer_that_is_restarted(make_trainer: Callable[..., Any]) -> None:
    first, second = make_trainer(SHAPE), make_trainer(SHAPE)
    with moving_session(first, second) as (link, _):
        link.gone = True
        assert first.mailbox.exchange({"pi": Step(1, 1)}, 0.5).keys() <= {"pi"}
        link.move()
        assert second.mailbox.wait_for_devices(1, 25) == ["pi"]
        assert tuple(second.mailbox.exchange({"pi": start()}, 10)) == ("pi",)


def test_a_device_whose_patience_ends_as_it_joins_again_finishes_its_round_alone(
    make_trainer: Callable[..., Any],
) -> None:
    first, second = make_trainer(SHAPE), make_trainer(SHAPE, no_reply_s=0.1)
    with moving_session(first, second) as (link, session):
        link.gone = True
        assert first.mailbox.exchange({"pi": Step(1, 1)}, 0.5).keys() <= {"pi"}
        wait_until(lambda: session._outbox and session._patience_s() < 9.5, "features that wait")
        link.move()  # to a trainer that may not be silent for so long
        wait_until(lambda: session.counts.alone, "an update made alone")
        assert tuple(second.mailbox.exchange({"pi": start(2)}, 10)) == ("pi",)


def test_a_device_gives_a_lost_trainer_up_once_it_has_finished_its_round_alone(
    make_trainer: Callable[..., Any],
) -> None:
    trainer = make_trainer(SHAPE, no_reply_s=0.5)
    link = Moving(trainer.enrol("pi"), trainer)
    session = TrainingSession(client(), link, give_up_s=0.12)
    ends: list[LinkError] = []

    def run() -> None:
        with pytest.raises(LinkError) as caught:
            session.run()
        ends.append(caught.value)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert trainer.mailbox.wait_for_devices(1, 10) == ["pi"]
    for request in (start(), Step(1, 0)):
        assert tuple(trainer.mailbox.exchange({"pi": request}, 10)) == ("pi",)
    link.gone = True
    thread.join(20)
    assert str(ends[0]).startswith("refused; no trainer was reached for 0.002 min")
    assert session.counts.alone == 1


@contextmanager
def update_not_handed_in(trainer: Any, store: SessionStore) -> Iterator[tuple[Moving, Any, Any]]:
    """A session that gives up after a second, and has an update that it cannot hand in.

    Its trainer was away for longer before, while a round waited for it. What ends here: the
    session's run, and the exchange that asks for the update.
    """
    link = Moving(trainer.enrol("pi"), trainer)
    session = TrainingSession(client(), link, store=store, give_up_s=1.0)
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        running = pool.submit(session.run)
        stack.callback(session.stop)
        assert trainer.mailbox.wait_for_devices(1, 10) == ["pi"]
        for request in (start(), Step(1, 0)):
            assert tuple(trainer.mailbox.exchange({"pi": request}, 10)) == ("pi",)
        wait_until(lambda: trainer.mailbox._listeners["pi"], "a poll that is held")
        link.gone = link.loses_updates = True
        assert trainer.mailbox.exchange({"pi": Step(1, 1)}, 0.1).keys() <= {"pi"}
        wait_until(lambda: session._lost_at, "a call that does not reach the trainer")
        lost_at = session._lost_at or 0.0
        wait_until(lambda: time.monotonic() > lost_at + 1, "the time after which it gives up")
        link.gone = False
        wait_until(lambda: trainer.mailbox._listeners["pi"], "a poll that is held")
        asked = pool.submit(trainer.mailbox.exchange, {"pi": EndRound(1)}, 5.0)
        wait_until(lambda: session._outbox and isinstance(session._outbox[1], Update), "an update")
        yield link, running, asked


def test_a_trainer_that_was_just_reached_is_not_given_up(trainer: Any) -> None:
    with update_not_handed_in(trainer, SessionStore()) as (link, running, asked):
        link.loses_updates = False
        assert isinstance(asked.result(10)["pi"], Update)
        trainer.mailbox.end(5)
        running.result(10)


def test_an_update_that_could_not_be_handed_in_is_kept_for_the_next_training(
    trainer: Any, tmp_path: Path
) -> None:
    with update_not_handed_in(trainer, _LocalStore(tmp_path, lambda _: None)) as ends:
        link, running, asked = ends
        with pytest.raises(LinkError, match="What this device finished is kept"):
            running.result(10)
        assert asked.result(10) == {}
    link.loses_updates = False
    again = TrainingSession(client(), link, store=_LocalStore(tmp_path, lambda _: None))
    trainer.threads.append(threading.Thread(target=again.run, daemon=True))
    trainer.threads[-1].start()
    wait_until(trainer.mailbox.kept, "an update that is handed in")
    assert trainer.mailbox.kept() == {("pi", 1)}


def test_an_update_that_was_finished_alone_is_not_handed_to_another_run(
    make_trainer: Callable[..., Any],
) -> None:
    first, second = make_trainer(SHAPE, no_reply_s=0.3), make_trainer(SHAPE, run="second")
    with moving_session(first, second) as (link, session):
        link.gone = True
        wait_until(lambda: session.counts.alone, "a round that is finished alone")
        link.move()
        assert second.mailbox.wait_for_devices(1, 25) == ["pi"]
        assert tuple(second.mailbox.exchange({"pi": start(2)}, 10)) == ("pi",)
        assert second.mailbox.kept() == set()


def test_a_round_of_another_run_is_not_finished(make_trainer: Callable[..., Any]) -> None:
    first, second = make_trainer(SHAPE), make_trainer(SHAPE, run="second", no_reply_s=0.1)
    with moving_session(first, second) as (link, session):
        link.gone = True
        assert first.mailbox.exchange({"pi": Step(1, 1)}, 0.5).keys() <= {"pi"}
        link.move()
        assert second.mailbox.wait_for_devices(1, 25) == ["pi"]
        assert second.mailbox.exchange({"pi": EndRound(1)}, 10) == {}
        [missed] = second.mailbox.take_missed()
        assert missed.why == "client pi: no round 1 is under way here"
        assert session.counts.alone == 0


def test_personal_weights_survive_a_restart_and_damage_is_named(tmp_path: Path) -> None:
    weights = {"exit1.0.weight": torch.randn(3, 2)}
    assert load_personal(tmp_path, "run") == {}
    save_personal(tmp_path, "run", weights)
    assert equal(load_personal(tmp_path, "run"), weights)
    path = tmp_path / "training" / "run.safetensors"
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ConfigurationError, match=r"run\.safetensors"):
        load_personal(tmp_path, "run")
    with pytest.raises(ConfigurationError, match="name"):
        save_personal(tmp_path, "../agent", weights)


def test_invitation_is_taken_to_the_servers_own_host_only() -> None:
    plain = Identity("http://10.0.0.5:8000", "pi", "default", "secret", insecure=True)
    safe = Identity("https://hub:8000", "pi", "default", "secret")
    assert resolve_trainer_url(plain, "http://10.0.0.5:8100") == "http://10.0.0.5:8100"
    assert resolve_trainer_url(plain, "http://0.0.0.0:8100") == "http://10.0.0.5:8100"
    assert resolve_trainer_url(safe, "https://[::]:8100/") == "https://hub:8100"
    for identity, url in (
        (plain, "http://evil:8100"),
        (safe, "http://hub:8100"),
        (plain, "file:///etc/passwd"),
        (plain, "http://10.0.0.5:8100/elsewhere"),
    ):
        with pytest.raises(ConfigurationError, match="trainer"):
            resolve_trainer_url(identity, url)


@pytest.mark.parametrize("name", ["my recipe", "_x", "", "a" * 101, "../x"])
def test_a_training_has_a_name_that_devices_take(tmp_path: Path, name: str) -> None:
    address = Address("127.0.0.1", 0)
    with pytest.raises(ConfigurationError, match="give the recipe's file another name"):
        TrainerSettings(tmp_path, name, address)
    with pytest.raises(ConfigurationError, match="expected a name"):
        load_personal(tmp_path, name)
    assert TrainerSettings(tmp_path, "my-recipe_2.1", address).name == "my-recipe_2.1"


def test_trainer_does_not_listen_to_the_network_in_the_clear(tmp_path: Path) -> None:
    """FAULTS row 13."""
    everywhere = Address("0.0.0.0", 8100)
    with pytest.raises(ConfigurationError, match="without encryption"):
        TrainerSettings(tmp_path, "run", everywhere)
    assert TrainerSettings(tmp_path, "run", everywhere, insecure=True).folder == (
        tmp_path / "training" / "run"
    )
    with pytest.raises(ConfigurationError, match="certificate and its key"):
        TrainerSettings(tmp_path, "run", everywhere, tls_cert=tmp_path / "cert.pem")


def test_device_that_gets_a_new_credential_while_it_trains_stays_in_the_training(
    make_trainer: Callable[..., Any],
) -> None:
    trainer = make_trainer()
    old = trainer.enrol("pi-1")
    stored = [old]
    link = TrainerClient(old, trainer.url, lambda: stored[-1])
    try:
        link.join(8, (1, 8, 8))
        members = trainer.registry.membership
        new = members.new_credential("pi-1")
        link.alive()
        members.confirm_credential("pi-1", new)
        # the agent writes it to the disk a moment after the server's confirmation
        later = threading.Timer(0.2, lambda: stored.append(replace(old, credential=new)))
        later.start()
        link.alive()
        assert stored[-1].credential == new
    finally:
        link.close()
