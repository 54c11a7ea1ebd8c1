"""The contract of transports: the same calls on clients in process and over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from edge_sdk.nets import build
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.data.load import Dataset, load_dataset
from edge_sdk.training.protocol.messages import (
    EndRound,
    Features,
    FinishAlone,
    Ready,
    Reply,
    Request,
    StartRound,
    Step,
    Update,
)
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.training import Training
from server.training.core.server_state import ServerState
from server.training.methods.besplit import besplit
from server.training.methods.compose import combine
from server.training.methods.fedavg import fedlc
from server.training.methods.feddyn import feddyn
from server.training.methods.harmony import harmony
from server.training.methods.mergesfl import mergesfl
from server.training.methods.method import Method
from server.training.methods.personal import ditto, fedper
from server.training.methods.pfsl import pfsl
from server.training.methods.scala import scala
from server.training.methods.splitfed import splitfed_v1
from server.training.methods.splitlpf import splitlpf
from server.training.methods.supersfl import supersfl
from server.training.rounds.loop import RoundLoop
from server.training.rounds.round import RoundSettings
from server.training.rounds.transport import LocalTransport, Transport
from tests.training.plans import flat_plan

SEED, BATCH = 5, 16
NAMES = ("ada", "bob", "cyd")


@dataclass
class Fleet:
    """Clients, and a transport that reaches them."""

    transport: Transport
    clients: Mapping[str, TrainingClient]


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset("digits")


def plan_of(data: Dataset, depth: int, method: Method, **more: Any) -> Plan:
    return flat_plan(
        backbone="tiny",
        input_shape=(1, 8, 8),
        classes=10,
        mean=data.mean,
        std=data.std,
        depth=depth,
        learning_rate=0.05,
        batch=BATCH,
        part=method.client,
        send_labels=method.labels == "sent",
        seed=SEED,
        **more,
    )


def clients_of(data: Dataset, kind: type[TrainingClient] = TrainingClient) -> dict[str, Any]:
    """Three clients with 40, 56 and 72 samples of their own."""
    sizes = {name: 40 + 16 * place for place, name in enumerate(NAMES)}
    ends = np.cumsum([0, *sizes.values()])
    return {
        name: kind(name, data.x_train[start:stop], data.y_train[start:stop])
        for name, start, stop in zip(sizes, ends[:-1], ends[1:], strict=True)
    }


@pytest.fixture(params=["local", "http"])
def reach(request: pytest.FixtureRequest, make_trainer: Callable[..., Any]) -> Callable[..., Fleet]:
    """Makes a transport over clients."""

    def local(clients: Mapping[str, TrainingClient]) -> Fleet:
        return Fleet(LocalTransport(clients), clients)

    def http(clients: Mapping[str, TrainingClient]) -> Fleet:
        trainer = make_trainer(fetch_s=1.0)
        trainer.join(clients)
        return Fleet(trainer.transport, clients)

    kinds: dict[str, Callable[..., Fleet]] = {"local": local, "http": http}
    return kinds[request.param]


def start_of(data: Dataset, number: int = 1, depth: int = 1) -> StartRound:
    plan = plan_of(data, depth, splitfed_v1())
    state = ServerState(deepcopy(network_of(plan)), Training(0.05, 8))
    return StartRound(number, plan, state.weights(depth, whole=False, exit_head=False))


def test_each_request_gets_the_reply_of_its_kind(
    reach: Callable[..., Fleet], digits: Dataset
) -> None:
    fleet = reach(clients_of(digits))
    start = start_of(digits)
    ready = fleet.transport.exchange(dict.fromkeys(NAMES, start), 10)
    assert {name: reply for name, reply in ready.items() if isinstance(reply, Ready)} == {
        "ada": Ready(1, 40, 3, tuple(np.bincount(fleet.clients["ada"].y, minlength=10))),
        "bob": Ready(1, 56, 4, tuple(np.bincount(fleet.clients["bob"].y, minlength=10))),
        "cyd": Ready(1, 72, 5, tuple(np.bincount(fleet.clients["cyd"].y, minlength=10))),
    }
    features = fleet.transport.exchange(dict.fromkeys(NAMES, Step(1, 0)), 10)
    for reply in features.values():
        assert isinstance(reply, Features)
        assert reply.features.is_contiguous()
        assert len(reply.features) == BATCH
    updates = fleet.transport.exchange(dict.fromkeys(NAMES, EndRound(1)), 10)
    assert [type(reply) for reply in updates.values()] == [Update] * 3


def test_replies_come_in_the_order_of_the_requests(
    reach: Callable[..., Fleet], digits: Dataset
) -> None:
    class Late(TrainingClient):
        """The first in the alphabet is the last to answer."""

        def handle(self, message: Request | FinishAlone) -> Reply:
            time.sleep({"ada": 0.3, "bob": 0.15}.get(self.name, 0.0))
            return super().handle(message)

    fleet = reach(clients_of(digits, Late))
    start = start_of(digits)
    for order in (("ada", "bob", "cyd"), ("cyd", "ada", "bob")):
        replies = fleet.transport.exchange(dict.fromkeys(order, start), 10)
        assert tuple(replies) == order


@pytest.mark.deadline
def test_client_that_cannot_is_left_out_at_once(
    reach: Callable[..., Fleet], digits: Dataset
) -> None:
    fleet = reach(clients_of(digits))
    start = start_of(digits)
    fleet.transport.exchange({"ada": start, "cyd": start}, 10)
    began = time.monotonic()
    # no round is under way at bob
    replies = fleet.transport.exchange(dict.fromkeys(NAMES, Step(1, 0)), 30)
    assert tuple(replies) == ("ada", "cyd")
    assert time.monotonic() - began < 5


def test_client_that_does_not_exist_is_left_out(
    reach: Callable[..., Fleet], digits: Dataset
) -> None:
    fleet = reach(clients_of(digits))
    start = start_of(digits)
    requests: dict[str, Request] = {"stranger": start, "ada": start}
    assert tuple(fleet.transport.exchange(requests, 30)) == ("ada",)


def auxiliary_and_personal_head() -> Method:
    """BESplit's auxiliary model with SplitLPF's personal head, on every client."""
    return combine(splitlpf(), {"auxiliary": besplit()})


def all_companions() -> Method:
    """The same, and SCALA's guard against inversion."""
    return combine(auxiliary_and_personal_head(), {"guard": scala(inversion=0.3)})


