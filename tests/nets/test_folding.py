"""BatchNorm folded into convolutions, and layers that cannot be traced for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from edge_sdk.nets.folding import fold_norms


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Threads take turns after a microsecond, so that what can meet does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


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
    assert folded[0] is not net[0]


@pytest.mark.parametrize("beside", ["fold", "run"])
def test_folding_leaves_the_modules_of_other_threads_alone(
    beside: str, many_switches: None
) -> None:
    net = nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))).eval()
    other = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x, expected = torch.ones(1, 3), other(torch.ones(1, 3))
    faults: list[Exception] = []

    def fold() -> None:
        assert not any(isinstance(part, nn.BatchNorm2d) for part in fold_norms(net).modules())

    def run() -> None:
        assert torch.equal(other(x), expected)

    def often(call: Callable[[], None]) -> None:
        try:
            for _ in range(60):
                call()
        except Exception as err:  # noqa: BLE001 - a thread's, asserted below
            faults.append(err)

    threads = [threading.Thread(target=often, args=(call,)) for call in (fold, run)]
    if beside == "fold":
        threads.append(threading.Thread(target=often, args=(fold,)))
    calls = nn.Module.__call__, nn.Module.__getattr__
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults
    assert (nn.Module.__call__, nn.Module.__getattr__) == calls
