"""Capabilities of devices: `/api/v1/devices/{id}/measurements`, `/conditions`, `/failures`, `/pin`.

A device reports about itself only. After each report the server chooses the device's bundle again,
and calls the device if it is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, model_validator

from profiles.errors import InvalidProfileError
from profiles.measured import BundleMeasurement, Conditions
from server.allocation import held_until
from server.deployment.assignment import Assigner
from server.errors import BadRequestError
from server.registry.capabilities import MAX_DEPTH, MAX_WHY
from server.registry.database import Registry
from server.registry.records import Capability, Device
from server.routes.authentication import Presence
from server.routes.turns import RegistryRoute

T = TypeVar("T")


class CapabilityServices(Presence, Protocol):
    """The part of the server that these routes need; called from several threads at once."""

    @property
    def registry(self) -> Registry:
        """The devices and what they can do."""

    @property
    def operator_sha256(self) -> str:
        """The hash of the operator's secret, in hex."""

    def logged_in(self, device: Device, credential: str) -> None:
        """Note that a device showed its credential."""

    @property
    def assigner(self) -> Assigner:
        """The choice of each device's bundle."""

    def reassign(self, device_id: str, *, left: bool = False) -> Device:
        """Choose a device's bundle again; call the device, and note what it left, if it moves."""


class FailureReport(BaseModel):
    """A bundle that ran out of memory on the device, and why, for people."""

    model_config = ConfigDict(extra="ignore")

    bundle: str = Field(max_length=200)
    why: str = Field(default="", max_length=10 * MAX_WHY)


class PinRequest(BaseModel):
    """A depth of the device's model, or a bundle `{model}/{version}/{variant}`."""

    model_config = ConfigDict(extra="forbid")

    depth: int | None = Field(default=None, ge=1, le=MAX_DEPTH)
    bundle: str | None = Field(default=None, max_length=200)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.depth is None) == (self.bundle is None):
            raise ValueError("expected depth or bundle, and only one of them")
        return self


class Assigned(BaseModel):
    """The bundle that the device is to run from now on; None if there is none."""

    bundle: str | None


class Unmeasured(BaseModel):
    """Other variants of the device's depth that it has not measured yet."""

    bundles: list[str]


class FailureView(BaseModel):
    """A bundle that the device had to leave; its depth is not assigned until `held_until`."""

    bundle: str
    kind: str
    why: str
    failed_at: float
    count: int
    held_until: float


class CapabilityView(BaseModel):
    """Everything that is known of what a device can do; times are UTC seconds since 1970."""

    measurements: list[dict[str, Any]]
    conditions: dict[str, Any] | None
    failures: list[FailureView]
    pin: dict[str, Any] | None


def router(services: CapabilityServices) -> APIRouter:
    """The routes over `services`."""
    api = APIRouter(prefix="/api/v1/devices", route_class=RegistryRoute, tags=["devices"])
    _add_reports(api, services)
    _add_operator_routes(api, services)
    return api


def _add_reports(api: APIRouter, services: CapabilityServices) -> None:
    capabilities = services.registry.capabilities

    @api.put("/{device_id}/measurements")
    def measured(device_id: str, body: dict[str, Any]) -> Assigned:
        """Store what a bundle takes on the device."""
        capabilities.measured(device_id, _read(BundleMeasurement.from_dict, body))
        return Assigned(bundle=services.reassign(device_id).bundle)

    @api.put("/{device_id}/conditions")
    def conditions(device_id: str, body: dict[str, Any]) -> Assigned:
        """Store the device's present state: free memory, latency, link."""
        capabilities.report_conditions(device_id, _read(Conditions.from_dict, body))
        return Assigned(bundle=services.reassign(device_id, left=True).bundle)

    @api.post("/{device_id}/failures")
    def failed(device_id: str, body: FailureReport) -> Assigned:
        """Store that a bundle ran out of memory: its depth is not assigned for a while."""
        capabilities.failed(device_id, body.bundle, body.why)
        return Assigned(bundle=services.reassign(device_id).bundle)

    @api.get("/{device_id}/unmeasured")
    def unmeasured(device_id: str) -> Unmeasured:
        """Variants that the device should measure, to get the one that is faster there."""
        choice = services.assigner.choose(services.registry.device(device_id))
        return Unmeasured(bundles=[] if choice is None else list(choice.measure))


def _add_operator_routes(api: APIRouter, services: CapabilityServices) -> None:
    capabilities = services.registry.capabilities

    @api.get("/{device_id}/capability")
    def show(device_id: str) -> CapabilityView:
        """Measurements, conditions, failures and pin, to the device or to the operator."""
        services.registry.device(device_id)
        return _view(capabilities.of(device_id))

    @api.put("/{device_id}/pin")
    def pin(device_id: str, body: PinRequest) -> Assigned:
        """Fix the device's depth or bundle; nothing but `unpin` changes it."""
        device = services.registry.device(device_id)
        services.assigner.check_pin(device, body.depth, body.bundle)
        capabilities.pin(device_id, depth=body.depth, bundle=body.bundle)
        return Assigned(bundle=services.reassign(device_id).bundle)

    @api.delete("/{device_id}/pin")
    def unpin(device_id: str) -> Assigned:
        """Let the fleet's rule choose again."""
        capabilities.unpin(device_id)
        return Assigned(bundle=services.reassign(device_id).bundle)


def _read(read: Callable[[Mapping[str, Any]], T], body: Mapping[str, Any]) -> T:
    try:
        return read(body)
    except InvalidProfileError as err:
        raise BadRequestError(str(err)) from err


def _view(found: Capability) -> CapabilityView:
    return CapabilityView(
        measurements=[each.to_dict() for each in found.measurements],
        conditions=None if found.conditions is None else found.conditions.to_dict(),
        failures=[
            FailureView(
                bundle=each.bundle,
                kind=each.kind,
                why=each.why,
                failed_at=each.failed_at,
                count=each.count,
                held_until=held_until(each),
            )
            for each in found.failures
        ],
        pin=None if found.pin is None else {"depth": found.pin.depth, "bundle": found.pin.bundle},
    )
