"""Enrolment and the devices: `/api/v1/enroll`, `/tokens`, `/devices`, `/link/echo`.

A device may read and change itself only; the operator may all. Bodies are bounded while read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from edge_sdk.api import WAITS_HEADER
from edge_sdk.errors import ManifestError
from edge_sdk.manifest import check_bundle_name
from edge_sdk.training.device.trainer_address import INVITATION
from edge_sdk.wire.topics import ID_PATTERN
from profiles.device import DeviceProfile
from profiles.errors import InvalidProfileError
from server.deployment.overview import states_of, tagged
from server.deployment.presence import Presence as DevicePresence
from server.errors import (
    BadRequestError,
    ForbiddenError,
    NotReadyError,
    TokenError,
    UnknownModelError,
)
from server.registry.credentials import token_fingerprint, token_secret, token_text
from server.registry.database import (
    MAX_NOTE,
    MAX_TOKEN_TTL_S,
    MAX_TOKENS,
    REFUSED_ENROLMENT,
    Registry,
)
from server.registry.records import Device
from server.registry.selection.tags import MAX_TAGS
from server.registry.selection.titles import MAX_TITLE
from server.registry.transactions import OPERATOR
from server.routes.authentication import Presence, login_of
from server.routes.bodies import BoundedRoute, read_body
from server.routes.rate_limit import RateLimit
from server.routes.turns import RegistryRoute

logger = logging.getLogger(__name__)

ECHO_BYTES: Final = 1_000_000
REFUSALS: Final = ("refused", "no_space")  # statuses of an update that failed on the device

_ID: Final = f"^{ID_PATTERN.pattern}$"


class DeviceServices(Presence, Protocol):
    """The part of the server that these routes need; called from several threads at once."""

    @property
    def registry(self) -> Registry:
        """The devices and tokens."""

    @property
    def operator_sha256(self) -> str:
        """The hash of the operator's secret, in hex."""

    @property
    def approves_devices(self) -> bool:
        """Whether every new device waits for the operator's approval."""

    def root_bytes(self, fingerprint: str = "") -> bytes:
        """The TUF root that a new device is to trust: the one of that fingerprint, or the newest.

        Raises: ClockError, NotReadyError while no device can enrol.
        """

    def broker_address(self) -> Mapping[str, Any]:
        """The broker's `url`, and its limits."""

    def logged_in(self, device: Device, credential: str) -> None:
        """Note that a device showed its credential."""

    def admit(self, device: Device, credential: str) -> None:
        """Let the device log in at the broker; raises if the broker did not take it."""

    def expel(self, device: Device) -> None:
        """Refuse the device at the broker, and cut its connections."""

    def assign(self, device: Device) -> str | None:
        """Choose the bundle that the device is to run; None if there is none."""

    def command(self, device: Device, command: Mapping[str, Any]) -> bool:
        """Send the device a command; whether the link to the broker took it."""


class Enrolment(BaseModel):
    """The request of a new device; the token's part after the dot names a root."""

    model_config = ConfigDict(extra="forbid")

    token: str = Field(max_length=200)
    name: str | None = Field(default=None, pattern=_ID)
    profile: dict[str, Any]


class Enrolled(BaseModel):
    """The answer to a new device: its identity, where to connect, and the TUF root to trust.

    A device that is not `approved` waits for the operator; its credential opens nothing until then.
    """

    device: str
    fleet: str
    credential: str = Field(repr=False)
    broker: dict[str, Any]
    root: str
    bundle: str | None
    approved: bool = True


class TokenRequest(BaseModel):
    """The request for a token."""

    model_config = ConfigDict(extra="forbid")

    fleet: str | None = Field(default=None, pattern=_ID)
    ttl_s: float = Field(default=3600.0, gt=0, le=MAX_TOKEN_TTL_S)
    note: str = Field(default="", max_length=MAX_NOTE)
    approve: bool = False
    count: int = Field(default=1, ge=1, le=MAX_TOKENS)
    device: str | None = Field(default=None, pattern=_ID)


class NewToken(BaseModel):
    """New tokens, and the first of them as `token`; the server stores only their hashes."""

    token: str = Field(repr=False)
    tokens: list[str] = Field(repr=False)
    fleet: str
    ttl_s: float


