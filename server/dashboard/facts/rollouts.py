"""Facts of the roll-outs page: the roll-outs as the API has them, and what a new one can be of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from server.registry.database import Registry
from server.rollouts.overview import NewestRollouts, RolloutState

SHOWN_MOST: Final = 20


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """The newest roll-outs first; the published versions, and the fleets.

    Attributes:
        more: number of older roll-outs, which are not shown.
    """

    rollouts: list[RolloutState]
    more: int
    versions: list[str]
    fleets: list[str]


def rollout_facts(registry: Registry, newest: NewestRollouts) -> RolloutFacts:
    """The facts of the newest roll-outs of a registry.

    Args:
        newest: of the same registry, kept from one call to the next.
    """
    states, more = newest.read(SHOWN_MOST)
    return RolloutFacts(
        rollouts=states,
        more=more,
        versions=[str(one) for one in registry.catalogue.versions()],
        fleets=[one.fleet for one in registry.catalogue.fleets()],
    )
