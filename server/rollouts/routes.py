"""The roll-outs over HTTP: `/api/v1/rollouts`, for the operator.

The command line offers the same: `splitedge server rollout …`.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from server.registry.catalogue import MAX_VERSION
from server.registry.rollouts.records import RolloutPlan
from server.registry.selection.selection import Selection
from server.rollouts.overview import RolloutState, rollout_state, rollout_states
from server.rollouts.start import SHARES_MOST, start_rollout
from server.routes.authentication import Presence
from server.routes.turns import RegistryRoute


class ConditionView(BaseModel):
    """A health condition: "good", "worse" or "unknown", and the values behind it."""

    model_config = ConfigDict(from_attributes=True)

    condition: str
    verdict: str
    value: float | None
    limit: float | None


class MemberView(BaseModel):
    """A device of a share: what it runs, what it ran before, and why it failed."""

    model_config = ConfigDict(from_attributes=True)

    device: str
    share: float
    state: str
    before: str | None
    runs: str | None
    why: str
    last_seen: float | None


class RolloutView(BaseModel):
    """A roll-out; times are UTC seconds since 1970, shares are 0 to 1."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    version: str
    base: str
    selection: str
    state: str
    share: float
    shares: list[float]
    wait_s: float
    answers_min: int
    failures_max: int
    started_at: float
    stage_at: float
    watched_at: float | None
    ended_at: float | None
    standing: bool
    reason: str
    who: str
    devices: int
    joined: int
    taken: int
    answers: int
    waits: str
    health: list[ConditionView]
    members: list[MemberView]


class RolloutList(BaseModel):
    """The roll-outs, newest first."""

    rollouts: list[RolloutView]


class RolloutRequest(BaseModel):
    """A version to roll out: to which devices, in which shares, under which conditions."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(max_length=63)
    version: int = Field(ge=1, le=MAX_VERSION)
    shares: list[float] = Field(default=[0.1, 0.5, 1.0], max_length=SHARES_MOST)
    health: str = Field(default="", max_length=1000)
    wait_s: float = 600.0
    answers_min: int = Field(default=200, le=10**9)
    failures_max: int = Field(default=0, le=10**9)
    fleet: str | None = None
    tag: str | None = None
    device: str | None = None

    def plan(self) -> RolloutPlan:
        """Plan of the roll-out, whose devices are chosen by fleet, tag or name."""
        given: dict[str, Any] = self.model_dump(exclude={"fleet", "tag", "device", "shares"})
        chosen = Selection(self.fleet, self.tag, self.device)
        return RolloutPlan(selection=chosen, shares=tuple(self.shares), **given)


def router(services: Presence) -> APIRouter:
    """The routes over `services`."""
    api = APIRouter(prefix="/api/v1/rollouts", route_class=RegistryRoute, tags=["roll-outs"])
    registry = services.registry

    @api.get("")
    def listed() -> RolloutList:
        """All roll-outs, newest first."""
        return RolloutList(rollouts=[_view(one) for one in rollout_states(registry)])

    @api.post("", status_code=201)
    def start(body: RolloutRequest) -> RolloutView:
        """Start a roll-out; its first share moves within seconds."""
        return shown(start_rollout(registry, body.plan()).id)

    @api.get("/{rollout_id}")
    def shown(rollout_id: int) -> RolloutView:
        """One roll-out."""
        return _view(rollout_state(registry, rollout_id))

    @api.post("/{rollout_id}/pause")
    def pause(rollout_id: int) -> RolloutView:
        """Stop a roll-out where it is; its devices keep the version."""
        return shown(registry.rollouts.pause(rollout_id).id)

    @api.post("/{rollout_id}/resume")
    def resume(rollout_id: int) -> RolloutView:
        """Let a paused roll-out go on."""
        return shown(registry.rollouts.resume(rollout_id).id)

    @api.post("/{rollout_id}/abort")
    def abort(rollout_id: int) -> RolloutView:
        """End a roll-out: its devices go back to what they ran before."""
        return shown(registry.rollouts.abort(rollout_id).id)

    return api


def _view(state: RolloutState) -> RolloutView:
    return RolloutView.model_validate(state)
