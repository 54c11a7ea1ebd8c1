"""Samples of a client that make up the batches of a round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edge_sdk.errors import FrameError
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.streams import Stream

Rows = NDArray[np.int64]


class EndlessSampler:
    """An endless stream of row indices: one shuffle of all rows after another.

    Args:
        rows: how many there are, at least 1.
    """

    def __init__(self, generator: np.random.Generator, rows: int) -> None:
        self.generator = generator
        self._rows = rows
        self._left = np.empty(0, np.int64)

    def take(self, size: int) -> Rows:
        """The next `size` indices, (size,)."""
        while len(self._left) < size:
            self._left = np.concatenate([self._left, self.generator.permutation(self._rows)])
        taken, self._left = self._left[:size], self._left[size:]
        return taken


class RoundBatches:
    """The batches of one round: passes over all samples, or draws from an endless stream.

    Attributes:
        steps: how many batches the round has.
    """

    def __init__(self, client: str, samples: int, plan: Plan, number: int) -> None:
        generator = Stream.BATCHES.generator(plan.seed, round=number, client=client)
        self._client = client
        self._batch = plan.training.batch
        self._endless = EndlessSampler(generator, samples) if plan.training.iterations else None
        self._epochs: Sequence[Rows] = ()
        if self._endless is None:
            numbers = plan.training
            self._epochs = list(passes(generator, samples, numbers.batch, numbers.epochs))
        self.steps = plan.training.iterations or len(self._epochs)

    def rows(self, step: int, size: int | None) -> Rows:
        """Row indices of one batch; where the plan counts iterations, the next `size` of them.

        Raises: FrameError for a size where the plan counts epochs, or beyond the plan's batch.
        """
        if self._endless is not None:
            if size is not None and not 1 <= size <= self._batch:
                raise FrameError(
                    f"client {self._client}: a batch of {size}: expected 1 to {self._batch}"
                )
            return self._endless.take(self._batch if size is None else size)
        if size is not None:
            raise FrameError(
                f"client {self._client}: a batch of {size}: expected a plan with iterations"
            )
        return self._epochs[step]


def passes(generator: np.random.Generator, samples: int, batch: int, epochs: int) -> Iterator[Rows]:
    """Row indices of the batches of passes over all samples, each pass in an order of its own."""
    for _ in range(epochs):
        yield from _split(generator.permutation(samples), batch)


def _split(order: Rows, batch: int) -> list[Rows]:
    # a last batch of one sample joins the one before it: BatchNorm cannot train on it
    n = len(order)
    ends = [at for at in range(batch, n, batch) if n - at > 1 or batch == 1]
    return np.split(order, ends)
