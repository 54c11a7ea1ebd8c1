"""BatchNorm folded into convolutions, and layers that cannot be traced for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from edge_sdk.nets.folding import fold_norms


class Counted(nn.Module):
    """A user's layer that asks its input for a number, which a traced input does not have."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, 1, H, W) to (B, 2, H - 2, W - 2)."""
        z: Tensor = self.norm(self.conv(x))
        if self.how == "len":
            return z.reshape(len(z), *z.shape[1:])
        if self.how == "if":
            return z if x.sum() > 0 else -z
        return torch.stack([z[:, channel] for channel in range(z.shape[1])], 1)


@pytest.mark.parametrize("how", ["len", "if", "range"])
def test_a_layer_that_cannot_be_traced_stays_as_it_is(how: str) -> None:
    net = nn.Sequential(Counted(how), nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))).eval()
    x = torch.rand(2, 1, 5, 5)
    folded = fold_norms(net)
    kinds = [type(part) for part in folded.modules()]
    assert kinds.count(nn.BatchNorm2d) == 1  # the other one is folded
    torch.testing.assert_close(folded(x), net(x))
