"""Records of roll-outs: frozen values, never database rows. Times are UTC seconds since 1970."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from server.registry.records import FleetModel
from server.registry.selection.selection import Selection
from server.registry.selection.standing import counts_in

State = Literal["running", "paused", "done", "failed", "aborted", "superseded"]

# states in which a roll-out moves devices, or may again
LIVE: Final[tuple[State, ...]] = ("running", "paused")
# states in which its devices go back to what they ran
BACK: Final[tuple[State, ...]] = ("failed", "aborted")


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Order of an operator for a roll-out.

    Attributes:
        selection: the devices that may get the version.
        shares: of those devices, ascending; the last one is 1.
        health: conditions on the devices of a share, as `server.rollouts.health` reads them.
        wait_s: how long each share is watched, from the time when its devices run the version.
        answers_min: answers of a share before its health is judged.
        failures_max: devices that may refuse the version, or leave it, before all go back.
    """

    model: str
    version: int
    selection: Selection = Selection()  # noqa: RUF009 - frozen
    shares: tuple[float, ...] = (0.1, 0.5, 1.0)
    health: str = ""
    wait_s: float = 600.0
    answers_min: int = 200
    failures_max: int = 0

    def __str__(self) -> str:
        return f"{self.model}/{self.version}"


@dataclass(frozen=True, slots=True)
class Rollout:
    """A roll-out as it stands.

    Attributes:
        base: version that its fleets should run without it. Once the operator gives a fleet another
            one, the roll-out does not count there any more.
        stage: index of the present share.
        stage_at: begin of that share. watched_at: the time from which its devices have run the
            version; None before.
        standing: whether it is done, and its devices stay at the version although their fleets do
            not: it was for a tag or one device.
        reason: of the end, or of the present state.
        who: started it.
        revision: grows with every change.
    """

    id: int
    plan: RolloutPlan
    base: int
    state: State
    stage: int
    started_at: float
    stage_at: float
    who: str
    watched_at: float | None = None
    ended_at: float | None = None
    standing: bool = False
    reason: str = ""
    revision: int = 0

    @property
    def live(self) -> bool:
        """Whether it moves devices, or may again."""
        return self.state in LIVE

    @property
    def share(self) -> float:
        """Present share of the devices."""
        return self.plan.shares[self.stage]

    def counts_for(self, fleet: FleetModel) -> bool:
        """Whether it is the newest order for a fleet: the fleet should still run `base`.

        A fleet that is pinned to a version is moved only by a roll-out of that very fleet.
        """
        own = self.plan.selection.fleet is not None
        return counts_in(fleet, (self.plan.model, self.base), own=own)

    def counts_for_any(self, fleets: Iterable[FleetModel]) -> bool:
        """Whether it is the newest order for one of these fleets; for its own, if it has one."""
        own = self.plan.selection.fleet
        return any(self.counts_for(one) for one in fleets if own in (None, one.fleet))


@dataclass(frozen=True, slots=True)
class Member:
    """A device of a roll-out's share.

    Attributes:
        before: bundle that it ran when it was chosen, and goes back to; None if it ran none.
        taken_at: when it first said that it runs the version.
        returned_at: when it ran `before` again, after the roll-out's end, or when it began to
            follow another order.
        trouble: why it counts as failed: it refused the version, or left it; "" if it did not.
    """

    rollout: int
    device: str
    stage: int
    before: str | None
    joined_at: float
    taken_at: float | None = None
    returned_at: float | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Order:
    """Order of one roll-out to one device."""

    rollout: Rollout
    member: Member