def weights_after(
    transport: Transport, data: Dataset, method: Method, codec: str
) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Every global tensor after three rounds."""
    iterations = 4 if method.batch_share else None
    plans = {
        name: plan_of(data, depth, method, codec=codec, iterations=iterations)
        for name, depth in zip(NAMES, (1, 2, 1), strict=True)
    }
    net = build("tiny", classes=10, input_shape=(1, 8, 8), mean=data.mean, std=data.std, seed=SEED)
    state = ServerState(net, Training(0.05, 8, momentum=0.9), method.trunk)
    loop = RoundLoop(
        method, plans, state, transport, RoundSettings(step_deadline_s=30, round_deadline_s=30)
    )
    results = [loop.run_round(number, SEED) for number in (1, 2, 3)]
    return state.read(), results


@pytest.mark.parametrize(
    "method",
    [
        supersfl,
        splitfed_v1,
        splitlpf,
        scala,
        besplit,
        harmony,
        auxiliary_and_personal_head,
        all_companions,
    ],
)
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_http_trains_to_the_same_bits_as_local(
    make_trainer: Callable[..., Any],
    digits: Dataset,
    method: Callable[[], Method],
    codec: str,
) -> None:
    assert_same_over_http(make_trainer, digits, method, codec)


def frozen_pfsl() -> Method:
    """PFSL with fronts that nobody trains."""
    return pfsl(freeze_front=True)


def mergesfl_of_two_speeds() -> Method:
    """MergeSFL with a half batch for every second worker."""
    return mergesfl((1.0, 0.5))


@pytest.mark.parametrize(
    "method", [feddyn, fedlc, fedper, ditto, frozen_pfsl, mergesfl_of_two_speeds]
)
def test_http_trains_a_baseline_to_the_same_bits_as_local(
    make_trainer: Callable[..., Any], digits: Dataset, method: Callable[[], Method]
) -> None:
    assert_same_over_http(make_trainer, digits, method, "fp32")


def assert_same_over_http(
    make_trainer: Callable[..., Any],
    digits: Dataset,
    method: Callable[[], Method],
    codec: str,
) -> None:
    network_of(plan_of(digits, 1, method()))  # built once, before devices in threads want it
    here = clients_of(digits)
    expected, results = weights_after(LocalTransport(here), digits, method(), codec)
    there = clients_of(digits)
    trainer = make_trainer()
    trainer.join(there)
    got, over_http = weights_after(trainer.transport, digits, method(), codec)
    assert [r.participants for r in over_http] == [NAMES] * 3
    assert [(r.bytes_up, r.bytes_down) for r in over_http] == [
        (r.bytes_up, r.bytes_down) for r in results
    ]
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
    for name in NAMES:
        assert here[name].personal.keys() == there[name].personal.keys()
        for key, tensor in here[name].personal.items():
            assert torch.equal(there[name].personal[key], tensor), key
