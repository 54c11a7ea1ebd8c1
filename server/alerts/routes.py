"""Alerts for the operator: `GET /api/v1/alerts` and `POST /api/v1/alerts/silence`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from server.registry.alerts.alert import Alert
from server.registry.alerts.store import SHOWN_MOST, SILENCE_MOST_S
from server.routes.authentication import Presence


class AlertView(BaseModel):
    """An alert; times are UTC seconds since 1970, and `closed_at` is null while it is open."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    kind: str
    about: str
    text: str
    level: str
    opened_at: float
    closed_at: float | None
    silenced_until: float | None


class AlertList(BaseModel):
    """Alerts."""

    alerts: list[AlertView]


class Asked(BaseModel):
    """Filter of the alerts: the open ones, or with `closed` the newest of all."""

    model_config = ConfigDict(extra="forbid")

    closed: bool = False
    limit: int = Field(default=100, ge=1, le=SHOWN_MOST)


class Silence(BaseModel):
    """A silence of open alerts: `kind` "" means all kinds, 0 seconds ends it."""

    model_config = ConfigDict(extra="forbid")

    # the name of a training is that of a recipe's file
    about: str = Field(max_length=63, pattern=r"^[^\x00-\x1f\x7f]+$")
    kind: str = Field(default="", max_length=32)
    seconds: float = Field(ge=0, le=SILENCE_MOST_S, allow_inf_nan=False)


def router(services: Presence) -> APIRouter:
    """The routes over `services`."""
    api = APIRouter(prefix="/api/v1", tags=["alerts"])
    alerts = services.registry.alerts

    @api.get("/alerts")
    def shown(asked: Annotated[Asked, Query()]) -> AlertList:
        """The open alerts, oldest first; with `closed=true` the newest of all, newest first."""
        return _view(alerts.recent(asked.limit) if asked.closed else alerts.open()[: asked.limit])

    @api.post("/alerts/silence")
    def silence(body: Silence) -> AlertList:
        """Tell nobody about open alerts of a subject for a time; it holds if one opens again."""
        return _view(alerts.silence(body.kind, body.about, body.seconds))

    return api


def _view(found: list[Alert]) -> AlertList:
    return AlertList(alerts=[AlertView.model_validate(one) for one in found])
