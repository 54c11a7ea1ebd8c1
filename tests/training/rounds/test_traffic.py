"""Bytes counted by kind, worked out by hand."""

from __future__ import annotations

import pytest

from edge_sdk.manifest import Codec
from server.training.methods.fedavg import fedavg
from server.training.methods.splitfed import (
    splitfed_v2,
)
from tests.training.worlds import (
    World,
)


@pytest.mark.parametrize(
    ("codec", "size", "extra"), [("fp32", 4, 0), ("fp16", 2, 0), ("int8", 1, 8)]
)
def test_bytes_are_counted_by_kind_by_hand(codec: Codec, size: int, extra: int) -> None:
    # a: 9 samples at depth 1, 8 channels of 8x8; its prefix has 80 weights (8 * 3*3 + 8)
    # b: 4 samples at depth 3, 32 channels of 4x4; its prefix has 5,888 (docs/methods/common.md)
    [result] = World(splitfed_v2(), "ab", codec=codec).run(1)
    elements = 9 * 8 * 8 * 8 + 4 * 32 * 4 * 4
    assert result.bytes_by_kind == {
        "down weights": 4 * (80 + 5888),
        "up features": size * elements + extra * 13,
        "up labels": 8 * 13,
        "down gradients": 4 * elements,
        "up weights": 4 * (80 + 5888),
    }
    assert result.bytes_down == 4 * (80 + 5888) + 4 * elements
    assert result.bytes_up == size * elements + extra * 13 + 8 * 13 + 4 * (80 + 5888)


def test_fedavg_sends_weights_and_nothing_else() -> None:
    [result] = World(fedavg(), "ab").run(1)
    parameters = sum(t.numel() for n, t in World(fedavg(), "a").before.items() if "exit" not in n)
    assert result.bytes_by_kind == {
        "down weights": 2 * 4 * parameters,
        "up weights": 2 * 4 * parameters,
    }
