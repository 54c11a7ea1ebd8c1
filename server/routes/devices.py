"""Enrolment and the devices: `/api/v1/enroll`, `/tokens`, `/devices`, `/link/echo`.

A device may read and change itself only; the operator may all. Bodies are bounded while read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from edge_sdk.errors import ManifestError
from edge_sdk.manifest import check_bundle_name
from edge_sdk.wire.topics import ID_PATTERN
from profiles.device import DeviceProfile
from profiles.errors import InvalidProfileError
from server.deployment.overview import states_of
from server.errors import (
    BadRequestError,
    ForbiddenError,
    NotReadyError,
    TokenError,
    UnknownModelError,
)
from server.registry.credentials import token_secret, token_text
from server.registry.database import MAX_NOTE, MAX_TOKEN_TTL_S, Registry
from server.registry.records import Device
from server.routes.authentication import Access
from server.routes.bodies import BoundedRoute, read_body
from server.routes.rate_limit import FailureLimit

logger = logging.getLogger(__name__)

ECHO_BYTES: Final = 1_000_000
REFUSALS: Final = ("refused", "no_space")  # statuses of an update that failed on the device

_ID: Final = f"^{ID_PATTERN.pattern}$"


class DeviceServices(Protocol):
    """The part of the server that these routes need; called from several threads at once."""

    @property
    def registry(self) -> Registry:
        """The devices and tokens."""

    @property
    def operator_sha256(self) -> str:
        """The hash of the operator's secret, in hex."""

    def root_bytes(self) -> bytes:
        """The TUF root that a new device is to trust."""

    def broker_address(self) -> Mapping[str, Any]:
        """The broker's `url`, and its limits."""

    def admit(self, device: Device, credential: str) -> None:
        """Let the device log in at the broker; raises if the broker did not take it."""

    def expel(self, device: Device) -> None:
        """Refuse the device at the broker, and cut its connections."""

    def assign(self, device: Device) -> str | None:
        """Choose the bundle that the device is to run; None if there is none."""

    def command(self, device: Device, command: Mapping[str, Any]) -> bool:
        """Send the device a command; whether the link to the broker took it."""


class Enrolment(BaseModel):
    """The request of a new device. The server ignores the token's part after the dot."""

    model_config = ConfigDict(extra="forbid")

    token: str = Field(max_length=200)
    name: str | None = Field(default=None, pattern=_ID)
    profile: dict[str, Any]


class Enrolled(BaseModel):
    """The answer to a new device: its identity, where to connect, and the TUF root to trust."""

    device: str
    fleet: str
    credential: str = Field(repr=False)
    broker: dict[str, Any]
    root: str
    bundle: str | None


class TokenRequest(BaseModel):
    """The request for a token."""

    model_config = ConfigDict(extra="forbid")

    fleet: str = Field(default="default", pattern=_ID)
    ttl_s: float = Field(default=3600.0, gt=0, le=MAX_TOKEN_TTL_S)
    note: str = Field(default="", max_length=MAX_NOTE)


class NewToken(BaseModel):
    """A new token; the server stores only its hash."""

    token: str = Field(repr=False)
    fleet: str
    ttl_s: float


class DeviceView(BaseModel):
    """A device as the API shows it; times are UTC seconds since 1970.

    It says that it `runs` a bundle, and that it `refused` another, and `why`; it should run what it
    `wants`. `bundle` is the one that it was last assigned.
    """

    model_config = ConfigDict(from_attributes=True)

    device: str = Field(validation_alias="id")
    fleet: str
    profile: dict[str, Any]
    depth: int | None
    bundle: str | None
    enrolled_at: float
    revoked_at: float | None
    last_seen: float | None
    runs: str | None = None
    wants: str | None = None
    refused: str | None = None
    why: str | None = None


class DeviceList(BaseModel):
    """Devices, ordered by id."""

    devices: list[DeviceView]


class Command(BaseModel):
    """A command to a device: `op` and its arguments."""

    model_config = ConfigDict(extra="allow")

    op: str = Field(pattern="^[a-z-]{1,32}$")


class Assignment(BaseModel):
    """The bundle that a device is to run, `{model}/{version}/{variant}`."""

    bundle: str


class UpdateReport(BaseModel):
    """The outcome of a device's update, and the bundle that it runs now."""

    running: str | None = None
    bundle: str | None = None
    status: str = Field(max_length=32)
    reason: str = Field(default="", max_length=4096)


class BrokerLocation(BaseModel):
    """The broker's URL and limits."""

    broker: dict[str, Any]


def router(services: DeviceServices) -> APIRouter:
    """The routes over `services`."""
    api = APIRouter(prefix="/api/v1", route_class=BoundedRoute, tags=["devices"])
    _add_enrolment(api, services)
    access = Access(services)
    _add_device_routes(api, services, access)
    _add_operator_routes(api, services, access)
    return api


def _add_enrolment(api: APIRouter, services: DeviceServices) -> None:
    limit = FailureLimit()

    @api.post("/enroll", status_code=201)
    def enroll(body: Enrolment, request: Request) -> Enrolled:
        """Trade a one-time token for an identity."""
        address = "" if request.client is None else request.client.host
        limit.check(address)
        profile = _profile(body.profile)
        # steps that may fail come before the token is used
        root, broker = services.root_bytes().decode(), dict(services.broker_address())
        try:
            device, credential = services.registry.redeem_token(
                token_secret(body.token), body.name, profile
            )
        except TokenError:
            limit.failed(address)
            logger.warning("address=%s enrolment refused: no such token", address)
            raise
        _let_in(services, device, credential, token_secret(body.token))
        logger.info("device=%s fleet=%s address=%s enrolled", device.id, device.fleet, address)
        return Enrolled(
            device=device.id,
            fleet=device.fleet,
            credential=credential,
            broker=broker,
            root=root,
            bundle=_first_bundle(services, device),
        )


