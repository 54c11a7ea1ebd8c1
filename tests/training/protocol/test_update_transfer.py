"""Coded updates in whole rounds: decoded before they are checked, counted as they were sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets import build
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.client_part import Noise
from edge_sdk.training.protocol.messages import Reply, Request, Update
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.protocol.synthetic import GradientProbe
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.update_codec import UpdateCodec, UpdateCoding, encode_diverged
from server.training.core.server_state import ServerState
from server.training.methods.fedavg import fedavg
from server.training.methods.method import Method
from server.training.methods.splitfed import splitfed_v1
from server.training.methods.splitlpf import splitlpf
from server.training.methods.supersfl import supersfl
from server.training.recipe.privacy import with_noise
from server.training.recipe.recipe import read_recipe
from server.training.rounds.loop import RoundLoop
from server.training.rounds.round import RoundResult, RoundSettings
from server.training.rounds.transport import LocalTransport, Transport
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds
from tests.training.worlds import BytesTransport, meddling

LOSSY = [codec for codec in get_args(UpdateCodec) if codec != "fp32"]
DEPTH, CLASSES = 2, 3


class Spoiling(LocalTransport):
    """Changes a tensor of one client's update."""

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        replies = super().exchange(requests, deadline_s)
        one = replies.get("a")
        if isinstance(one, Update):
            first = next(iter(one.weights))
            weights = one.weights | {first: one.weights[first][:0]}
            replies["a"] = replace(one, weights=weights)
        return replies


def rounds(
    method: Method,
    codec: UpdateCodec,
    transport: Callable[[Mapping[str, TrainingClient]], Transport] = LocalTransport,
    *,
    rate: float = 0.05,
    number: int = 2,
    **settings: Any,
) -> tuple[dict[str, torch.Tensor], list[RoundResult]]:
    """Two clients on the tiny network: the server's weights and the results."""
    generator = np.random.default_rng(1)
    clients = {
        name: TrainingClient(
            name,
            generator.standard_normal((8, 1, 8, 8), np.float32),
            generator.integers(0, CLASSES, 8),
        )
        for name in "ab"
    }
    state = ServerState(build("tiny", classes=CLASSES, seed=0), Training(rate, 8))
    plan = Plan(
        backbone="tiny",
        input_shape=(1, 8, 8),
        classes=CLASSES,
        mean=(0.0,),
        std=(1.0,),
        depth=5 if method.client.whole else DEPTH,
        training=Training(rate, 4),
        part=method.client,
        update=UpdateCoding(codec, share=0.2, steps=5),
        send_labels=method.labels == "sent",
    )
    loop = RoundLoop(
        method, dict.fromkeys("ab", plan), state, transport(clients), RoundSettings(**settings)
    )
    results = [loop.run_round(at, 0) for at in range(1, number + 1)]
    return state.read(), results


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("method", [fedavg, splitfed_v1, supersfl, splitlpf])
def test_bytes_change_no_bit_of_a_coded_round(method: Any, codec: UpdateCodec) -> None:
    here, results = rounds(method(), codec)
    there, over_bytes = rounds(method(), codec, BytesTransport)
    assert [result.participants for result in over_bytes] == [("a", "b")] * 2
    assert all(torch.equal(there[name], tensor) for name, tensor in here.items())
    for one, other in zip(results, over_bytes, strict=True):
        assert one.coding == other.coding
        assert one.bytes_by_kind == other.bytes_by_kind


def test_bytes_are_those_that_were_sent() -> None:
    size = sum(p.numel() for p in build("tiny", classes=CLASSES, seed=0).prefix(DEPTH).parameters())
    (raw, *_), (half, *_) = (rounds(splitfed_v1(), codec)[1] for codec in ("fp32", "fp16"))
    assert raw.bytes_by_kind["up weights"] == 2 * 4 * size
    # half of it, and a scale for each of four tensors
    assert half.bytes_by_kind["up weights"] == 2 * (2 * size + 4 * 4)
    assert raw.coding == {}
    assert (half.coding["bytes"], half.coding["raw_bytes"]) == (2 * (2 * size + 16), 8 * size)
    assert 0 < half.coding["error"] < 2**-11


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_measures_of_a_codec_count_where_it_loses_something(codec: UpdateCodec) -> None:
    def boast(_name: str, _request: Request, reply: Reply) -> Reply:
        # the cosine of two equal changes, as rounding leaves it
        return replace(reply, error=0.5, cosine=1 + 2**-52) if isinstance(reply, Update) else reply

    _, (result,) = rounds(splitfed_v1(), codec, meddling(boast), number=1)
    assert result.participants == ("a", "b")
    assert result.coding.get("error") == (None if codec == "fp32" else 0.5)


