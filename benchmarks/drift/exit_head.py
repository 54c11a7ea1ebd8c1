"""A trained exit head: the uncertainties that a device with it reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.drift.streams import Pictures
from edge_sdk.gate.gate import uncertainties
from edge_sdk.nets import Supernet, build
from edge_sdk.training.data.dataset import Dataset

BACKBONE: Final = "tiny"
DEPTH: Final = 2
BATCH: Final = 64
AT_ONCE: Final = 1_000

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ExitHead:
    """A network with exits, in the state in which it would be exported."""

    net: Supernet

    @classmethod
    def trained(cls, data: Dataset, count: int, epochs: int) -> ExitHead:
        """Train on the first `count` pictures of a data set."""
        shape = data.x_train.shape[1:]
        net = build(BACKBONE, input_shape=shape, mean=data.mean, std=data.std, seed=0)
        optimiser = torch.optim.Adam(net.parameters(), 3e-3)
        random = np.random.default_rng(0)
        loss = torch.nn.functional.cross_entropy
        for _ in range(epochs):
            for rows in np.array_split(random.permutation(count), max(1, count // BATCH)):
                y = torch.from_numpy(data.y_train[rows])
                exits, final = net.forward_exits(torch.from_numpy(data.x_train[rows]))
                total = loss(final, y) + torch.stack([loss(one, y) for one in exits.values()]).sum()
                optimiser.zero_grad()
                total.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                optimiser.step()
        return cls(net.eval())

    def logits(self, x: Pictures) -> NDArray[np.float32]:
        """Answers of the exit head, (n, classes)."""
        found = []
        with torch.inference_mode():
            for start in range(0, len(x), AT_ONCE):
                piece = torch.from_numpy(np.ascontiguousarray(x[start : start + AT_ONCE]))
                found.append(self.net.exit_head(DEPTH)(self.net.prefix(DEPTH)(piece)).numpy())
        return np.concatenate(found)

    def uncertainties(self, x: Pictures) -> Floats:
        """Entropies of these answers, nats, (n,)."""
        return uncertainties("entropy", self.logits(x)).astype(np.float64)