def _add_device_routes(api: APIRouter, services: DeviceServices, access: Access) -> None:
    itself = [Depends(access.itself)]

    @api.get("/devices/{device_id}", dependencies=[Depends(access.itself_or_operator)])
    def show(device_id: str) -> DeviceView:
        """One device, to itself or to the operator."""
        return _view(services.registry, services.registry.device(device_id))

    @api.get("/devices/{device_id}/assignment", dependencies=itself)
    def assignment(device_id: str) -> Assignment:
        """The bundle to run."""
        bundle = services.assign(services.registry.device(device_id))
        if bundle is None:
            raise UnknownModelError(f"device {device_id}: no bundle for it is published yet")
        return Assignment(bundle=bundle)

    @api.get("/devices/{device_id}/connection", dependencies=itself)
    def connection() -> BrokerLocation:
        """The broker's URL and limits."""
        return BrokerLocation(broker=dict(services.broker_address()))

    @api.put("/devices/{device_id}/profile", dependencies=itself)
    def update_profile(device_id: str, profile: dict[str, Any]) -> DeviceView:
        """Replace the device's profile."""
        return _view(
            services.registry, services.registry.update_profile(device_id, _profile(profile))
        )

    @api.put("/devices/{device_id}/update", status_code=204, dependencies=itself)
    def report_update(device_id: str, report: UpdateReport) -> None:
        """Note the bundle that the device runs after an update, and the one that it refused."""
        running, bundle = _bundle(report.running), _bundle(report.bundle)
        reports = services.registry.reports
        if report.status not in REFUSALS or bundle is None:
            reports.note_update(device_id, running, None, None)
            return
        reports.note_update(device_id, running, bundle, report.reason)
        logger.warning("device=%s refused %s", device_id, bundle)

    @api.post("/link/echo", response_class=Response, dependencies=[Depends(access.anyone)])
    async def echo(request: Request) -> Response:
        """Return the same bytes, at most 1 MB, with which a device measures its link."""
        body = await read_body(request, ECHO_BYTES)
        return Response(body, media_type="application/octet-stream")


def _add_operator_routes(api: APIRouter, services: DeviceServices, access: Access) -> None:
    operator = [Depends(access.operator)]

    @api.get("/devices", dependencies=operator)
    def listed(fleet: str | None = None) -> DeviceList:
        """All devices, or those of one fleet, including revoked ones."""
        found = services.registry.devices(fleet)
        return DeviceList(devices=_views(services.registry, found))

    @api.post("/devices/{device_id}/revoke", dependencies=operator)
    def revoke(device_id: str) -> DeviceView:
        """Revoke a device and cut its connections; a second call cuts them again."""
        device = services.registry.revoke(device_id)
        services.expel(device)
        logger.info("device=%s revoked", device.id)
        return _view(services.registry, device)

    @api.post("/devices/{device_id}/command", status_code=202, dependencies=operator)
    def command(device_id: str, body: Command) -> DeviceView:
        """Send a device a command over MQTT; it is lost if the device is not connected."""
        device = services.registry.device(device_id)
        if device.revoked_at is not None:
            raise ForbiddenError(f"device {device_id} is revoked, so it gets no command")
        if not services.command(device, body.model_dump()):
            raise NotReadyError("the broker takes no command now: it is away, or its queue is full")
        return _view(services.registry, device)

    @api.post("/tokens", status_code=201, dependencies=operator)
    def create_token(body: TokenRequest) -> NewToken:
        """Make an enrolment token."""
        secret = services.registry.create_token(body.fleet, body.ttl_s, body.note)
        token = token_text(secret, services.root_bytes())
        return NewToken(token=token, fleet=body.fleet, ttl_s=body.ttl_s)


def _let_in(services: DeviceServices, device: Device, credential: str, token: str) -> None:
    """Let a new device log in at the broker: only now is its credential known in full.

    Raises: NotReadyError if the broker did not take the device; the token can be used again.
    """
    try:
        services.admit(device, credential)
    except Exception as err:
        logger.exception("device=%s not enrolled: the broker did not take it", device.id)
        services.registry.undo_enrolment(device, token)
        raise NotReadyError(
            "the broker takes no new devices now, so this one is not enrolled; the token is still "
            "valid: try again when the broker is back"
        ) from err


def _first_bundle(services: DeviceServices, device: Device) -> str | None:
    try:
        return services.assign(device)
    except Exception:
        # the token is used, and only this answer has the credential, so it must be sent; the
        # device asks for its bundle later
        logger.exception("device=%s enrolled, but no bundle was chosen for it", device.id)
        return None


def _profile(data: Mapping[str, Any]) -> dict[str, Any]:
    # a device's bad profile would otherwise stop the allocation of its whole fleet
    try:
        return DeviceProfile.from_dict(data).to_dict()
    except InvalidProfileError as err:
        raise BadRequestError(str(err)) from err


def _bundle(name: str | None) -> str | None:
    try:
        return None if name is None else check_bundle_name(name)
    except ManifestError as err:
        raise BadRequestError(str(err)) from err


def _view(registry: Registry, device: Device) -> DeviceView:
    return _views(registry, (device,))[0]


def _views(registry: Registry, devices: Sequence[Device]) -> list[DeviceView]:
    views = []
    for device, state in zip(devices, states_of(registry, devices), strict=True):
        view = DeviceView.model_validate(device)
        views.append(
            view.model_copy(
                update={
                    "runs": state.runs,
                    "wants": state.wants,
                    "refused": state.refused,
                    "why": state.why,
                }
            )
        )
    return views
