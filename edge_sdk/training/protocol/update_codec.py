"""Codecs of weight updates: what a client sends in place of its weights.

    fp32        the weights themselves
    fp16        the change since the round's start in half precision, each tensor scaled by a power
                of two so that its largest entry uses the range: half the bytes
    int8        the change in 256 steps, with a range for each tensor: a quarter
    top-k       the largest entries of the change and their places
    synthetic   a few samples whose gradient is the change (edge_sdk.training.protocol.synthetic)

Coded is the change of the tensors that were sent to the client: both ends know those. Tensors of
the client's own (an exit head that stays with it) and BatchNorm's running statistics travel as they
are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from edge_sdk.checks import check_value
from edge_sdk.errors import FrameError, InputError, NotFiniteError
from edge_sdk.training.protocol.synthetic import GradientProbe, Synthetic, reproduce, synthesise
from edge_sdk.training.protocol.weights import is_statistic
from edge_sdk.wire.codecs import decode, encode
from profiles.checks import number, one_of, whole

UpdateCodec = Literal["fp32", "fp16", "int8", "top-k", "synthetic"]
UPDATE_CODECS: Final = get_args(UpdateCodec)
Weights = dict[str, Tensor]
MakeProbe = Callable[[], GradientProbe]

# no parameter has a colon in its name
_SCALE, _RANGE = ":scale", ":range"
_PLACES, _VALUES = ":places", ":values"
_INPUTS, _TARGETS, _LENGTHS = ":inputs", ":targets", ":lengths"


@dataclass(frozen=True, slots=True)
class UpdateCoding:
    """A codec and its numbers.

    Attributes:
        codec: what is sent: see above.
        share: share of the entries that `top-k` keeps; it keeps at least one.
        samples, steps: numbers of `synthetic`: samples, and steps of the search for them.
    """

    codec: UpdateCodec = "fp32"
    share: float = 0.05
    samples: int = 2
    steps: int = 60

    def __post_init__(self) -> None:
        check_value("update_codec", self.codec, one_of(UPDATE_CODECS))
        check_value("update_share", self.share, number(above=0, most=1))
        check_value("update_samples", self.samples, whole(1))
        check_value("update_steps", self.steps, whole(1))

    @property
    def lossy(self) -> bool:
        """Whether what is decoded differs from what the client learnt."""
        return self.codec != "fp32"


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Measures of how much of an update a codec keeps.

    Attributes:
        error: |decoded - raw| / |raw change|; 0 where nothing changed.
        cosine: cosine of the two changes; 1 where both are zero.
        bytes, raw_bytes: size as sent, and size as fp32.
    """

    error: float
    cosine: float
    bytes: int
    raw_bytes: int


def encode_update(
    weights: Weights,
    sent: Weights,
    coding: UpdateCoding,
    probe: MakeProbe,
    search: np.random.Generator,
) -> Weights:
    """An update as it travels.

    Args:
        weights: after the round. sent: the weights that the client was sent for it.
        probe: makes the network at which `synthetic` takes gradients.
        search: where `synthetic` draws its first samples from.
    Raises: InputError if the change is not finite, or too large for int8 (1e36).
    """
    if coding.codec == "fp32":
        return weights
    names = _coded(weights, sent)
    change = {name: weights[name] - sent[name] for name in names}
    if not all(bool(torch.isfinite(tensor).all()) for tensor in change.values()):
        raise InputError(
            f"update: expected finite weights to code as {coding.codec}, got NaN or infinity;"
            " lower learning_rate"
        )
    rest = {name: tensor for name, tensor in weights.items() if name not in change}
    match coding.codec:
        case "fp16":
            return rest | _to_fp16(change)
        case "int8":
            return rest | _to_int8(change)
        case "top-k":
            return rest | _to_top_k(change, coding.share)
        case "synthetic":
            made = synthesise(change, probe(), coding.samples, coding.steps, search)
            return rest | {
                _INPUTS: made.inputs,
                _TARGETS: made.targets,
                _LENGTHS: made.lengths,
            }


