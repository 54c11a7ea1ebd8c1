"""Training's messages as bytes: to the last bit and back; whatever else comes is refused."""

from __future__ import annotations

import math
import random
import struct
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import save
from torch import Tensor

from edge_sdk.errors import (
    ConfigurationError,
    FrameError,
    FrameTooLargeError,
    NotFiniteError,
)
from edge_sdk.manifest import FeatureCodec
from edge_sdk.training.formulas.evidential_loss import EvidentialLoss
from edge_sdk.training.protocol import messages
from edge_sdk.training.protocol.client_part import ClientPart, Distillation, Noise
from edge_sdk.training.protocol.feature_codec import decode_batch, encode_batch
from edge_sdk.training.protocol.messages import (
    EndRound,
    Features,
    Feedback,
    OutputGradient,
    Outputs,
    Ready,
    Reply,
    Request,
    StartRound,
    Step,
    Update,
    from_bytes,
    to_bytes,
)
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.update_codec import UpdateCoding
from tests.training.plans import flat_plan

PLAN: dict[str, Any] = {
    "backbone": "tiny",
    "input_shape": (1, 8, 8),
    "classes": 10,
    "mean": (0.1,),
    "std": (2.5,),
    "depth": 2,
    "learning_rate": 0.1 + 0.2,  # no short decimal
    "batch": 8,
    "part": ClientPart(exit_head=True, fusion="tpgf", clip=0.5),
}
PLAN_JSON = flat_plan(**PLAN).to_dict()

DTYPES = [np.float32, np.float16, np.float64, np.uint8, np.int64]
tensors = (
    st.sampled_from(DTYPES)
    .flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0)))
    .map(torch.from_numpy)
)
weights = st.dictionaries(st.text(min_size=1, max_size=20), tensors, max_size=4)
numbers = st.integers(0, 2**53)
losses = st.floats(allow_nan=False, allow_infinity=False)
feedbacks = st.none() | st.builds(Feedback, tensors, losses, st.none() | tensors)
MESSAGES = st.one_of(
    st.builds(StartRound, numbers, st.just(flat_plan(**PLAN)), weights),
    st.builds(Step, numbers, numbers, feedbacks, st.none() | numbers),
    st.builds(Outputs, numbers, numbers, tensors),
    st.builds(EndRound, numbers, feedbacks),
    st.builds(Ready, numbers, numbers, numbers, st.lists(numbers, max_size=5).map(tuple)),
    st.builds(
        Features,
        numbers,
        numbers,
        tensors,
        st.none() | tensors,
        st.none() | losses,
        st.none() | tensors,
        st.none() | tensors,
        st.none() | tensors,
        st.none() | numbers,
        st.none() | tensors,
    ),
    st.builds(OutputGradient, numbers, numbers, tensors, losses),
    st.builds(Update, numbers, weights, numbers, losses, numbers, numbers),
)


