"""Membership of devices: approval, new credentials, and what they refused.

`DELETE /api/v1/devices/{id}`, and below it `/approval`, `/credential`, `/orders` for the device,
`/approve`, `/reject`, `/rotate` and `/quarantine` for the operator.
"""

from __future__ import annotations

from typing import Final, Protocol

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from server.registry.credentials import is_secret
from server.registry.membership import CONFIRM_S
from server.registry.records import Device
from server.routes.authentication import Presence, device_of, secret_of
from server.routes.rate_limit import RateLimit
from server.routes.turns import RegistryRoute

CREDENTIALS: Final = 10  # that a device may ask for within CONFIRM_S


class MembershipServices(Presence, Protocol):
    """The part of the server that these routes need; called from several threads at once."""

    def admit(self, device: Device, credential: str) -> None:
        """Let the device log in at the broker with that credential; raises if it cannot."""

    def expel(self, device: Device) -> None:
        """Refuse the device at the broker, and cut its connections."""


class Approval(BaseModel):
    """Whether the operator has let the device in."""

    approved: bool


class NewCredential(BaseModel):
    """A credential that is valid beside the device's own until it is confirmed, or for a while."""

    credential: str = Field(repr=False)
    valid_s: float


class DoneOrder(BaseModel):
    """An order that the device has carried out."""

    model_config = ConfigDict(extra="forbid")

    op: str = Field(pattern="^[a-z-]{1,32}$")
    argument: str = Field(default="", pattern="^[ -~]{0,160}$")


class RefusedBundle(BaseModel):
    """A bundle that a device refused or had to leave, and why."""

    bundle: str
    why: str


class RefusedBundles(BaseModel):
    """All bundles that a device refused; the newest is the last."""

    refused: list[RefusedBundle]


def router(services: MembershipServices) -> APIRouter:
    """The routes over `services`."""
    api = APIRouter(prefix="/api/v1/devices", route_class=RegistryRoute, tags=["membership"])
    _add_device_routes(api, services)
    _add_operator_routes(api, services)
    return api


def _add_device_routes(api: APIRouter, services: MembershipServices) -> None:
    membership = services.registry.membership
    # each is a change in the audit log, from which a device must not push out those of others
    limit = RateLimit(CREDENTIALS, CONFIRM_S, what="new credentials")

    @api.get("/{device_id}/approval")
    def approval(request: Request) -> Approval:
        """Whether the device is let in; the one thing that it may ask before it is."""
        device, credential = device_of(request), secret_of(request)
        if device.active and is_secret(credential, device.credential_sha256):
            # a broker of your own takes credentials in clear alone, and here is one
            services.admit(device, credential)
        return Approval(approved=device.active)

    @api.post("/{device_id}/credential", status_code=201)
    def new_credential(device_id: str) -> NewCredential:
        """Make a new credential; the device confirms it with the next route."""
        limit.check(device_id)
        limit.count(device_id)
        credential = membership.new_credential(device_id)
        return NewCredential(credential=credential, valid_s=CONFIRM_S)

    @api.post("/{device_id}/credential/confirm", status_code=204)
    def confirm(device_id: str, request: Request) -> None:
        """Make the credential of this request the only one; the device repeats it until it is."""
        credential = secret_of(request)
        membership.confirm_credential(device_id, credential)
        # after the registry: if the server stops in between, the device confirms again
        services.admit(services.registry.device(device_id), credential)

    @api.post("/{device_id}/orders/done", status_code=204)
    def done(device_id: str, order: DoneOrder) -> None:
        """Note that the device has carried out an order, which is then not sent again."""
        membership.done(device_id, order.op, order.argument)


def _add_operator_routes(api: APIRouter, services: MembershipServices) -> None:
    membership = services.registry.membership

    @api.post("/{device_id}/approve")
    def approve(device_id: str) -> Approval:
        """Let a device in that waits for approval."""
        membership.approve(device_id)
        return Approval(approved=True)

    @api.post("/{device_id}/reject")
    def reject(device_id: str) -> Approval:
        """Refuse a device that waits for approval, for good."""
        membership.reject(device_id)
        services.expel(services.registry.device(device_id))
        return Approval(approved=False)

    @api.delete("/{device_id}", status_code=204)
    def remove(device_id: str) -> None:
        """Forget a device and cut its connections; its name is free then."""
        device = services.registry.device(device_id)
        membership.remove(device_id)
        services.expel(device)

    @api.post("/{device_id}/rotate", status_code=202)
    def rotate(device_id: str) -> None:
        """Order the device to replace its credential, now or when it is back."""
        membership.ask_to_rotate(device_id)

    @api.get("/{device_id}/quarantine")
    def quarantine(device_id: str) -> RefusedBundles:
        """The bundles that the device refused."""
        found = membership.refused_bundles(device_id)
        refused = [RefusedBundle(bundle=bundle, why=why) for bundle, why in found.items()]
        return RefusedBundles(refused=refused)

    @api.delete("/{device_id}/quarantine", status_code=202)
    def lift(device_id: str, bundle: str) -> None:
        """Order the device to try a bundle again that it refused, now or when it is back."""
        membership.lift(device_id, bundle)