def encode_diverged(
    weights: Weights, sent: Weights, coding: UpdateCoding, probe: MakeProbe
) -> Weights:
    """An update that tells only that training diverged: what it decodes to is NaN.

    It has the size of any other, and none of the client's numbers.

    Args:
        weights, sent, probe: as for `encode_update`.
    """
    nan = {
        name: torch.full_like(tensor, math.nan) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }
    if coding.codec == "fp32":
        return nan
    names = _coded(weights, sent)
    rest = {name: tensor for name, tensor in nan.items() if name not in names}
    return rest | _diverged_change({name: sent[name] for name in names}, coding, probe)


def _diverged_change(like: Weights, coding: UpdateCoding, probe: MakeProbe) -> Weights:
    """The coded change of no numbers: whole numbers are 0, and what they are scaled by is NaN."""

    def zeros(kind: torch.dtype) -> Weights:
        return {name: torch.zeros(tensor.shape, dtype=kind) for name, tensor in like.items()}

    match coding.codec:
        case "fp16":
            return zeros(torch.float16) | {name + _SCALE: _nan(1) for name in like}
        case "int8":
            numbers = {name + _RANGE: torch.tensor([math.nan, 0.0]) for name in like}
            return zeros(torch.uint8) | numbers
        case "top-k":
            kept = _kept(sum(tensor.numel() for tensor in like.values()), coding.share)
            return {_PLACES: torch.arange(kept, dtype=torch.int32), _VALUES: _nan(kept)}
        case _:
            network = probe()
            shapes = {_INPUTS: network.shape, _TARGETS: (network.classes,)}
            half = {
                name: torch.zeros((coding.samples, *shape), dtype=torch.float16)
                for name, shape in shapes.items()
            }
            return half | {_LENGTHS: _nan(len(network.names))}


def decode_update(coded: Weights, sent: Weights, coding: UpdateCoding, probe: MakeProbe) -> Weights:
    """The weights that an update stands for, by name; the coded ones come first.

    The caller checks names and shapes of the tensors that are not coded.

    Args:
        sent: the weights that the client was sent.
    Raises: FrameError for an update that `encode_update` does not give; NotFiniteError for some of
        those of `encode_diverged`, the others decode to NaN.
    """
    if coding.codec == "fp32":
        return coded
    names = _coded(sent, sent)
    match coding.codec:
        case "fp16":
            change = {name: _from_fp16(coded, name, sent[name]) for name in names}
            used = {*names, *(name + _SCALE for name in names)}
        case "int8":
            change = {name: _from_int8(coded, name, sent[name]) for name in names}
            used = {*names, *(name + _RANGE for name in names)}
        case "top-k":
            change = _from_top_k(coded, {name: sent[name] for name in names}, coding.share)
            used = {_PLACES, _VALUES}
        case "synthetic":
            change = _from_samples(coded, probe(), coding.samples)
            used = {_INPUTS, _TARGETS, _LENGTHS}
    rest = {name: tensor for name, tensor in coded.items() if name not in used}
    return {name: sent[name] + change[name] for name in names} | rest


def fidelity(raw: Weights, coded: Weights, decoded: Weights, sent: Weights) -> Fidelity:
    """Compare the decoded update with the raw one, over the tensors that are coded."""
    names = _coded(raw, sent)
    wanted = torch.cat([(raw[name] - sent[name]).flatten().double() for name in names])
    got = torch.cat([(decoded[name] - sent[name]).flatten().double() for name in names])
    size, length = float(wanted.norm()), float(got.norm())
    return Fidelity(
        error=float((got - wanted).norm()) / size if size else 0.0,
        cosine=float(wanted @ got) / (size * length) if size and length else float(size == length),
        bytes=sum(map(_size, coded.values())),
        raw_bytes=sum(map(_size, raw.values())),
    )


def _coded(weights: Weights, sent: Weights) -> list[str]:
    """Names of the tensors that are coded; sorted, because a transport may change their order."""
    return sorted(name for name in weights if name in sent and not is_statistic(name))