def assert_same(one: object, other: object) -> None:
    """Equal in every field; tensors bit by bit, NaN included."""
    assert type(one) is type(other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.numpy().tobytes() == other.numpy().tobytes()
    elif isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif is_dataclass(one):
        for field in fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    else:
        assert one == other


@given(MESSAGES)
def test_every_message_comes_back_to_the_last_bit(message: Request | Reply) -> None:
    assert_same(from_bytes(to_bytes(message)), message)


def test_what_lies_in_another_order_in_memory_arrives_contiguous() -> None:
    turned = torch.arange(12.0).reshape(3, 4).t()
    arrived = from_bytes(to_bytes(Features(1, 0, turned, None, None)))
    assert isinstance(arrived, Features)
    assert arrived.features.is_contiguous()
    assert torch.equal(arrived.features, turned)


def test_tensors_that_arrived_are_the_receivers_own() -> None:
    raw = to_bytes(Step(1, 0, Feedback(torch.zeros(3), 1.0)))
    arrived = from_bytes(raw)
    assert isinstance(arrived, Step)
    assert arrived.feedback is not None
    arrived.feedback.gradient.add_(1)
    assert raw == to_bytes(Step(1, 0, Feedback(torch.zeros(3), 1.0)))


# hostile bytes

GOOD = [
    to_bytes(message)
    for message in (
        StartRound(3, flat_plan(**PLAN), {"stage1.0.weight": torch.ones(2, 1, 3, 3)}),
        Step(3, 1, Feedback(torch.ones(2, 4), 0.5)),
        EndRound(3),
        Ready(3, 10, 2, (1, 9)),
        Features(
            3, 0, torch.ones(2, 4, dtype=torch.uint8), torch.tensor([1, 2]), 0.1, torch.ones(2, 2)
        ),
        Outputs(3, 1, torch.ones(2, 10)),
        OutputGradient(3, 1, torch.ones(2, 10), 0.5),
        Update(3, {"stage1.0.bias": torch.ones(2)}, 10, 0.5, 2, 2),
    )
]


def test_mutated_bytes_are_a_message_or_a_frame_error() -> None:
    dice = random.Random(0)
    refused = 0
    for _ in range(6000):
        raw = bytearray(dice.choice(GOOD))
        for _ in range(dice.choice((1, 1, 2, 8))):
            place = dice.randrange(len(raw))
            match dice.randrange(4):
                case 0:
                    raw[place] ^= 1 << dice.randrange(8)
                case 1:
                    raw[place] = dice.choice(b'{}[]",:0-9eNn\\\x00\xff')
                case 2:
                    del raw[place : place + dice.choice((1, 4, 50))]
                case _:
                    raw[place:place] = raw[: dice.choice((1, 8, 40))]
            if not raw:
                raw = bytearray(b"0")
        try:
            from_bytes(bytes(raw))
        except FrameError:
            refused += 1
    assert refused > 3000


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_noise_is_a_frame_error(raw: bytes) -> None:
    with pytest.raises(FrameError):
        from_bytes(raw)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["kind", "round", "step", "plan", "feedback", "samples", "loss"]),
                inner,
                max_size=5,
            )
        ),
        max_leaves=10,
    )
)
def test_any_json_where_a_message_should_be_is_a_frame_error(value: object) -> None:
    try:
        text = orjson.dumps(value).decode()
    except TypeError:  # a whole number beyond 64 bits, which JSON from us never has
        return
    with pytest.raises(FrameError):
        from_bytes(save({}, metadata={"message": text}))


def written(kind: str, **more: object) -> bytes:
    return save({}, metadata={"message": orjson.dumps({"kind": kind, **more}).decode()})


READY = {"round": 1, "samples": 3, "steps": 1, "label_counts": []}
UPDATE = {"round": 1, "samples": 3, "loss": 0.5, "steps": 1, "supervised": 1}


@pytest.mark.parametrize(
    "raw",
    [
        written("Ready", **{**READY, "samples": "3"}),
        written("Ready", **{**READY, "samples": -1}),
        written("Ready", **{**READY, "samples": 3.5}),
        written("Ready", **{**READY, "steps": True}),
        written("Ready", **{**READY, "steps": 2**70 * 1.0}),
        written("Ready", **{**READY, "label_counts": [1, "2"]}),
        written("Ready", **{**READY, "label_counts": 3}),
        written("Ready", **{**READY, "more": 1}),
        written("Ready", round=1),
        written("Update", **{**UPDATE, "loss": "0"}),
        written("Features", round=1, step=0, loss=None),  # no tensor
        written("Step", round=1, step=0, feedback=0.5),  # no gradient
        written("EndRound", round=1, feedback={"loss": 1}),
        written("StartRound", round=1, plan={}),
        written("StartRound", round=1, plan=[]),
        written("StartRound", round=1, plan={**PLAN_JSON, "depth": "two"}),
        written("StartRound", round=1, plan={**PLAN_JSON, "run": "rm"}),
        written("Plan", **PLAN),
        written("object"),
        b"",
        struct.pack("<Q", 2**63) + b"{}",
        b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",  # a pickle
    ],
)
def test_what_does_not_fit_its_kind_is_a_frame_error(raw: bytes) -> None:
    with pytest.raises(FrameError):
        from_bytes(raw)


