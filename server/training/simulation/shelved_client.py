"""A simulated client whose personal weights lie on the disk between two looks at them.

In a simulation of 10,000 clients most are at rest. Exit heads of `cnn6` alone would take 115 MB.
"""

from __future__ import annotations

from typing import Any

from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.messages import Weights
from server.training.core.spool import Spool, SpooledWeights


class ShelvedClient(TrainingClient):
    """A TrainingClient that reads its personal weights from a file, and writes them there.

    Args:
        shelf: the file that all clients share. others: as TrainingClient takes them.
    """

    def __init__(self, shelf: Spool, *others: Any, **named: Any) -> None:
        self._shelf = shelf
        # the client's place in the file, which it keeps while it has no weights
        self._place: SpooledWeights | None = None
        self._empty = True
        super().__init__(*others, **named)

    @property
    def personal(self) -> Weights:
        """The weights, in memory; a change counts once they are set again."""
        return {} if self._empty or self._place is None else dict(self._place)

    @personal.setter
    def personal(self, weights: Weights) -> None:
        """Write the weights to the disk.

        Raises: StorageError.
        """
        self._empty = not weights
        if self._empty:
            return
        if self._place is None:
            self._place = self._shelf.put(weights)
        else:
            self._place = self._shelf.replace(self._place, weights)
