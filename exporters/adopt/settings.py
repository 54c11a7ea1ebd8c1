"""Settings of an adoption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from edge_sdk.gate_form import read_gate
from edge_sdk.manifest import GatePolicy
from exporters.errors import ExportError
from exporters.offloads.settings import Narrow

# A threshold for an agreement of 98 % is good to 0.3 points on 2,400 samples, to 0.4 on 1,200; the
# heads hardly gain from those. A run of training holds out a tenth.
HELD_OUT_SHARE: Final = 0.2


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one adoption.

    Attributes:
        depths: the cuts to publish; None offers a handful by cost.
        agreement: how often exits shall answer as the whole model does, in (0, 1].
        gate: what exits are judged by, as text (edge_sdk.gate_form); scales that it leaves open are
            fitted on the samples that choose the threshold.
        codec: of offloads, as `exporters.parity.choose_codec` takes it.
        bottleneck: a number of channels, or `auto`, puts a bottleneck at each cut; `codec` auto is
            then the smallest that keeps its answers.
        threads: of onnxruntime while features are computed.
    """

    name: str
    version: int
    out: Path
    class_names: tuple[str, ...]
    depths: Sequence[int] | None = None
    agreement: float = 0.98
    gate: GatePolicy = "entropy"
    int8: Literal["auto", "never"] = "auto"
    codec: str = "auto"
    bottleneck: Narrow = "never"
    seed: int = 0
    threads: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.agreement <= 1:
            raise ExportError(f"--agreement: expected above 0 to 1, got {self.agreement:g}")
        read_gate(self.gate, "--gate")
