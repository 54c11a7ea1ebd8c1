"""Actions of the dashboard: the same calls that the API makes, in the name of who signed in."""

from __future__ import annotations

from typing import Final, Protocol

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from edge_sdk.wire.topics import ID_PATTERN
from server.alerts.routes import Silence
from server.audit.requests import WHO
from server.dashboard.sign_in import SignIn, SignInServices
from server.deployment.assignment import Assigner
from server.registry.catalogue import MAX_VERSION
from server.registry.credentials import token_text
from server.registry.database import MAX_TOKEN_TTL_S
from server.registry.records import Device
from server.registry.selection.titles import MAX_TITLE
from server.registry.transactions import MAX_ID
from server.rollouts.routes import RolloutRequest
from server.rollouts.start import start_rollout
from server.routes.turns import RegistryRoute

_ID: Final = f"^{ID_PATTERN.pattern}$"


class ActionServices(SignInServices, Protocol):
    """The part of the server that actions need; called from several threads at once."""

    @property
    def assigner(self) -> Assigner:
        """The choice of each device's bundle."""

    def reassign(self, device_id: str, *, left: bool = False) -> Device:
        """Choose a device's bundle again, and tell the device if it is another one."""

    def expel(self, device: Device) -> None:
        """Refuse the device at the broker, and cut its connections."""

    def root_bytes(self, fingerprint: str = "") -> bytes:
        """The TUF root that a new device is to trust."""


class Done(BaseModel):
    """Outcome of an action, for people."""

    done: str


class PinTo(BaseModel):
    """The bundle, `{model}/{version}/{variant}`, that a device is to run whatever it measures."""

    model_config = ConfigDict(extra="forbid")

    bundle: str = Field(max_length=200)


class Lift(BaseModel):
    """A bundle that a device refused."""

    model_config = ConfigDict(extra="forbid")

    bundle: str = Field(max_length=200)


class Rename(BaseModel):
    """The title of a device, which people call it by; empty for none."""

    model_config = ConfigDict(extra="forbid")

    title: str = Field(max_length=MAX_TITLE)


class Activate(BaseModel):
    """A version of a model."""

    model_config = ConfigDict(extra="forbid")

    version: int = Field(ge=1, le=MAX_VERSION)


class AssignModel(BaseModel):
    """The model that a fleet is to run; with a version it stays at that version."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(max_length=MAX_ID)
    version: int | None = Field(default=None, ge=1, le=MAX_VERSION)


class NewDevice(BaseModel):
    """A place for one device."""

    model_config = ConfigDict(extra="forbid")

    fleet: str = Field(default="default", pattern=_ID)
    ttl_s: float = Field(default=3600.0, gt=0, le=MAX_TOKEN_TTL_S)


class TokenMade(BaseModel):
    """A new token, which enrols one device; the server stores only its hash."""

    token: str = Field(repr=False)
    fleet: str
    ttl_s: float


def router(services: ActionServices, sign_in: SignIn) -> APIRouter:
    """The actions over `services`."""
    routes = APIRouter(
        prefix="/dashboard/actions",
        route_class=RegistryRoute,
        dependencies=[Depends(sign_in.actor)],
        include_in_schema=False,
    )
    _add_membership(routes, services)
    _add_pins(routes, services)
    _add_models(routes, services)
    _add_rollouts(routes, services)
    _add_alerts(routes, services)
    return routes


def _add_membership(routes: APIRouter, services: ActionServices) -> None:
    registry = services.registry

    @routes.post("/tokens")
    def create_token(body: NewDevice, request: Request) -> TokenMade:
        """Make a token that enrols one device."""
        root = services.root_bytes()  # it may fail, and comes before the token for that reason
        secret = registry.create_token(body.fleet, body.ttl_s, f"dashboard of {_who(request)}")
        return TokenMade(token=token_text(secret, root), fleet=body.fleet, ttl_s=body.ttl_s)

    @routes.post("/devices/{device_id}/approve")
    def approve(device_id: str, request: Request) -> Done:
        """Let a device in that waits."""
        registry.membership.approve(device_id, who=_who(request))
        return Done(done=f"{device_id} is let in")

    @routes.post("/devices/{device_id}/reject")
    def reject(device_id: str, request: Request) -> Done:
        """Refuse a device that waits, for good."""
        registry.membership.reject(device_id, who=_who(request))
        services.expel(registry.device(device_id))
        return Done(done=f"{device_id} is refused")

    @routes.post("/devices/{device_id}/revoke")
    def revoke(device_id: str, request: Request) -> Done:
        """Revoke a device and cut its connections."""
        services.expel(registry.revoke(device_id, who=_who(request)))
        return Done(done=f"{device_id} is revoked")

    @routes.post("/devices/{device_id}/rotate")
    def rotate(device_id: str, request: Request) -> Done:
        """Order a device to replace its credential."""
        registry.membership.ask_to_rotate(device_id, who=_who(request))
        return Done(done=f"{device_id} replaces its credential, now or when it is back")

    @routes.post("/devices/{device_id}/lift")
    def lift(device_id: str, body: Lift, request: Request) -> Done:
        """Order a device to try a bundle again that it refused."""
        registry.membership.lift(device_id, body.bundle, who=_who(request))
        return Done(done=f"{device_id} tries {body.bundle} again, now or when it is back")

    @routes.post("/devices/{device_id}/rename")
    def rename(device_id: str, body: Rename, request: Request) -> Done:
        """Give a device a title, or take it away."""
        title = registry.titles.give(device_id, body.title, who=_who(request))
        return Done(done=f"{device_id} is called {title or device_id}")


def _add_pins(routes: APIRouter, services: ActionServices) -> None:
    registry = services.registry

    @routes.post("/devices/{device_id}/pin")
    def pin(device_id: str, body: PinTo, request: Request) -> Done:
        """Fix a device's bundle."""
        services.assigner.check_pin(registry.device(device_id), None, body.bundle)
        registry.capabilities.pin(device_id, bundle=body.bundle, who=_who(request))
        services.reassign(device_id)
        return Done(done=f"{device_id} is pinned to {body.bundle}")

    @routes.post("/devices/{device_id}/unpin")
    def unpin(device_id: str, request: Request) -> Done:
        """Let the fleet's rule choose again."""
        registry.capabilities.unpin(device_id, who=_who(request))
        bundle = services.reassign(device_id).bundle
        return Done(done=f"{device_id} is not pinned; the rule chose {bundle or 'nothing yet'}")


