"""A bottleneck at a cut: few channels cross the wire, and the server widens them again.

    encoder   z (C, ...) to b (c, ...)   on the device, run only when it offloads
    decoder   b (c, ...) to z (C, ...)   on the server, in front of the segment of that depth

Both are one layer from channels to channels: a 1x1 convolution, or a linear layer for tokens and
vectors. The decoder ends in a ReLU where z is never negative. They start as the principal
components of z's channels, the pair of least squared error. Then they learn by distillation,
without labels: soft cross-entropy of the server's answer with the bottleneck against its answer
without.
While they learn, b is rounded to the 15 steps of int4 (straight-through: Bengio et al. 2013).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edge_sdk.manifest import Codec, DecoderSpec, GraphSpec, TensorSpec
from edge_sdk.session import Session
from exporters.errors import ExportError, ParityError
from exporters.graphs import write_module
from exporters.measure import one_torch_thread
from exporters.parity import CHANGED_AT_MOST, SMALLEST, CodecTrial, choose_codec, run_torch

Array = NDArray[Any]
Floats = NDArray[np.float32]
Answer = Callable[[Tensor], Tensor]

# widths that `auto` tries, as shares of the channels
SHARES: Final = (2, 4, 8)
STEPS_OF_INT4: Final = 15
TOLERANCE: Final = 1e-4
LEARNT_MOST: Final = 10_000
# More steps learn the samples by heart: with half of cnn6's channels and 6,000 samples, 1,000 keep
# 98.9 and 99.0 % of the labels of 3,000 others (depths 2 and 3), 300 keep 99.5 and 98.8 %.
STEPS: Final = 300
BATCH: Final = 128
_RATE: Final = 3e-3
_POSITIONS_MOST: Final = 200_000


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The two halves of a bottleneck, in eval mode.

    Attributes:
        shape: of one b.
    """

    encoder: nn.Module
    decoder: nn.Module
    shape: tuple[int, ...]