def _tensor(
    coded: Mapping[str, Tensor], name: str, shape: tuple[int, ...], kind: torch.dtype
) -> Tensor:
    tensor = coded.get(name)
    if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != kind:
        got = "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
        raise FrameError(f"update: {name}: expected {kind} {shape}, got {got}")
    return tensor


def _to_fp16(change: Weights) -> Weights:
    coded = {}
    for name, tensor in change.items():
        # the largest entry becomes 2^14 to 2^15, so changes by a small learning rate keep digits
        _, exponent = torch.frexp(tensor.abs().max())
        scale = torch.ldexp(torch.ones(()), exponent.cpu() - 15).reshape(1)
        coded[name] = (tensor / scale.to(tensor.device)).half()
        coded[name + _SCALE] = scale
    return coded


def _from_fp16(coded: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    values = _tensor(coded, name, tuple(like.shape), torch.float16)
    scale = _tensor(coded, name + _SCALE, (1,), torch.float32)
    return values.to(like.device, torch.float32) * scale.to(like.device)


def _to_int8(change: Weights) -> Weights:
    coded = {}
    for name, tensor in change.items():
        values, numbers = encode(tensor.contiguous().cpu().numpy(), "int8")
        coded[name] = torch.from_numpy(values)
        coded[name + _RANGE] = torch.tensor([numbers["scale"], numbers["zero_point"]])
    return coded


def _from_int8(coded: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    values = _tensor(coded, name, tuple(like.shape), torch.uint8)
    scale, zero = _tensor(coded, name + _RANGE, (2,), torch.float32).tolist()
    if math.isnan(scale):
        raise NotFiniteError(f"update: {name}: expected a finite scale, got NaN")
    if not 0 <= zero <= 255:  # NaN fails too: int() would raise
        raise FrameError(f"update: {name}: expected a zero point from 0 to 255, got {zero}")
    array = decode(values.cpu().numpy(), {"scale": scale, "zero_point": int(zero)})
    return torch.from_numpy(array).to(like.device)


def _to_top_k(change: Weights, share: float) -> Weights:
    flat = torch.cat([change[name].flatten() for name in sorted(change)])
    # stable, so that equal entries are kept from the left on every machine
    order = flat.abs().sort(descending=True, stable=True).indices
    places = order[: _kept(len(flat), share)].sort().values
    return {_PLACES: places.to(torch.int32), _VALUES: flat[places]}


def _from_top_k(coded: Mapping[str, Tensor], like: Weights, share: float) -> Weights:
    total = sum(tensor.numel() for tensor in like.values())
    count = _kept(total, share)
    places = _tensor(coded, _PLACES, (count,), torch.int32).long()
    values = _tensor(coded, _VALUES, (count,), torch.float32)
    if int(places[0]) < 0 or int(places[-1]) >= total or not bool((places.diff() > 0).all()):
        raise FrameError(f"update: expected {count} ascending places below {total}")
    first = next(iter(like.values()))
    flat = torch.zeros(total, device=first.device)
    flat[places.to(first.device)] = values.to(first.device)
    names = sorted(like)
    parts = torch.split(flat, [like[name].numel() for name in names])
    return {name: part.view_as(like[name]) for name, part in zip(names, parts, strict=True)}


def _kept(total: int, share: float) -> int:
    return max(1, round(share * total))


def _from_samples(coded: Mapping[str, Tensor], probe: GradientProbe, samples: int) -> Weights:
    made = Synthetic(
        _tensor(coded, _INPUTS, (samples, *probe.shape), torch.float16).to(probe.device),
        _tensor(coded, _TARGETS, (samples, probe.classes), torch.float16).to(probe.device),
        _tensor(coded, _LENGTHS, (len(probe.names),), torch.float32).to(probe.device),
    )
    return reproduce(made, probe)


def _nan(count: int) -> Tensor:
    return torch.full((count,), math.nan)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
