"""Which device is alive, whatever it works at: a frozen one costs seconds, not deadlines."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_sdk.training.data.load import load_dataset
from edge_sdk.training.protocol.client_part import ClientPart
from edge_sdk.training.protocol.http import Join
from edge_sdk.training.protocol.messages import EndRound, Ready, Request, StartRound
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.training import Training
from server.training.core.server_state import ServerState
from server.training.fleet.mailbox import Mailbox
from tests.waiting import wait_until

pytestmark = pytest.mark.deadline

SILENCE_S = 1.0
SHAPE = (1, 8, 8)


def start(epochs: int) -> StartRound:
    plan = Plan(
        backbone="tiny",
        input_shape=SHAPE,
        classes=10,
        mean=(0.5,),
        std=(1.0,),
        depth=5,
        training=Training(0.01, 32, epochs=epochs),
        part=ClientPart(whole=True),
    )
    state = ServerState(deepcopy(network_of(plan)), Training(0.1, 8))
    return StartRound(1, plan, state.weights(5, whole=True, exit_head=False))


def asked(mailbox: Mailbox, request: Request) -> tuple[threading.Thread, list[Any]]:
    """An exchange under way with `pi`, and what it ends with."""
    replies: list[Any] = []
    thread = threading.Thread(
        target=lambda: replies.append(mailbox.exchange({"pi": request}, 600.0)), daemon=True
    )
    thread.start()
    return thread, replies


def test_device_is_waited_for_as_long_as_it_says_that_it_is_alive() -> None:
    mailbox = Mailbox(silence_s=SILENCE_S)
    mailbox.join("pi", Join(30, SHAPE))
    waiting, replies = asked(mailbox, EndRound(1))
    wait_until(lambda: mailbox.fetch("pi", ""), "the request")
    for _ in range(8):  # twice as long as it may be silent
        time.sleep(SILENCE_S / 4)
        mailbox.alive("pi")
    assert waiting.is_alive()
    assert mailbox.wait_for_devices(1, 0) == ["pi"]
    silent = time.monotonic()
    waiting.join(20)
    assert SILENCE_S / 2 < time.monotonic() - silent < 5 * SILENCE_S
    assert replies == [{}]
    assert mailbox.wait_for_devices(1, 0) == []
    assert [missed.why for missed in mailbox.take_missed()] == ["it is away"]
    mailbox.end(0.2)  # no device is left to tell


def test_sign_of_life_does_not_call_back_a_device_that_missed_a_deadline() -> None:
    mailbox = Mailbox(silence_s=60)
    mailbox.join("pi", Join(30, SHAPE))
    assert mailbox.exchange({"pi": start(1)}, 0.05) == {}
    mailbox.alive("pi")  # still at work on what it missed
    assert mailbox.wait_for_devices(1, 0) == []
    mailbox.alive("stranger")
    mailbox.fetch("pi", "")
    assert mailbox.wait_for_devices(1, 0) == ["pi"]


def test_end_waits_for_a_device_that_is_behind_and_alive() -> None:
    mailbox = Mailbox(silence_s=60)
    mailbox.join("pi", Join(30, SHAPE))
    assert mailbox.exchange({"pi": start(1)}, 0.05) == {}
    ending = threading.Thread(target=mailbox.end, args=(20,), daemon=True)
    ending.start()
    ending.join(0.3)
    assert ending.is_alive()  # it is still at work on what it missed, and will ask
    mailbox.leave("pi")
    ending.join(5)
    assert not ending.is_alive()


def test_frozen_device_costs_seconds_of_a_long_deadline(
    make_trainer: Callable[..., Any], fork_server: Any, tmp_path: Path
) -> None:
    """FAULTS row 21: a process trains longer than it may be silent, and is frozen meanwhile."""
    trainer = make_trainer(SHAPE, silence_s=SILENCE_S)
    state, data = tmp_path / "pi", load_dataset("digits")
    trainer.enrol("pi").save(state)
    np.savez(
        tmp_path / "own.npz",
        x_train=data.x_train[:300],
        y_train=data.y_train[:300],
        x_test=data.x_test[:10],
        y_test=data.y_test[:10],
    )
    device = fork_server.start(
        "device", state=str(state), data=str(tmp_path / "own.npz"), trainer=trainer.url
    )
    mailbox: Mailbox = trainer.mailbox
    assert mailbox.wait_for_devices(1, 20) == ["pi"]
    ready, replies = asked(mailbox, start(epochs=100_000))
    ready.join(20)
    (reply,) = replies
    assert isinstance(reply["pi"], Ready)
    working, replies = asked(mailbox, EndRound(1))
    working.join(3 * SILENCE_S)
    assert working.is_alive()  # it works, and is waited for
    device.signal(signal.SIGSTOP)
    frozen = time.monotonic()
    working.join(30)
    assert time.monotonic() - frozen < 8 * SILENCE_S
    assert replies == [{}]
    assert mailbox.take_missed()[-1].why == "it is away"
