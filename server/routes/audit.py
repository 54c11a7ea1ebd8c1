"""The audit log for the operator: `GET /api/v1/audit`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from server.registry.trail.trail import SHOWN_MOST
from server.routes.authentication import Presence

# a database may refuse other letters, such as a zero byte
_PRINTABLE: Final = r"^[^\x00-\x1f\x7f]*$"


class EntryView(BaseModel):
    """An entry of the audit log; times are UTC seconds since 1970."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    at: float
    until: float
    who: str
    what: str
    source: str
    outcome: str
    count: int
    detail: str


class Asked(BaseModel):
    """Filter of the entries: `since` a time, `after` the entry of an id.

    `what=device.` names all kinds that begin so.
    """

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(default=100, ge=1, le=SHOWN_MOST)
    since: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    after: int | None = Field(default=None, ge=0, le=2**62)
    who: str | None = Field(default=None, max_length=80, pattern=_PRINTABLE)
    about: str | None = Field(default=None, max_length=80, pattern=r"^[a-z0-9-]+$")
    what: str | None = Field(default=None, max_length=40, pattern=_PRINTABLE)
    outcome: Literal["done", "refused"] | None = None


class EntryList(BaseModel):
    """Entries, newest first."""

    entries: list[EntryView]


def router(services: Presence) -> APIRouter:
    """The route over `services`."""
    api = APIRouter(prefix="/api/v1", tags=["audit"])

    @api.get("/audit")
    def entries(asked: Annotated[Asked, Query()]) -> EntryList:
        """Entries, newest first: who did what, from where, when, with which outcome."""
        found = services.registry.trail.entries(
            asked.limit,
            since=asked.since,
            after=asked.after,
            who=asked.who,
            about=asked.about,
            what=asked.what,
            outcome=asked.outcome,
        )
        return EntryList(entries=[EntryView.model_validate(one) for one in found])

    return api