class DeviceView(BaseModel):
    """A device as the API shows it; times are UTC seconds since 1970.

    It says that it `runs` a bundle, and that it `refused` another, and `why`; it should run what it
    `wants`. `bundle` is the one that it was last assigned. `presence`: as the dashboard has it.
    """

    model_config = ConfigDict(from_attributes=True)

    device: str = Field(validation_alias="id")
    fleet: str
    profile: dict[str, Any]
    depth: int | None
    bundle: str | None
    enrolled_at: float
    revoked_at: float | None
    approved_at: float | None
    last_seen: float | None
    presence: DevicePresence = "never"
    runs: str | None = None
    wants: str | None = None
    refused: str | None = None
    why: str | None = None
    tags: list[str] = []
    title: str | None = None


class TagList(BaseModel):
    """The tags of one device, 1 to 63 of a-z, 0-9 and '-' each."""

    model_config = ConfigDict(extra="forbid")

    tags: list[str] = Field(max_length=MAX_TAGS)


class Title(BaseModel):
    """The title of one device, which people call it by; empty or null for none."""

    model_config = ConfigDict(extra="forbid")

    title: str | None = Field(max_length=MAX_TITLE)


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
    api = APIRouter(prefix="/api/v1", route_class=RegistryRoute, tags=["devices"])
    _add_enrolment(api, services)
    _add_device_routes(api, services)
    _add_operator_routes(api, services)
    links = APIRouter(route_class=BoundedRoute)  # who sends slowly there must hold no turn
    _add_link_routes(links)
    api.include_router(links)
    return api


def _add_enrolment(api: APIRouter, services: DeviceServices) -> None:
    limit = RateLimit()

    @api.post("/enroll", status_code=201)
    def enroll(body: Enrolment, request: Request) -> Enrolled:
        """Trade a one-time token for an identity."""
        address = "" if request.client is None else request.client.host
        secret = token_secret(body.token)
        if not services.registry.token_works(secret):
            # 256 random bits cannot be guessed, so the limit keeps no right token out; it bounds
            # what the attempts write into the logs
            limit.check(address)
            limit.count(address)
            logger.warning("address=%s enrolment refused: no such token", address)
            raise TokenError(REFUSED_ENROLMENT)
        profile = _profile(body.profile)
        # steps that may fail come before the token is used
        root = services.root_bytes(token_fingerprint(body.token)).decode()
        broker = dict(services.broker_address())
        device, credential, before = services.registry.redeem(
            secret,
            body.name,
            profile,
            approve=services.approves_devices,
            can_wait=request.headers.get(WAITS_HEADER) == "approval",
        )
        _let_in(services, device, credential, secret, before)
        logger.info(
            "device=%s fleet=%s address=%s enrolled%s",
            *(device.id, device.fleet, address),
            "" if device.active else ", waits for approval",
        )
        return Enrolled(
            device=device.id,
            fleet=device.fleet,
            credential=credential,
            broker=broker,
            root=root,
            bundle=_first_bundle(services, device) if device.active else None,
            approved=device.active,
        )


def _add_device_routes(api: APIRouter, services: DeviceServices) -> None:
    @api.get("/devices/{device_id}")
    def show(device_id: str) -> DeviceView:
        """One device, to itself or to the operator."""
        return _view(services.registry, services.registry.device(device_id))

    @api.get("/devices/{device_id}/assignment")
    def assignment(device_id: str) -> Assignment:
        """The bundle to run."""
        bundle = services.assign(services.registry.device(device_id))
        if bundle is None:
            raise UnknownModelError(f"device {device_id}: no bundle for it is published yet")
        return Assignment(bundle=bundle)

    @api.get("/devices/{device_id}/connection")
    def connection() -> BrokerLocation:
        """The broker's URL and limits."""
        return BrokerLocation(broker=dict(services.broker_address()))

    @api.put("/devices/{device_id}/profile")
    def update_profile(device_id: str, profile: dict[str, Any]) -> DeviceView:
        """Replace the device's profile."""
        return _view(
            services.registry, services.registry.update_profile(device_id, _profile(profile))
        )

    @api.put("/devices/{device_id}/update", status_code=204)
    def report_update(device_id: str, report: UpdateReport) -> None:
        """Note the bundle that the device runs after an update, and the one that it refused.

        A device that runs the bundle already refuses nothing: its disk is full, or the like.
        """
        running, bundle = _bundle(report.running), _bundle(report.bundle)
        reports = services.registry.reports
        if report.status not in REFUSALS or bundle in (None, running):
            reports.note_update(device_id, running, None, None)
            return
        reports.note_update(device_id, running, bundle, report.reason)
        logger.warning("device=%s refused %s", device_id, bundle)