def _add_models(routes: APIRouter, services: ActionServices) -> None:
    catalogue = services.registry.catalogue

    @routes.post("/models/{name}/activate")
    def activate(name: str, body: Activate, request: Request) -> Done:
        """Make a version the active one; the fleets that follow the model move to it."""
        active = catalogue.activate(name, body.version, who=_who(request))
        return Done(done=f"{active} is active; its fleets move to it within seconds")

    @routes.post("/models/{name}/rollback")
    def roll_back(name: str, request: Request) -> Done:
        """Activate the version that was active before."""
        active, left = catalogue.roll_back(name, who=_who(request))
        return Done(done=f"{active} is active again in place of {left}")

    @routes.post("/fleets/{fleet}/assign")
    def assign(fleet: str, body: AssignModel, request: Request) -> Done:
        """Give a fleet a model, or fix it to a version."""
        given = catalogue.assign(fleet, body.model, body.version, who=_who(request))
        how = "stays at" if given.pinned else "runs"
        return Done(done=f"the fleet {fleet} {how} {given.model}/{given.version}")


def _add_rollouts(routes: APIRouter, services: ActionServices) -> None:
    registry = services.registry

    @routes.post("/rollouts")
    def start(body: RolloutRequest, request: Request) -> Done:
        """Start a roll-out; its first share moves within seconds."""
        plan = body.plan()
        rollout = start_rollout(registry, plan, who=_who(request))
        return Done(done=f"roll-out {rollout.id} of {plan} has begun")

    @routes.post("/rollouts/{rollout_id}/pause")
    def pause(rollout_id: int, request: Request) -> Done:
        """Stop a roll-out where it is."""
        registry.rollouts.pause(rollout_id, who=_who(request))
        return Done(done=f"roll-out {rollout_id} is paused")

    @routes.post("/rollouts/{rollout_id}/resume")
    def resume(rollout_id: int, request: Request) -> Done:
        """Let a paused roll-out go on."""
        registry.rollouts.resume(rollout_id, who=_who(request))
        return Done(done=f"roll-out {rollout_id} goes on")

    @routes.post("/rollouts/{rollout_id}/abort")
    def abort(rollout_id: int, request: Request) -> Done:
        """End a roll-out; its devices go back."""
        registry.rollouts.abort(rollout_id, who=_who(request))
        return Done(done=f"roll-out {rollout_id} is aborted; its devices go back")


def _add_alerts(routes: APIRouter, services: ActionServices) -> None:
    alerts = services.registry.alerts

    @routes.post("/alerts/silence")
    def silence(body: Silence, request: Request) -> Done:
        """Tell nobody about open alerts for a time; 0 seconds end it."""
        alerts.silence(body.kind, body.about, body.seconds, who=_who(request))
        how = "is silenced" if body.seconds else "is told again"
        return Done(done=f"{body.kind or 'every alert'} of {body.about} {how}")


def _who(request: Request) -> str:
    """The person in whose name the request acts, whom `SignIn.actor` found."""
    who: str = getattr(request.state, WHO)
    return who