def test_a_message_above_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "BYTES_MAX", len(GOOD[0]) - 1)
    with pytest.raises(FrameTooLargeError, match="at most"):
        from_bytes(GOOD[0])


# codecs


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_codec_gives_what_its_error_bound_says(codec: FeatureCodec, turned: bool) -> None:
    z = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 10
    if turned:
        z = z.permute(0, 2, 3, 1)
    values, ranges = encode_batch(z, codec)
    got = decode_batch(values, ranges)

    low = z.flatten(1).min(1).values.clamp(max=0)
    high = z.flatten(1).max(1).values.clamp(min=0)
    bound = {
        "fp32": torch.zeros(5),
        "fp16": 2.0**-11 * z.flatten(1).abs().max(1).values,
        "int8": (high - low) / 255 / 2 * 1.001,  # half a step, and float32's rounding of the scale
    }[codec]
    assert ((got - z).abs().flatten(1).max(1).values <= bound).all()
    assert got.dtype == torch.float32
    assert values.is_contiguous()
    assert got.is_contiguous()


def test_a_sample_s_range_does_not_depend_on_its_neighbours() -> None:
    z = torch.tensor([[0.0, 1.0], [0.0, 1000.0]])
    values, ranges = encode_batch(z, "int8")
    alone, _ = encode_batch(z[:1], "int8")
    assert torch.equal(values[:1], alone)
    assert ranges is not None
    assert ranges[:, 0].tolist() == pytest.approx([1 / 255, 1000 / 255])


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3)])
def test_a_batch_of_nothing_is_not_decoded(kind: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.zeros(shape, dtype=kind)
    with pytest.raises(FrameError, match="one sample or more"):
        decode_batch(values, torch.ones(len(shape) and shape[0], 2))


def test_features_that_are_not_finite_arrive_as_nan_and_with_no_other_number() -> None:
    z = torch.tensor([[float("nan"), 1.0], [2.0, 3.0]])
    values, ranges = encode_batch(z, "fp16")
    assert ranges is None
    assert bool(torch.isnan(decode_batch(values, None)).all())
    values, ranges = encode_batch(z, "int8")
    assert not values.any()
    with pytest.raises(NotFiniteError):
        decode_batch(values, ranges)


@pytest.mark.parametrize("kind", ["Update", "OutputGradient"])
def test_a_loss_that_json_cannot_write_is_read_as_nan(kind: str) -> None:
    """A device's JSON has null for NaN and for infinity."""
    if kind == "Update":
        message: Reply = Update(1, {"a": torch.zeros(1)}, 8, math.inf, 2, 0)
    else:
        message = OutputGradient(1, 0, torch.zeros(1), math.nan)
    read = from_bytes(to_bytes(message))
    assert isinstance(read, Update | OutputGradient)
    assert math.isnan(read.loss)


# plans


def test_a_plan_comes_back_as_json_has_it() -> None:
    plan = flat_plan(**PLAN)
    assert Plan.from_dict(orjson.loads(orjson.dumps(plan.to_dict()))) == plan


def test_a_plan_s_json_is_the_same_bytes_as_ever() -> None:
    """The order of the keys included: devices of other versions read it."""
    plan = Plan(
        "cnn6",
        (1, 28, 28),
        10,
        (0.5,),
        (0.25,),
        2,
        Training(
            0.05,
            16,
            epochs=3,
            iterations=7,
            norm="group",
            momentum=0.8,
            weight_decay=1e-4,
            codec="int8",
        ),
        part=ClientPart(distil=Distillation("exit"), noise=Noise(1.0, 0.5, 2.0, 0.25)),
        update=UpdateCoding("top-k", 0.1),
        send_labels=False,
        seed=5,
    )
    assert orjson.dumps(plan.to_dict()).decode() == (
        '{"backbone":"cnn6","input_shape":[1,28,28],"classes":10,"mean":[0.5],"std":[0.25],'
        '"depth":2,"learning_rate":0.05,"batch":16,"part":{"whole":false,"exit_head":false,'
        '"fusion":"server","exit_share":0.5,"clip":null,"personal_share":0.0,"prox_mu":0.0,'
        '"distil":{"head":"exit","client_share":0.2,"server_share":0.3,"tau":5.0,'
        '"anneal_rounds":10},"bottleneck":null,"inversion":null,"back":null,"noise":'
        '{"feature_clip":1.0,"feature_sigma":0.5,"update_clip":2.0,"update_sigma":0.25},'
        '"meta":null,"views":false,"evidence_rounds":null},"epochs":3,"iterations":7,'
        '"norm":"group","momentum":0.8,"weight_decay":0.0001,"codec":"int8","update":'
        '{"codec":"top-k","share":0.1,"samples":2,"steps":60},"send_labels":false,"seed":5}'
    )


def test_evidence_in_a_plan_of_the_release_before_is_softplus_with_all_of_the_divergence() -> None:
    part = ClientPart(exit_head=True, distil=Distillation(anneal_rounds=7), evidence_rounds=4)
    read = read_again(part)
    assert read.exit_evidence == EvidentialLoss("softplus", 1.0, 4)
    assert read.distil is not None
    assert read.distil.loss == EvidentialLoss("softplus", 1.0, 7)
    assert ClientPart(exit_head=True).exit_evidence is None
    ours = ClientPart(exit_head=True, evidence=EvidentialLoss(kl_share=0.02))
    assert read_again(ours).exit_evidence == EvidentialLoss("exp", 0.02, 10)


def read_again(part: ClientPart) -> ClientPart:
    """The client's half as a device reads it out of a plan."""
    return Plan.from_dict(
        orjson.loads(orjson.dumps(flat_plan(**{**PLAN, "part": part}).to_dict()))
    ).part


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 0}, "depth"),
        ({"depth": 1.5}, "depth"),
        ({"depth": True}, "depth"),
        ({"batch": 0}, "batch"),
        ({"epochs": 0}, "epochs"),
        ({"classes": 0}, "classes"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"learning_rate": float("inf")}, "learning_rate"),
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"momentum": -0.1}, "momentum"),
        ({"momentum": float("nan")}, "momentum"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"iterations": 0}, "iterations"),
        ({"codec": "zip"}, "codec"),
        ({"part": None}, "part: expected a table, got None"),
        ({"seed": -1}, "seed"),
        ({"mean": ["a"]}, "mean"),
        ({"input_shape": [1, 8.5, 8]}, "input_shape"),
        ({"input_shape": None}, "plan"),
        ({"device": "cuda"}, "unknown device; update this device"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Plan.from_dict({**PLAN_JSON, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prox_mu": -1}, "prox_mu"),
        ({"exit_share": 1.1}, "exit_share"),
        ({"personal_share": -0.1}, "personal_share"),
        ({"clip": 0}, "clip"),
        ({"clip": float("nan")}, "clip"),
        ({"clip": "none"}, "'none'|str"),
        ({"fusion": "sum"}, "fusion"),
        ({"exit_head": False}, "fusion: expected server where there is no exit head"),
        ({"whole": True}, "exit_head"),
        ({"whole": 1}, "whole"),
        ({"run": "rm"}, "unknown run; update this device"),
    ],
)
def test_a_client_s_half_that_cannot_be_is_refused_by_field(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Plan.from_dict({**PLAN_JSON, "part": {**PLAN_JSON["part"], **change}})


def test_what_a_plan_lacks_is_named() -> None:
    with pytest.raises(ConfigurationError, match="mean"):
        Plan.from_dict({name: value for name, value in PLAN_JSON.items() if name != "mean"})
    with pytest.raises(ConfigurationError, match="depth"):
        Plan.from_dict({name: value for name, value in PLAN_JSON.items() if name != "depth"})
