"""The state of signing, for the operator: `/api/v1/signing`, as `splitedge server root show`."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from server.routes.authentication import Presence
from server.signing.artifacts import ArtifactRepository
from server.signing.report import signing_report


class SigningServices(Presence, Protocol):
    """The part of the server that these routes need; called from several threads at once."""

    @property
    def artifacts(self) -> ArtifactRepository:
        """The signed bundles."""


class RoleView(BaseModel):
    """A role of the signed metadata: its keys by the start of their ids, and its end."""

    model_config = ConfigDict(from_attributes=True)

    role: str
    keys: list[str]
    threshold: int
    keys_in_state: int
    encrypted: bool
    expires: datetime | None


class SigningView(BaseModel):
    """Whether the server signs, and what someone has to act on."""

    model_config = ConfigDict(from_attributes=True)

    signs: bool
    root_version: int
    last_signed: datetime | None
    roles: list[RoleView]
    problems: list[str]


def router(services: SigningServices) -> APIRouter:
    """The route over `services`."""
    api = APIRouter(prefix="/api/v1", tags=["signing"])

    @api.get("/signing")
    def signing() -> SigningView:
        """Keys and end dates of what is signed, and what to act on."""
        return SigningView.model_validate(signing_report(services.artifacts))

    return api