def _add_link_routes(api: APIRouter) -> None:
    @api.post("/link/echo", response_class=Response)
    async def echo(request: Request) -> Response:
        """Return the same bytes, at most 1 MB, with which a device measures its link."""
        body = await read_body(request, ECHO_BYTES)
        return Response(body, media_type="application/octet-stream")


def _add_operator_routes(api: APIRouter, services: DeviceServices) -> None:
    @api.get("/devices")
    def listed(fleet: str | None = None, tag: str | None = None) -> DeviceList:
        """All devices, those of one fleet, or those with a tag, including revoked ones."""
        found = tagged(services.registry.devices(fleet), tag)
        return DeviceList(devices=_views(services.registry, found))

    @api.put("/devices/{device_id}/tags")
    def tag(device_id: str, body: TagList) -> TagList:
        """Give a device exactly these tags."""
        return TagList(tags=list(services.registry.tags.replace(device_id, body.tags)))

    @api.put("/devices/{device_id}/title")
    def rename(device_id: str, body: Title) -> Title:
        """Give a device a title, or take it away."""
        return Title(title=services.registry.titles.give(device_id, body.title or ""))

    @api.post("/devices/{device_id}/revoke")
    def revoke(device_id: str) -> DeviceView:
        """Revoke a device and cut its connections; a second call cuts them again."""
        device = services.registry.revoke(device_id)
        services.expel(device)
        logger.info("device=%s revoked", device.id)
        return _view(services.registry, device)

    @api.post("/devices/{device_id}/command", status_code=202)
    def command(device_id: str, body: Command, request: Request) -> DeviceView:
        """Send a device a command over MQTT; it is lost if the device is not connected.

        A key of scope train may send the invitation to train, and nothing else.
        """
        login = login_of(request)
        if body.op != INVITATION and login is not None and not login.has("operate"):
            raise ForbiddenError(f"a key of scope train may send {INVITATION} only, not {body.op}")
        device = services.registry.device(device_id)
        if not device.active:
            why = "waits for approval" if device.revoked_at is None else "is revoked"
            raise ForbiddenError(f"device {device_id} {why}, so it gets no command")
        if not services.command(device, body.model_dump()):
            raise NotReadyError("the broker takes no command now: it is away, or its queue is full")
        services.registry.trail.record(OPERATOR, "device.command", f"{device_id} {body.op}")
        return _view(services.registry, device)

    @api.post("/tokens", status_code=201)
    def create_token(body: TokenRequest) -> NewToken:
        """Make enrolment tokens: `count` for new devices, or one for a `device` that comes back."""
        root = services.root_bytes()  # it may fail, and comes before the tokens for that reason
        secrets = services.registry.create_tokens(
            body.count, body.fleet, body.ttl_s, body.note, approve=body.approve, device=body.device
        )
        made = [token_text(secret, root) for secret in secrets]
        back = None if body.device is None else services.registry.device(body.device)
        fleet = (body.fleet or "default") if back is None else back.fleet
        return NewToken(token=made[0], tokens=made, fleet=fleet, ttl_s=body.ttl_s)


def _let_in(
    services: DeviceServices, device: Device, credential: str, token: str, before: Device | None
) -> None:
    """Let an enrolled device log in at the broker: only now is its credential known in full.

    One that waits for approval is let in later. Nobody else goes on under the name of one that
    comes back.

    Raises: NotReadyError if the broker did not take the device; the token can be used again.
    """
    try:
        if device.last_seen is not None:
            services.expel(device)
        if device.active:
            services.admit(device, credential)
    except Exception as err:
        logger.exception("device=%s not enrolled: the broker did not take it", device.id)
        services.registry.undo_enrolment(device, token, before)
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
        profile = DeviceProfile.from_dict(data).to_dict()
    except InvalidProfileError as err:
        raise BadRequestError(str(err)) from err
    for field, value in profile.items():
        if isinstance(value, str) and not value.isprintable():  # people read it in lists and pages
            raise BadRequestError(
                f"profile: {field}: expected a text without line breaks and control characters, got"
                f" {value!r}; give it another one on the device"
            )
    return profile


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
                    "presence": state.presence,
                    "runs": state.runs,
                    "wants": state.wants,
                    "refused": state.refused,
                    "why": state.why,
                }
            )
        )
    return views
