"""A backbone as stages, with an exit head after each depth at which it may be cut.

A part of it runs as a view: a module that holds the very same parameter tensors, so an optimiser
step on a view is a step on the super-network. A view names its parts `normalise`, `stage1` ..
`stageL` and `head`, wherever it starts and ends, so one stage has one name in every view.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets.layers import Norm
from edge_sdk.nets.precision import Precision, computing


class Normalise(nn.Module):
    """`(x - mean) / std` per channel, in float32: preprocessing as part of the model.

    Args:
        mean, std: one number per channel, or one for all channels, in the unit of the raw input
            (0..255 for uint8 images). mean 0 and std 1 only cast the input to float32.

    Input (B, C, ...) uint8 or float; output (B, C, ...) float32.
    Raises: ConfigurationError if the lengths differ or a std is not above 0.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std):
            raise ConfigurationError(
                f"normalise: expected as many std as mean ({len(mean)}), got {len(std)}"
            )
        if not all(value > 0 for value in std):
            raise ConfigurationError(
                f"normalise: expected every std above 0, got {list(std)}; "
                "leave out channels that never change"
            )
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32))

    @property
    def changes(self) -> bool:
        """Whether it changes values, and does more than a cast."""
        return bool((self.mean != 0).any() or (self.std != 1).any())

    def forward(self, x: Tensor) -> Tensor:
        """Raw input (B, C, ...) to (x - mean) / std of each channel, float32."""
        per_channel = (-1, *[1] * (x.ndim - 2))
        return (x.to(torch.float32) - self.mean.view(per_channel)) / self.std.view(per_channel)


class View(nn.Sequential):
    """A row of modules of a super-network, shared and not copied.

    A new nn.Sequential is in train mode, while its modules may be in eval mode. The mode of a view
    is therefore the mode of its parts; `train()` and `eval()` on a view set the shared parts.

    Args:
        precision: of its layers in train mode; what comes out is float32 all the same.
    """

    def __init__(self, parts: OrderedDict[str, nn.Module], precision: Precision = "fp32") -> None:
        super().__init__(parts)
        self.precision = precision

    def forward(self, x: Tensor) -> Tensor:
        """Through all parts, in order."""
        if self.precision == "fp32" or not self.training:
            return self._through(x)
        with computing(self.precision, x.device):
            return self._through(x).float()

    def _through(self, x: Tensor) -> Tensor:
        for part in self:
            x = part(x)
        return x

    @property
    def training(self) -> bool:
        """Whether the network that this is a view of is in train mode."""
        return next(self.children()).training

    @training.setter
    def training(self, mode: bool) -> None:
        """Ignore the value: nn.Module also sets the flag of each part, and only those count."""

    @property
    def classifier(self) -> nn.Linear:
        """The last layer of a view with the final head: embeddings to logits."""
        last = list(self[-1].children())[-1]
        assert isinstance(last, nn.Linear), "a head ends in a linear layer"
        return last

    @property
    def classifier_prefix(self) -> str:
        """Start of the names of the last layer's tensors in this view: `head.3.`."""
        part, head = list(self.named_children())[-1]
        return f"{part}.{list(head.named_children())[-1][0]}."

    @property
    def neck(self) -> View:
        """The same view without its classifier: it returns embeddings."""
        parts = OrderedDict(self.named_children())
        *body, _classifier = self[-1].named_children()
        parts["head"] = nn.Sequential(OrderedDict(body))
        return View(parts, self.precision)

    def part(self, a: int, b: int | None) -> View:
        """Stages a+1..b of this view: with `normalise` if `a` is 0, with the head if `b` is None.

        Args:
            a, b: any numbers of stages; only Supernet.segment needs cuts.
        """
        ends = {"normalise": a == 0, "head": b is None}

        def belongs(name: str) -> bool:
            if name in ends:
                return ends[name]
            stage = int(name.removeprefix("stage"))
            return a < stage and (b is None or stage <= b)

        kept = ((name, part) for name, part in self.named_children() if belongs(name))
        return View(OrderedDict(kept), self.precision)


