"""bf16: layers in training compute in it, and everything that leaves a view is float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from edge_sdk.nets import build
from edge_sdk.nets.precision import has_bf16
from edge_sdk.nets.supernet import Supernet, View


def net_in(precision: str) -> Supernet:
    net = build("cnn6", seed=0)
    net.precision = "bf16" if precision == "bf16" else "fp32"
    return net.train()


def seen_dtypes(part: View, x: Tensor) -> set[torch.dtype]:
    """Types of what the convolutions of a view give."""
    seen: set[torch.dtype] = set()
    for layer in part.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda _layer, _given, out: seen.add(out.dtype))
    part(x)
    return seen


def test_layers_of_every_view_compute_in_bf16_in_train_mode_only() -> None:
    x = torch.rand(4, 1, 28, 28)
    net = net_in("bf16")
    z = net.prefix(2)(x)
    views = {
        "prefix": (net.prefix(2), x),
        "suffix": (net.suffix(2), z),
        "neck": (net.suffix(2).neck, z),
        "part": (net.segment(0, None).part(1, 2), net.segment(0, None).part(0, 1)(x)),
    }

    for name, (view, given) in views.items():
        assert seen_dtypes(view, given) == {torch.bfloat16}, name
        assert view(given).dtype == torch.float32, name
    net.eval()
    assert seen_dtypes(net.prefix(2), x) == {torch.float32}


def test_gradients_in_bf16_are_float32_and_near_those_in_fp32() -> None:
    x = torch.rand(16, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    y = torch.arange(16) % 10
    found = []
    for precision in ("fp32", "bf16"):
        part = net_in(precision).segment(0, None)
        loss = nn.functional.cross_entropy(part(x), y)
        gradients = torch.autograd.grad(loss, list(part.parameters()))
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))

    plain, half = found
    # bf16 keeps 8 bits: three layers of it turn the gradient by a few per cent at most
    assert not torch.equal(plain, half)
    assert float(nn.functional.cosine_similarity(plain, half, dim=0)) > 0.99


def test_an_arm_processor_says_in_its_features_whether_it_has_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = tmp_path / "cpuinfo"
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("edge_sdk.nets.precision._CPU_FLAGS", flags)

    assert not has_bf16()
    flags.write_text("processor : 0\nFeatures\t: fp asimd\n")
    assert not has_bf16()
    flags.write_text("processor : 0\nFeatures\t: fp asimd bf16 i8mm\n")
    assert has_bf16()
