"""Messages between server and client in training, as values and as bytes.

A message travels as one safetensors file: its tensors, and its other fields as JSON in the file's
metadata. Nothing is pickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args

import orjson
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from edge_sdk.errors import ConfigurationError, FrameError, FrameTooLargeError, shown
from edge_sdk.training.protocol.plan import Plan
from profiles.energy import EnergySource

Weights = dict[str, Tensor]

BYTES_MAX: Final = 512_000_000


@dataclass(frozen=True, slots=True)
class Feedback:
    """The server's answer to a client's features.

    gradient: gradient of the server's loss by the features as sent, same shape.
    loss: Ls, the mean over this client's samples.
    outputs: (B, N) the server's logits; None for a method whose clients do not learn from them.
    """

    gradient: Tensor
    loss: float
    outputs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StartRound:
    """Request to train by this plan, from these weights."""

    round: int
    plan: Plan
    weights: Weights = field(repr=False)


@dataclass(frozen=True, slots=True)
class Step:
    """Feedback of the step before, if there is any, and the request for the next features.

    batch: samples to take; None for the plan's number.
    """

    round: int
    step: int
    feedback: Feedback | None = None
    batch: int | None = None


@dataclass(frozen=True, slots=True)
class Outputs:
    """The server's outputs for the step's features, where only the client can compute a loss.

    outputs: (B, ...) logits, or embeddings where the client has the last layer.
    """

    round: int
    step: int
    outputs: Tensor


@dataclass(frozen=True, slots=True)
class EndRound:
    """Feedback of the last step, and the request for the update."""

    round: int
    feedback: Feedback | None = None


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Request to score the trained network on the client's own held-out samples.

    weights: of the whole network, the server's part included; with the exit head if it is shared,
        and the auxiliary model if it is averaged.
    """

    round: int
    plan: Plan
    weights: Weights = field(repr=False)


@dataclass(frozen=True, slots=True)
class FinishAlone:
    """Finish the round without the server, which is silent. A device's own timer; never sent."""

    round: int


Request = StartRound | Step | Outputs | EndRound | Evaluate


@dataclass(frozen=True, slots=True)
class Ready:
    """Reply to StartRound: the client has the weights.

    samples: n_k. steps: batches that it will send this round.
    label_counts: (classes,) samples of each class; empty where labels are not sent.
    """

    round: int
    samples: int
    steps: int
    label_counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Features:
    """Reply to Step: one batch at the cut.

    features: (B, ...) as they travel: float32, float16 or, for int8, uint8.
    labels: (B,) int64; None where they stay on the client.
    loss: Lc of the exit head; None without one.
    ranges: (B, 2), what the int8 codec needs to decode (edge_sdk.training.protocol.feature_codec).
    view, view_ranges: features and ranges of a second view, coded like the first.
    entry: the depth from which the second view comes.
    same: (B,) uint8, 1 where the two views' labels are equal.
    """

    round: int
    step: int
    features: Tensor
    labels: Tensor | None
    loss: float | None
    ranges: Tensor | None = None
    view: Tensor | None = None
    view_ranges: Tensor | None = None
    entry: int | None = None
    same: Tensor | None = None


@dataclass(frozen=True, slots=True)
class OutputGradient:
    """Reply to Outputs: the gradient of the client's loss by the server's outputs, same shape.

    loss: Ls, the mean over the batch; 0 where the client does not send it.
    """

    round: int
    step: int
    gradient: Tensor
    loss: float


