"""The facts as the page reads them: JSON, compressed, and unchanged facts are not sent again.

What many open pages ask for is worked out once a second at most, so that watching a fleet takes no
time from its queries.
"""

from __future__ import annotations

import gzip
import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Protocol

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

import edge_sdk
from server.dashboard.facts.device import device_facts
from server.dashboard.facts.fleet import FleetLine, FleetReader
from server.dashboard.facts.history import history_facts
from server.dashboard.facts.models import model_facts
from server.dashboard.facts.rollouts import rollout_facts
from server.dashboard.facts.training import training_facts
from server.dashboard.pages import SAFE_HEADERS
from server.dashboard.sign_in import SignIn, SignInServices
from server.registry.records import FleetModel
from server.registry.telemetry.history import AGE_MOST_S
from server.rollouts.overview import NewestRollouts, rollout_state
from server.routes.audit import Asked
from server.settings import ServerSettings

FRESH_S: Final = 1.0
OLD_S: Final = 10.0
# of the answers of all devices in the last hour, which are summed up by the minute
HISTORY_FRESH_S: Final = 10.0
COMPRESS_BYTES: Final = 2_000


class ReadingServices(SignInServices, Protocol):
    """The part of the server that these routes need; called from several threads at once."""

    @property
    def settings(self) -> ServerSettings:
        """The state folder."""


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """All devices, the models of the fleets, and what the page needs to say of the server.

    Attributes:
        local: whether only this machine reaches it.
    """

    version: str
    local: bool
    devices: list[FleetLine]
    fleets: tuple[FleetModel, ...]


class Window(BaseModel):
    """The stretch of time that charts show, up to now."""

    model_config = ConfigDict(extra="forbid")

    since_s: float = Field(default=3600.0, ge=60, le=AGE_MOST_S, allow_inf_nan=False)


class Fresh:
    """Bytes of facts, worked out again when they are older than `fresh_s`; from any thread.

    Args:
        work: works them out; one thread at a time calls it.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        work: Callable[[], Any],
        *,
        fresh_s: float = FRESH_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self._fresh_s = fresh_s
        self._clock = clock
        self._lock = threading.Lock()
        self._made_at = 0.0
        self._facts: bytes | None = None

    def get(self) -> bytes:
        """The facts as JSON; one thread at a time works them out.

        Meanwhile the others get those of before, unless these are much older.
        """
        facts, age_s = self._facts, self._clock() - self._made_at
        if facts is not None and age_s < self._fresh_s:
            return facts
        old_s = max(OLD_S, 2 * self._fresh_s)
        if not self._lock.acquire(blocking=facts is None or age_s >= old_s):
            assert facts is not None
            return facts
        try:
            if self._facts is None or self._clock() - self._made_at >= self._fresh_s:
                self._facts = orjson.dumps(self._work())
                self._made_at = self._clock()
            return self._facts
        finally:
            self._lock.release()


def router(services: ReadingServices, sign_in: SignIn) -> APIRouter:
    """The facts of each page over `services`."""
    routes = APIRouter(
        prefix="/dashboard/facts",
        dependencies=[Depends(sign_in.reader)],
        include_in_schema=False,
    )
    _add_shared(routes, services)
    _add_devices(routes, services)
    _add_lists(routes, services)
    return routes


def _add_shared(routes: APIRouter, services: ReadingServices) -> None:
    """The facts that are the same for all who look."""
    registry = services.registry
    models = services.settings.state / "models"
    fleet = Fresh(partial(_fleet, services, FleetReader(registry)))
    rollouts = Fresh(partial(rollout_facts, registry, NewestRollouts(registry)))
    hour = Fresh(registry.telemetry.of_fleet, fresh_s=HISTORY_FRESH_S)
    versions = Fresh(partial(model_facts, registry, models))

    @routes.get("/fleet")
    def show_fleet(request: Request) -> Response:
        """All devices."""
        return _answer(fleet.get(), request)

    @routes.get("/history")
    def show_answers(window: Annotated[Window, Query()], request: Request) -> Response:
        """The answers of all devices over time."""
        if window == Window():
            return _answer(hour.get(), request)
        found = registry.telemetry.of_fleet(since_s=window.since_s)
        return _answer(orjson.dumps(found), request)

    @routes.get("/models")
    def show_models(request: Request) -> Response:
        """All models."""
        return _answer(versions.get(), request)

    @routes.get("/rollouts")
    def show_rollouts(request: Request) -> Response:
        """The newest roll-outs, and what a new one can be of."""
        return _answer(rollouts.get(), request)


def _add_devices(routes: APIRouter, services: ReadingServices) -> None:
    """The facts of one device."""
    registry = services.registry
    models = services.settings.state / "models"

    @routes.get("/devices/{device_id}")
    def show_device(device_id: str, request: Request) -> Response:
        """One device."""
        found = device_facts(registry, models, device_id)
        return _answer(orjson.dumps(found), request)

    @routes.get("/devices/{device_id}/history")
    def show_history(
        device_id: str, window: Annotated[Window, Query()], request: Request
    ) -> Response:
        """One device over time."""
        found = history_facts(registry, models, device_id, window.since_s)
        return _answer(orjson.dumps(found), request)


def _add_lists(routes: APIRouter, services: ReadingServices) -> None:
    """The facts of the other pages, worked out for each request."""
    registry, settings = services.registry, services.settings

    @routes.get("/rollouts/{rollout_id}")
    def show_rollout(rollout_id: int, request: Request) -> Response:
        """One roll-out with all its devices."""
        return _answer(orjson.dumps(rollout_state(registry, rollout_id)), request)

    @routes.get("/alerts")
    def show_alerts(request: Request) -> Response:
        """The open alerts, oldest first, and then the newest that are closed."""
        closed = [one for one in registry.alerts.recent() if one.closed_at is not None]
        return _answer(orjson.dumps([*registry.alerts.open(), *closed]), request)

    @routes.get("/training")
    def show_trainings(request: Request, of: str | None = None) -> Response:
        """All trainings, and the rounds of one."""
        found = training_facts(settings.state / "training", of)
        return _answer(orjson.dumps(found), request)

    @routes.get("/audit")
    def show_audit(asked: Annotated[Asked, Query()], request: Request) -> Response:
        """The newest entries of the audit log."""
        filters = asked.model_dump()
        found = registry.trail.entries(filters.pop("limit"), **filters)
        return _answer(orjson.dumps({"entries": found}), request)


def _fleet(services: ReadingServices, reader: FleetReader) -> FleetFacts:
    settings, registry = services.settings, services.registry
    return FleetFacts(
        version=edge_sdk.__version__,
        local=settings.local,
        devices=reader.lines(),
        fleets=registry.catalogue.fleets(),
    )


def _answer(facts: bytes, request: Request) -> Response:
    """The facts, or 304 if the page has them already."""
    tag = f'"{hashlib.sha256(facts).hexdigest()[:32]}"'
    headers = {
        **SAFE_HEADERS,
        # kept to be asked about again; no other user of the browser gets to see it
        "Cache-Control": "private, no-cache",
        "ETag": tag,
        "Vary": "Accept-Encoding, Cookie",
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    if len(facts) >= COMPRESS_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        facts = gzip.compress(facts, 1)
    return Response(facts, media_type="application/json", headers=headers)