class Supernet(nn.Module):
    """A backbone of L stages that may be cut after some of them.

    Args:
        name: of the backbone.
        input_shape: of one raw sample, without the batch axis, channels first.
        stages: L modules; the output of stage i - 1 is the input of stage i.
        exits: the exit head of each depth where a cut is allowed. A head is an nn.Sequential; its
            last module is the nn.Linear that returns the logits.
        head: the final head, of the same form, on the last stage's output.
        classes: N, the number of logits.
        normalise: the normalisation of raw inputs; only a cast to float32 by default.

    Attributes:
        own_names: by name of a tensor in the user's own module, its name here; empty for a backbone
            that was not made of a user's module.
        precision: of its views in train mode; the network itself computes in fp32.

    Raises: ConfigurationError if no exit is given, or if one lies outside 1..L.
    """

    def __init__(
        self,
        *,
        name: str,
        input_shape: tuple[int, ...],
        stages: Sequence[nn.Module],
        exits: Mapping[int, nn.Module],
        head: nn.Module,
        classes: int,
        normalise: Normalise | None = None,
    ) -> None:
        super().__init__()
        if not exits or not all(1 <= depth <= len(stages) for depth in exits):
            raise ConfigurationError(
                f"{name} with input {input_shape}: expected exit heads at some of the depths "
                f"1..{len(stages)}, got {sorted(exits)}; try another input shape"
            )
        channels = input_shape[0]
        self.name = name
        self.input_shape = tuple(input_shape)
        self.classes = classes
        self.normalise = normalise or Normalise([0.0] * channels, [1.0] * channels)
        self.stages = nn.ModuleList(stages)
        self.exits = nn.ModuleDict({str(depth): exits[depth] for depth in sorted(exits)})
        self.head = head
        self.own_names: dict[str, str] = {}
        self.precision: Precision = "fp32"

    @property
    def L(self) -> int:  # noqa: N802 - the papers' name, everywhere
        """The number of stages."""
        return len(self.stages)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The depths at which a cut is allowed, ascending; each has an exit head."""
        return tuple(int(depth) for depth in self.exits)

    def prefix(self, d: int) -> View:
        """The part that a device of depth `d` runs: raw input (B, *input_shape) to smashed data.

        Raises: ConfigurationError if `d` is no allowed cut.
        """
        return self.segment(0, self._cut(d))

    def suffix(self, d: int) -> View:
        """The part that the server runs after a cut at `d`: smashed data to logits (B, N).

        Raises: ConfigurationError if `d` is no allowed cut.
        """
        return self.segment(self._cut(d), None)

    def segment(self, a: int, b: int | None) -> View:
        """Stages a+1..b: with `normalise` in front if `a` is 0, the head behind if `b` is None.

        Raises: ConfigurationError unless `a` is 0 or a cut and `b` None or a deeper cut.
        """
        start = a if a == 0 else self._cut(a)
        stop = self.L if b is None else self._cut(b)
        if b is not None and b <= a:
            raise ConfigurationError(
                f"{self.name}: expected a segment to end deeper than it starts, got {a} to {b}"
            )
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        if a == 0:
            parts["normalise"] = self.normalise
        for depth in range(start + 1, stop + 1):
            parts[f"stage{depth}"] = self.stages[depth - 1]
        if b is None:
            parts["head"] = self.head
        return View(parts, self.precision)

    def exit_head(self, d: int) -> nn.Module:
        """The exit head after stage `d`: smashed data to logits (B, N).

        Raises: ConfigurationError if `d` is no allowed cut.
        """
        return self.exits[str(self._cut(d))]

    def shape_at(self, d: int) -> tuple[int, ...]:
        """The shape of one sample's smashed data after a cut at `d`: a sample of zeros is run.

        It runs on the CPU: the first convolution on the device "meta" imports torch's compiler,
        1.2 s and 72 MB.

        Raises: ConfigurationError if `d` is no allowed cut.
        """
        prefix = deepcopy(self.prefix(d)).eval()  # a copy, so that no statistics change
        device = next(prefix.buffers()).device
        if device.type != "meta":  # a network that has no weights can only stay there
            device = torch.device("cpu")
        with torch.no_grad():
            z: Tensor = prefix.to(device)(torch.zeros(1, *self.input_shape, device=device))
        return tuple(z.shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, N) of the whole backbone for raw inputs (B, *input_shape)."""
        z: Tensor = self.normalise(x)
        for stage in self.stages:
            z = stage(z)
        logits: Tensor = self.head(z)
        return logits

    def forward_exits(self, x: Tensor) -> tuple[dict[int, Tensor], Tensor]:
        """Logits of every exit by depth, and the final logits, each (B, N), in one pass."""
        z: Tensor = self.normalise(x)
        logits: dict[int, Tensor] = {}
        for depth, stage in enumerate(self.stages, start=1):
            z = stage(z)
            if str(depth) in self.exits:
                logits[depth] = self.exits[str(depth)](z)
        return logits, self.head(z)

    def _cut(self, d: int) -> int:
        if d not in self.cuts:
            allowed = ", ".join(map(str, self.cuts))
            raise ConfigurationError(
                f"{self.name}: expected a depth where a cut is allowed, one of {allowed}; got {d}"
            )
        return d


@dataclass(frozen=True, slots=True)
class NetSpec:
    """The arguments of every backbone's builder.

    Attributes:
        input_shape, classes, normalise: as in Supernet.
        norm: the normalisation layers between convolutions, for backbones that have them.
    """

    input_shape: tuple[int, ...]
    classes: int
    normalise: Normalise | None = None
    norm: Norm = "batch"

    def supernet(
        self,
        name: str,
        *,
        stages: Sequence[nn.Module],
        exits: Mapping[int, nn.Module],
        head: nn.Module,
    ) -> Supernet:
        """A super-network of these parts, with the input, classes and normalisation of the spec."""
        return Supernet(
            name=name,
            input_shape=self.input_shape,
            stages=stages,
            exits=exits,
            head=head,
            classes=self.classes,
            normalise=self.normalise,
        )