@dataclass(frozen=True, slots=True)
class Update:
    """Reply to EndRound: the client's weights after the round.

    weights: as the plan's update codec sends them (edge_sdk.training.protocol.update_codec).
    loss: sample-weighted mean over the round's batches, of Lc alone or of w_c*Lc + w_s*Ls where
        the server supervised (SuperSFL's L_i); 0 of an update whose weights are NaN.
    supervised: batches that had the server's feedback, of `steps`.
    error, cosine: how near the coded change is to the raw one; None for a codec without loss.
    """

    round: int
    weights: Weights = field(repr=False)
    samples: int
    loss: float
    steps: int
    supervised: int
    error: float | None = None
    cosine: float | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Reply to Evaluate: right answers on the client's held-out samples, and the cost so far.

    samples: held-out samples; 0 for a client without any.
    right: right answers of the whole network.
    right_exit: right answers without the server; None where nothing answers alone.
    seconds, cpu_s: time of work in training since the process started, and its CPU time.
    energy_j: energy of that work; None where nothing measures it.
    energy_source: as profiles.energy names it.
    """

    round: int
    samples: int
    right: int
    right_exit: int | None
    seconds: float = 0.0
    cpu_s: float = 0.0
    energy_j: float | None = None
    energy_source: EnergySource = "none"


Reply = Ready | Features | OutputGradient | Update | Scores

_REQUESTS: Final = (StartRound, Step, Outputs, EndRound, Evaluate)
_REPLIES: Final = (Ready, Features, OutputGradient, Update, Scores)
_KINDS: Final = {kind.__name__: kind for kind in (*_REQUESTS, *_REPLIES)}


def to_bytes(message: Request | Reply) -> bytes:
    """The message as one safetensors file."""
    tensors: dict[str, Tensor] = {}
    header: dict[str, Any] = {"kind": type(message).__name__}
    for name in message.__dataclass_fields__:
        value = getattr(message, name)
        match value:
            case Tensor():
                tensors[name] = value.contiguous()
            case Feedback():
                tensors[f"{name}.gradient"] = value.gradient.contiguous()
                if value.outputs is not None:
                    tensors[f"{name}.outputs"] = value.outputs.contiguous()
                header[name] = value.loss
            case Plan():
                header[name] = value.to_dict()
            case dict():
                tensors |= {f"{name}/{key}": tensor.contiguous() for key, tensor in value.items()}
            case None if _FIELDS[name] is _optional:
                pass  # no tensor
            case _:
                header[name] = value
    return save(tensors, metadata={"message": orjson.dumps(header).decode()})


def from_bytes(raw: bytes) -> Request | Reply:
    """Read a message.

    Raises: FrameError for bytes that are no message.
    """
    if len(raw) > BYTES_MAX:
        raise FrameTooLargeError(f"message: at most {BYTES_MAX} bytes, got {len(raw)}")
    try:
        file_header = orjson.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        header = orjson.loads(file_header["__metadata__"]["message"])
        # copies: torch lays out their memory itself, so results do not depend on the file
        tensors = {name: tensor.clone() for name, tensor in load(raw).items()}
        return _build(_KINDS[header["kind"]], _Content(header, tensors))
    except ConfigurationError as err:
        raise FrameError(f"message: {str(err)[:200]}") from err
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as err:
        raise FrameError(f"message: {type(err).__name__}: {str(err)[:200]}") from err


@dataclass(frozen=True, slots=True)
class _Content:
    """The two halves of a message's file."""

    header: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def _build(kind: type[Request | Reply], content: _Content) -> Request | Reply:
    """A message of that kind, each field read as _FIELDS says.

    Raises: KeyError, TypeError or ConfigurationError.
    """
    expected = set(kind.__dataclass_fields__)
    unknown = sorted(content.header.keys() - expected - {"kind"})
    if unknown:
        raise TypeError(f"{kind.__name__} has no {', '.join(map(shown, unknown))}")
    fields = {name: _FIELDS[name](name, content) for name in expected}
    if kind in {OutputGradient, Update} and fields["loss"] is None:
        fields["loss"] = math.nan  # JSON writes NaN and infinity as null: the training diverged
    return kind(**fields)


def _whole(name: str, content: _Content) -> int:
    value = content.header[name]
    if type(value) is not int or value < 0:
        raise TypeError(f"{name}: expected a whole number from 0 up, got {shown(value)}")
    return value


def _whole_or_none(name: str, content: _Content) -> int | None:
    return None if content.header[name] is None else _whole(name, content)


def _loss(name: str, content: _Content) -> float | None:
    return None if content.header[name] is None else _number(name, content.header[name])


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {shown(value)}")
    return float(value)


def _duration(name: str, content: _Content) -> float:
    return _number(name, content.header[name])


def _source(name: str, content: _Content) -> EnergySource:
    for known in get_args(EnergySource):
        if content.header[name] == known:
            source: EnergySource = known
            return source
    raise TypeError(
        f"{name}: expected a source of energy figures, got {shown(content.header[name])}"
    )


def _counts(name: str, content: _Content) -> tuple[int, ...]:
    value = content.header[name]
    if not isinstance(value, list) or not all(type(count) is int and count >= 0 for count in value):
        raise TypeError(f"{name}: expected counts, got {shown(value)}")
    return tuple(value)


def _tensor(name: str, content: _Content) -> Tensor:
    return content.tensors[name]


def _optional(name: str, content: _Content) -> Tensor | None:
    return content.tensors.get(name)


def _weights(name: str, content: _Content) -> Weights:
    start = f"{name}/"
    return {
        key.removeprefix(start): t for key, t in content.tensors.items() if key.startswith(start)
    }


def _feedback(name: str, content: _Content) -> Feedback | None:
    if content.header[name] is None:
        return None
    loss = _number(name, content.header[name])
    return Feedback(
        content.tensors[f"{name}.gradient"], loss, content.tensors.get(f"{name}.outputs")
    )


def _plan(name: str, content: _Content) -> Plan:
    return Plan.from_dict(content.header[name])


_FIELDS: Final[Mapping[str, Callable[[str, _Content], Any]]] = {
    "round": _whole,
    "step": _whole,
    "samples": _whole,
    "steps": _whole,
    "supervised": _whole,
    "label_counts": _counts,
    "loss": _loss,
    "error": _loss,
    "cosine": _loss,
    "features": _tensor,
    "labels": _optional,
    "ranges": _optional,
    "view": _optional,
    "view_ranges": _optional,
    "same": _optional,
    "entry": _whole_or_none,
    "batch": _whole_or_none,
    "outputs": _tensor,
    "gradient": _tensor,
    "weights": _weights,
    "feedback": _feedback,
    "plan": _plan,
    "right": _whole,
    "right_exit": _whole_or_none,
    "seconds": _duration,
    "cpu_s": _duration,
    "energy_j": _loss,
    "energy_source": _source,
}
