"""A network in deployment: the stages that devices run, and those that the server runs."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Self

from torch import nn

from edge_sdk.nets import Supernet, View
from edge_sdk.nets.memory_format import set_format


@dataclass(frozen=True, slots=True)
class Composition:
    """The two halves of a network, which may have been trained apart (HARMONY's).

    A device of depth d answers together with the server by stages 1..d of `device` and by stages
    d+1..L and the head of `server`. So one chain of segments serves devices of every depth: a
    segment behind a cut is always the server's own.

    Attributes:
        device: the network whose prefixes devices run.
        server: the network whose stages the server runs; often the same one.
    """

    device: Supernet
    server: Supernet

    @classmethod
    def of(cls, net: Supernet) -> Self:
        """A network that devices and server trained as one."""
        return cls(net, net)

    def frozen(self) -> Self:
        """A copy in eval mode, on the CPU, with contiguous weights as in files."""
        device = _plain(self.device)
        return type(self)(device, device if self.server is self.device else _plain(self.server))

    def whole(self, depth: int) -> nn.Module:
        """The network as a device of that depth and the server run it: (B, ...) to logits."""
        return nn.Sequential(self.device.prefix(depth), self.server.suffix(depth))

    def segment(self, start: int, end: int | None, *, features: bool = False) -> View:
        """The server's stages start+1..end; from 0, the device's, for raw inputs.

        Args:
            features: end in front of the last layer, which is on the device.
        """
        part = self.device.segment(0, end) if start == 0 else self.server.segment(start, end)
        return part.neck if features and end is None else part


def _plain(net: Supernet) -> Supernet:
    copy = deepcopy(net).cpu().eval()
    set_format(copy, "contiguous")
    return copy