def widths_of(channels: int) -> tuple[int, ...]:
    """The numbers of channels that `auto` tries, the widest first."""
    return tuple(dict.fromkeys(channels // share for share in SHARES if channels >= share))


def channel_axis(shape: Sequence[int], input_shape: Sequence[int]) -> int:
    """The axis of z's channels behind the batch: the first of maps, the last of tokens."""
    return 1 if len(shape) == len(input_shape) else len(shape)


def train_bottleneck(
    z: Floats,
    axis: int,
    channels: int,
    suffix: Answer | None,
    *,
    seed: int = 0,
    steps: int = STEPS,
) -> Bottleneck:
    """A bottleneck that keeps the server's answers.

    Args:
        z: (n, ...) of samples without labels, which choose nothing afterwards.
        axis: of the channels in z. channels: c, below their number.
        suffix: z (B, ...) to logits (B, N), differentiable; None leaves the principal components.
        steps: of distillation, each on 128 samples.
    """
    given = torch.from_numpy(z)
    pair = _principal(given, axis, channels)
    if suffix is not None:
        with one_torch_thread():
            _distil(pair, given, suffix, seed, steps)
    encoder, decoder = (half.eval().requires_grad_(False) for half in (pair.encoder, pair.decoder))
    shape = list(z.shape[1:])
    shape[axis - 1] = channels
    return Bottleneck(encoder, decoder, tuple(shape))


def fit_bottleneck(
    z: Floats,
    axis: int,
    suffix: Answer,
    held_out: tuple[Floats, NDArray[np.integer[Any]]],
    *,
    wanted: int | Literal["auto"],
    depth: int,
    progress: Callable[[str], None] = lambda _: None,
    learns: bool = True,
    steps: int = STEPS,
) -> tuple[Bottleneck, float] | None:
    """The bottleneck of a depth as `find_bottleneck` returns it, told line by line.

    Args:
        progress: called with lines that begin with the depth. The others: as `find_bottleneck`.
    Raises: ExportError for a number of channels that z does not have.
    """
    if wanted != "auto" and not 1 <= wanted < z.shape[axis]:
        raise ExportError(
            f"--bottleneck: expected 1 to {z.shape[axis] - 1} channels at depth {depth}, got"
            f" {wanted}"
        )

    def say(line: str) -> None:
        progress(f"d{depth}: {line}")

    if learns:
        say(f"learning a bottleneck from {len(z)} samples without labels")
    found = find_bottleneck(
        z, axis, suffix, held_out, wanted=wanted, progress=say, learns=learns, steps=steps
    )
    if found is None:
        say("no bottleneck has fewer bytes and keeps the answers; none is used")
    return found


def find_bottleneck(
    z: Floats,
    axis: int,
    suffix: Answer,
    held_out: tuple[Floats, NDArray[np.integer[Any]]],
    *,
    wanted: int | Literal["auto"],
    progress: Callable[[str], None] = lambda _: None,
    seed: int = 0,
    learns: bool = True,
    steps: int = STEPS,
) -> tuple[Bottleneck, float] | None:
    """The bottleneck that is asked for, and the share of the final labels that it may change.

    Args:
        z: (n, ...) of samples to learn from. axis: of the channels in z.
        suffix: z (B, ...) to logits (B, N).
        held_out: z (m, ...) and final labels (m,) of samples that choose the width.
        wanted: the number of channels; `auto` takes the width with which an offload has the fewest
            bytes and at most 0.5 % of the labels change.
        learns: False leaves the principal components: `suffix` has no gradient.
        steps: of each distillation.
    Returns: None where `auto` finds no width with fewer bytes than z itself in its best codec.
    """
    z_held, labels = held_out

    def made(channels: int) -> Bottleneck:
        return train_bottleneck(
            z, axis, channels, suffix if learns else None, seed=seed, steps=steps
        )

    if wanted != "auto":
        one = made(wanted)
        b, answer = _narrowed(one, z_held), _answer(one, suffix)
        lost = float((answer(b).argmax(axis=1) != labels).mean())
        progress(f"bottleneck of {wanted} channels: {1 - lost:.1%} of the final labels are kept")
        return one, lost + CHANGED_AT_MOST
    best: Bottleneck | None = None
    least = _fewest(choose_codec(z_held, _answer(None, suffix), labels, SMALLEST))
    for channels in widths_of(z.shape[axis]):
        one = made(channels)
        trials = choose_codec(_narrowed(one, z_held), _answer(one, suffix), labels, SMALLEST)
        fewest = _fewest(trials)
        kept = trials[1][-1]
        progress(
            f"bottleneck of {channels} channels: {kept.mean_bytes:.0f} bytes as {kept.codec},"
            f" {1 - kept.changes / len(labels):.1%} of the final labels are kept"
        )
        if fewest < least:
            best, least = one, fewest
        elif fewest == math.inf:  # a narrower one keeps fewer
            break
    return None if best is None else (best, CHANGED_AT_MOST)


def _fewest(chosen: tuple[Codec, list[CodecTrial]]) -> float:
    """Bytes with the codec that keeps the labels; infinity where none does."""
    codec, tried = chosen
    last = tried[-1]
    return last.mean_bytes if last.codec == codec and last.kept else math.inf


def _narrowed(bottleneck: Bottleneck, z: Floats) -> Floats:
    return run_torch(bottleneck.encoder, z)[0]


def _answer(bottleneck: Bottleneck | None, suffix: Answer) -> Callable[[Array], Floats]:
    """Logits of what was sent: z, or b."""

    def answer(sent: Array) -> Floats:
        z = sent if bottleneck is None else run_torch(bottleneck.decoder, sent)[0]
        with torch.no_grad():
            parts = [suffix(part) for part in torch.split(torch.from_numpy(z), BATCH)]
        logits: Floats = torch.cat(parts).numpy()
        return logits

    return answer


def write_encoder(bottleneck: Bottleneck, z_shape: tuple[int, ...], folder: Path) -> GraphSpec:
    """Write `bottleneck.onnx`, with a batch of 1, and return its entry in the manifest."""
    given = TensorSpec("float32", z_shape)
    write_module(bottleneck.encoder, ("z", given), "b", folder / "bottleneck.onnx", dynamic=False)
    outputs = {"b": TensorSpec("float32", bottleneck.shape)}
    return GraphSpec("bottleneck.onnx", "fp32", {"z": given}, outputs)


def write_decoder(
    bottleneck: Bottleneck, depth: int, z: Floats, folder: Path
) -> tuple[DecoderSpec, float]:
    """Write the decoder of a depth among the server's segments, and compare it with torch.

    Args:
        z: (n, ...) held-out samples.
    Returns: its entry in the manifest, and the largest difference of a value, as a share of the
        largest value.
    Raises: ParityError.
    """
    path = folder / f"bottleneck-{depth}.onnx"
    narrow = TensorSpec("float32", bottleneck.shape)
    write_module(bottleneck.decoder, (f"b{depth}", narrow), f"z{depth}", path, dynamic=True)
    with torch.inference_mode():
        b = bottleneck.encoder(torch.from_numpy(z))
        expected = bottleneck.decoder(b).numpy()
    (got,) = Session(path).run(None, {f"b{depth}": b.numpy()})
    peak = max(1.0, float(np.abs(expected).max()))
    error = float(np.abs(expected - got).max()) / peak
    if not error <= TOLERANCE:  # NaN does not pass
        raise ParityError(
            f"{path.name}: expected values within {TOLERANCE:g} of torch's, as a share of the"
            f" largest, on {len(z)} samples, got {error:.3g}; the export changed the function"
        )
    return DecoderSpec(path.name, depth, narrow), error


class _Pair(nn.Module):
    """Encoder and decoder while they learn."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def forward(self, z: Tensor) -> Tensor:
        widened: Tensor = self.decoder(_rounded(self.encoder(z)))
        return widened


def _principal(z: Tensor, axis: int, channels: int) -> _Pair:
    """The pair of least squared error, by the covariance of z's channels."""
    rows = z.movedim(axis, -1).reshape(-1, z.shape[axis])
    rows = rows[:: max(1, len(rows) // _POSITIONS_MOST)].double()
    mean = rows.mean(dim=0)
    covariance = torch.cov(rows.T).reshape(len(mean), len(mean))
    _, vectors = torch.linalg.eigh(covariance)  # ascending
    basis = vectors[:, -channels:].flip(1).float()  # (C, c)
    encoder = _layer(z, axis, basis.T, -basis.T @ mean.float())
    decoder = _layer(z, axis, basis, mean.float())
    if bool((z >= 0).all()):
        decoder = nn.Sequential(decoder, nn.ReLU())
    return _Pair(encoder, decoder)


def _layer(z: Tensor, axis: int, weight: Tensor, bias: Tensor) -> nn.Module:
    """A layer from channels to channels, (out, in)."""
    wide, narrow = weight.shape[1], weight.shape[0]
    made: nn.Module
    if axis == z.ndim - 1:
        made = nn.Linear(wide, narrow)
    else:
        made = nn.Conv1d(wide, narrow, 1) if z.ndim == 3 else nn.Conv2d(wide, narrow, 1)
    state = {"weight": weight.reshape(made.state_dict()["weight"].shape), "bias": bias}
    made.load_state_dict(state)
    return made


def _distil(pair: _Pair, z: Tensor, suffix: Answer, seed: int, steps: int) -> None:
    with torch.no_grad():
        parts = [torch.softmax(suffix(part), dim=1) for part in torch.split(z, BATCH)]
    teacher = torch.cat(parts)
    learnt = list(pair.parameters())
    optimiser = torch.optim.Adam(learnt, _RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, _RATE, total_steps=steps)
    batches = _batches(len(z), seed)
    for _ in range(steps):
        rows = next(batches)
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(suffix(pair(z[rows])), teacher[rows])
        loss.backward(inputs=learnt)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimiser.step()
        schedule.step()


def _batches(count: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.split(torch.randperm(count, generator=generator), BATCH)


def _rounded(b: Tensor) -> Tensor:
    """b as int4 by one scale gives it back; the gradient passes unchanged."""
    flat = b.detach().flatten(1)
    reach = flat.amax(1).clamp(min=0) - flat.amin(1).clamp(max=0)
    scale = (reach / STEPS_OF_INT4).clamp(min=1e-12).reshape(-1, *(1 for _ in b.shape[1:]))
    return b + ((b / scale).round() * scale - b).detach()
