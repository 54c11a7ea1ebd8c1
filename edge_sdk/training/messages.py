"""What server and client say to each other in training, as values and as bytes.

A message travels as one safetensors file: its tensors, and its other fields as JSON in the file's
metadata. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from edge_sdk.errors import FrameError, FrameTooLargeError
from edge_sdk.training.plan import Plan

Weights = dict[str, Tensor]

BYTES_MAX: Final = 512_000_000


@dataclass(frozen=True, slots=True)
class Feedback:
    """What the server returns for a client's features.

    gradient: of the server's loss with respect to the features as sent, same shape.
    loss: Ls, the mean over this client's samples.
    """

    gradient: Tensor
    loss: float


@dataclass(frozen=True, slots=True)
class StartRound:
    """Train by this plan, from these weights."""

    round: int
    plan: Plan
    weights: Weights = field(repr=False)


@dataclass(frozen=True, slots=True)
class Step:
    """The feedback of the step before, if there is any, and the order for the next features."""

    round: int
    step: int
    feedback: Feedback | None = None


@dataclass(frozen=True, slots=True)
class EndRound:
    """The feedback of the last step, and the order to hand over the update."""

    round: int
    feedback: Feedback | None = None


Request = StartRound | Step | EndRound


@dataclass(frozen=True, slots=True)
class Ready:
    """The client has the weights.

    samples: n_k. steps: batches it will send this round. label_counts: (classes,) where labels
    may be known.
    """

    round: int
    samples: int
    steps: int
    label_counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Features:
    """One batch at the cut.

    features: (B, ...) as they travelled, decoded. labels: (B,) int64, None where they stay on the
        client. loss: Lc of the exit head, None without one.
    """

    round: int
    step: int
    features: Tensor
    labels: Tensor | None
    loss: float | None


@dataclass(frozen=True, slots=True)
class Update:
    """What a round made of the client's weights.

    loss: sample-weighted mean over the round's batches, of Lc alone or of w_c*Lc + w_s*Ls where
        the server supervised (SuperSFL's L_i).
    supervised: batches that had the server's feedback, of `steps`.
    """

    round: int
    weights: Weights = field(repr=False)
    samples: int
    loss: float
    steps: int
    supervised: int


Reply = Ready | Features | Update

_KINDS: Final = {
    kind.__name__: kind for kind in (StartRound, Step, EndRound, Ready, Features, Update)
}


def to_bytes(message: Request | Reply) -> bytes:
    """The message as one safetensors file."""
    tensors: dict[str, Tensor] = {}
    said: dict[str, Any] = {"kind": type(message).__name__}
    for name in message.__dataclass_fields__:
        value = getattr(message, name)
        match value:
            case Tensor():
                tensors[name] = value.contiguous()
            case Feedback():
                tensors[f"{name}.gradient"] = value.gradient.contiguous()
                said[name] = value.loss
            case Plan():
                said[name] = value.to_dict()
            case dict():
                tensors |= {f"{name}/{key}": tensor.contiguous() for key, tensor in value.items()}
            case _:
                said[name] = value
    return save(tensors, metadata={"message": orjson.dumps(said).decode()})


def from_bytes(raw: bytes) -> Request | Reply:
    """Read a message.

    Raises: FrameError for anything else.
    """
    if len(raw) > BYTES_MAX:
        raise FrameTooLargeError(f"message: at most {BYTES_MAX} bytes, got {len(raw)}")
    try:
        header_bytes = int.from_bytes(raw[:8], "little")
        header = orjson.loads(raw[8 : 8 + header_bytes])
        said = orjson.loads(header["__metadata__"]["message"])
        tensors = load(raw)
        return _build(_KINDS[said.pop("kind")], said, tensors)
    except (SafetensorError, orjson.JSONDecodeError, KeyError, TypeError, ValueError) as err:
        raise FrameError(f"message: {type(err).__name__}: {err}") from err


def _build(
    kind: type[Request | Reply], said: dict[str, Any], tensors: Mapping[str, Tensor]
) -> Request | Reply:
    fields: dict[str, Any] = dict(said)
    if fields.get("feedback") is not None:
        fields["feedback"] = Feedback(tensors["feedback.gradient"], float(fields["feedback"]))
    if "plan" in fields:
        fields["plan"] = Plan.from_dict(fields["plan"])
    if "label_counts" in fields:
        fields["label_counts"] = tuple(int(count) for count in fields["label_counts"])
    if "weights" in kind.__dataclass_fields__:
        start = len("weights/")
        fields["weights"] = {
            key[start:]: tensor for key, tensor in tensors.items() if key.startswith("weights/")
        }
    for name in ("features", "labels"):
        if name in tensors:
            fields[name] = tensors[name]
    return kind(**fields)
