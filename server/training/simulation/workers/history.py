"""Work of a round that a worker was sent: what another in its place has to be sent again.

A worker keeps nothing from round to round, and a client's round depends on what it was sent alone.
So a worker that takes the place of a lost one comes to the same state, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from edge_sdk.training.protocol.messages import StartRound
from server.training.simulation.workers.work import Asked, Open, Train, Work

# how work is kept: itself, or a promise of it in a store
Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True)
class Sent(Generic[Kept]):
    """Work that was sent.

    Attributes:
        lasts: whether later work of the round needs it.
        due: whether its results have not come yet; opening a round has none.
    """

    kept: Kept
    lasts: bool
    due: bool


class History(Generic[Kept]):
    """Work that one worker was sent in its round."""

    def __init__(self) -> None:
        self._sent: list[Sent[Kept]] = []

    def add(self, work: Work, kept: Kept) -> None:
        """Add work.

        A round that is opened, and clients that start one, need nothing of what was before: all
        clients of a worker begin together.
        """
        opens = isinstance(work, Open)
        alone = isinstance(work, Train)  # whole in itself, from the round that is open
        if opens or (not isinstance(work, Open | Train) and _starts(work)):
            self._sent = []
        self._sent.append(Sent(kept, lasts=not alone, due=not opens))

    def came(self) -> None:
        """Note that the results of all work are there."""
        self._sent = [replace(each, due=False) for each in self._sent if each.lasts]

    def again(self) -> tuple[Sent[Kept], ...]:
        """All that a worker in the place of this one has to be sent, in that order."""
        return tuple(self._sent)


def _starts(asked: tuple[Asked, ...]) -> bool:
    return any(isinstance(each.request, StartRound) for each in asked)