def test_what_is_merged_is_what_was_decoded() -> None:
    exact, _ = rounds(splitfed_v1(), "fp32", number=1)
    coded, (result,) = rounds(splitfed_v1(), "int8", number=1)
    start = build("tiny", classes=CLASSES, seed=0).prefix(DEPTH).state_dict()
    names = [name for name in exact if name in start]
    change = torch.cat([(exact[name] - start[name]).flatten() for name in names])
    off = torch.cat([(coded[name] - exact[name]).flatten() for name in names])
    # two clients' errors do not cancel, nor do they add up to more than both
    assert 0 < float(off.norm() / change.norm()) < 2 * result.coding["error"]


@pytest.mark.parametrize("codec", LOSSY)
def test_foreign_update_is_refused_and_the_others_are_merged(codec: UpdateCodec) -> None:
    _, (result,) = rounds(splitfed_v1(), codec, Spoiling, number=1)
    assert result.participants == ("b",)
    assert "expected" in result.refused["a"]


@pytest.mark.parametrize("codec", LOSSY)
def test_diverged_client_is_left_out(codec: UpdateCodec) -> None:
    weights, (result,) = rounds(fedavg(), codec, BytesTransport, rate=1e30, number=1)
    assert (result.participants, result.missing) == ((), ())
    assert result.faults == {"a": "not-finite", "b": "not-finite"}
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())


def test_diverged_update_under_noise_tells_that_and_no_number() -> None:
    method = with_noise(fedavg(), Noise(update_clip=1.0, update_sigma=1.0))
    _, (result,) = rounds(method, "fp32", BytesTransport, rate=1e30, number=1)
    assert result.faults == {"a": "not-finite", "b": "not-finite"}
    coded = encode_diverged({"a": torch.ones(2)}, {"a": torch.zeros(2)}, UpdateCoding(), no_probe)
    assert bool(torch.isnan(coded["a"]).all())


def no_probe() -> GradientProbe:
    raise AssertionError("only synthetic updates need the network")


def test_recipe_names_the_codec_and_its_rows_say_what_it_cost() -> None:
    data: dict[str, Any] = {
        "method": "splitlpf",
        "data": {"name": "digits", "clients": 1, "train_max": 90, "test_max": 30},
        "train": {"backbone": "tiny", "rounds": 1, "learning_rate": 0.1, "batch": 16, "depth": 3}
        | {"update_codec": "synthetic", "update_samples": 4, "update_steps": 20},
    }
    world = build_simulation(read_recipe(data))
    (row,) = run_rounds(world, [])
    coding = row["update_coding"]
    # four inputs of 64 and targets of 10 in half precision, six lengths
    assert coding["bytes"] == 4 * 2 * (64 + 10) + 6 * 4
    assert coding["raw_bytes"] == 4 * 5888
    assert 0 < coding["error"] < 1
    # at the best lengths error and cosine are two sides of one triangle
    assert coding["cosine"] == pytest.approx(math.sqrt(1 - coding["error"] ** 2), abs=1e-3)


def test_coded_updates_cannot_be_late() -> None:
    data: dict[str, Any] = {
        "method": "fedavg",
        "data": {"name": "digits", "clients": 3},
        "train": {"backbone": "tiny", "rounds": 1, "learning_rate": 0.1, "batch": 16}
        | {"update_codec": "int8"},
        "round": {"staleness_max": 1},
    }
    with pytest.raises(ConfigurationError, match="staleness_max = 0"):
        read_recipe(data)


@pytest.mark.parametrize("wrong", [{"update_codec": "zip"}, {"update_share": 2}])
def test_recipe_with_a_wrong_codec_is_refused(wrong: dict[str, Any]) -> None:
    data: dict[str, Any] = {
        "method": "fedavg",
        "data": {"name": "digits", "clients": 3},
        "train": {"backbone": "tiny", "rounds": 1, "learning_rate": 0.1, "batch": 16} | wrong,
    }
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        read_recipe(data)
