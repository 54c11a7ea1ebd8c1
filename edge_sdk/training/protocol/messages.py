"""What server and client say to each other in training, as values and as bytes.

A message travels as one safetensors file: its tensors, and its other fields as JSON in the file's
metadata. Nothing is pickled.
"""

from __future__ import annotations

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
    """What the server returns for a client's features.

    gradient: of the server's loss with respect to the features as sent, same shape.
    loss: Ls, the mean over this client's samples.
    outputs: (B, N) the server's logits, to learn from; None where the method has no use for them.
    """

    gradient: Tensor
    loss: float
    outputs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StartRound:
    """Train by this plan, from these weights."""

    round: int
    plan: Plan
    weights: Weights = field(repr=False)


@dataclass(frozen=True, slots=True)
class Step:
    """The feedback of the step before, if there is any, and the order for the next features.

    batch: samples to take; None for as many as the plan says.
    """

    round: int
    step: int
    feedback: Feedback | None = None
    batch: int | None = None


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the server made of the step's features, where only the client can judge it.

    outputs: (B, ...) logits, or embeddings where the client has the last layer.
    """

    round: int
    step: int
    outputs: Tensor


@dataclass(frozen=True, slots=True)
class EndRound:
    """The feedback of the last step, and the order to hand over the update."""

    round: int
    feedback: Feedback | None = None


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Score what was learnt on held-out samples of your own.

    weights: of the whole network, the server's part included; an exit head where it is shared.
    """

    round: int
    plan: Plan
    weights: Weights = field(repr=False)


@dataclass(frozen=True, slots=True)
class NoReply:
    """The server is silent: finish the round alone. Said by the device's own timer; never sent."""

    round: int


Request = StartRound | Step | Outputs | EndRound | Evaluate


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

    features: (B, ...) as they travel: float32, float16 or, for int8, uint8. labels: (B,) int64,
        None where they stay on the client. loss: Lc of the exit head, None without one.
    ranges: (B, 2), what the int8 codec needs to decode (edge_sdk.training.protocol.feature_codec).
    view: (B, ...) features of a second view, coded as the first; `view_ranges` as `ranges`.
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
    """The gradient of the client's loss with respect to the server's outputs, same shape.

    loss: Ls, the mean over the batch; 0 where the client keeps it to itself.
    """

    round: int
    step: int
    gradient: Tensor
    loss: float


@dataclass(frozen=True, slots=True)
class Update:
    """What a round made of the client's weights.

    loss: sample-weighted mean over the round's batches, of Lc alone or of w_c*Lc + w_s*Ls where
        the server supervised (SuperSFL's L_i).
    supervised: batches that had the server's feedback, of `steps`.
    weights: as the plan's update codec sends them (edge_sdk.training.protocol.update_codec); error
        and cosine say how near to the raw change that is, None where they travel as they are.
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
    """Right answers on the client's held-out samples, and what its training has cost so far.

    samples: 0 where it has none. right: of the whole network. right_exit: of what answers without
        the server, None where nothing does.
    seconds, cpu_s: of work in training, since this process began, and of its cores in that time.
    energy_j: of that work, None where nothing tells; energy_source: as profiles.energy names it.
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
    said: dict[str, Any] = {"kind": type(message).__name__}
    for name in message.__dataclass_fields__:
        value = getattr(message, name)
        match value:
            case Tensor():
                tensors[name] = value.contiguous()
            case Feedback():
                tensors[f"{name}.gradient"] = value.gradient.contiguous()
                if value.outputs is not None:
                    tensors[f"{name}.outputs"] = value.outputs.contiguous()
                said[name] = value.loss
            case Plan():
                said[name] = value.to_dict()
            case dict():
                tensors |= {f"{name}/{key}": tensor.contiguous() for key, tensor in value.items()}
            case None if _FIELDS[name] is _optional:
                pass  # a tensor that is not there
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
        # copies, so that tensors lie in memory as torch lays them out, not as the file came in
        tensors = {name: tensor.clone() for name, tensor in load(raw).items()}
        return _build(_KINDS[said["kind"]], said, tensors)
    except ConfigurationError as err:
        raise FrameError(f"message: {str(err)[:200]}") from err
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as err:
        raise FrameError(f"message: {type(err).__name__}: {str(err)[:200]}") from err


def _build(
    kind: type[Request | Reply], said: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Request | Reply:
    """A message of that kind out of what was said; every field as its type has it.

    Raises: KeyError, TypeError or ConfigurationError.
    """
    expected = set(kind.__dataclass_fields__)
    unknown = sorted(said.keys() - expected - {"kind"})
    if unknown:
        raise TypeError(f"{kind.__name__} has no {', '.join(map(shown, unknown))}")
    fields = {name: _FIELDS[name](name, said, tensors) for name in expected}
    if kind in {OutputGradient, Update}:
        fields["loss"] = _number("loss", fields["loss"])
    return kind(**fields)


def _whole(name: str, said: Mapping[str, Any], _tensors: Mapping[str, Tensor]) -> int:
    value = said[name]
    if type(value) is not int or value < 0:
        raise TypeError(f"{name}: expected a whole number from 0 up, got {shown(value)}")
    return value


def _whole_or_none(name: str, said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int | None:
    return None if said[name] is None else _whole(name, said, tensors)


def _loss(name: str, said: Mapping[str, Any], _tensors: Mapping[str, Tensor]) -> float | None:
    return None if said[name] is None else _number(name, said[name])


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {shown(value)}")
    return float(value)


def _duration(name: str, said: Mapping[str, Any], _tensors: Mapping[str, Tensor]) -> float:
    return _number(name, said[name])


def _source(name: str, said: Mapping[str, Any], _tensors: Mapping[str, Tensor]) -> EnergySource:
    for known in get_args(EnergySource):
        if said[name] == known:
            source: EnergySource = known
            return source
    raise TypeError(f"{name}: expected a source of energy figures, got {shown(said[name])}")


def _counts(name: str, said: Mapping[str, Any], _tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    value = said[name]
    if not isinstance(value, list) or not all(type(count) is int and count >= 0 for count in value):
        raise TypeError(f"{name}: expected counts, got {shown(value)}")
    return tuple(value)


def _tensor(name: str, _said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    return tensors[name]


def _optional(name: str, _said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor | None:
    return tensors.get(name)


def _weights(name: str, _said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Weights:
    start = f"{name}/"
    return {key.removeprefix(start): t for key, t in tensors.items() if key.startswith(start)}


def _feedback(name: str, said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Feedback | None:
    if said[name] is None:
        return None
    loss = _number(name, said[name])
    return Feedback(tensors[f"{name}.gradient"], loss, tensors.get(f"{name}.outputs"))


def _plan(name: str, said: Mapping[str, Any], _tensors: Mapping[str, Tensor]) -> Plan:
    return Plan.from_dict(said[name])


_FIELDS: Final[Mapping[str, Callable[[str, Mapping[str, Any], Mapping[str, Tensor]], Any]]] = {
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
