"""Numbers of a network in training: fp32, or bf16 where torch's autocast allows it.

With bf16, convolutions and linear layers of a network's stages multiply bfloat16 numbers. Weights,
gradients of weights, features at a cut, logits, losses and optimiser steps stay float32.
"""

from __future__ import annotations

import platform
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final, Literal, get_args

import torch

Precision = Literal["fp32", "bf16"]
PRECISIONS: Final = get_args(Precision)

_CPU_FLAGS: Final = Path("/proc/cpuinfo")


def computing(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """A context in which layers compute in that precision."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def has_bf16(device: torch.device | str = "cpu") -> bool:
    """Whether the device has instructions for bf16; without them it is slower than fp32."""
    if torch.device(device).type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if platform.machine() in {"aarch64", "arm64"}:
        return "bf16" in _cpu_flags()
    asked = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", _AMX))
    return any(ask is not None and bool(ask()) for ask in asked)


_AMX: Final = "_is_amx_tile_supported"


def _cpu_flags() -> frozenset[str]:
    """The features that Linux names for the first core; none on other systems."""
    try:
        lines = _CPU_FLAGS.read_text().splitlines()
    except OSError:
        return frozenset()
    named = (line.partition(":")[2].split() for line in lines if line.startswith("Features"))
    return frozenset(next(named, []))
