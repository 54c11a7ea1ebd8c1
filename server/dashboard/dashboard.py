"""The dashboard as one router: the page, its facts, its actions, and signing in."""

from __future__ import annotations

from typing import Protocol

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from server.dashboard import actions, pages, reading, sign_in
from server.dashboard.actions import ActionServices
from server.dashboard.reading import ReadingServices


class DashboardServices(ActionServices, ReadingServices, Protocol):
    """The part of the server that the dashboard needs; called from several threads at once."""


def router(services: DashboardServices) -> APIRouter:
    """The dashboard over `services`; one line of text in its place where it is switched off."""
    routes = APIRouter()
    if not services.settings.dashboard:

        @routes.get("/", include_in_schema=False)
        async def off() -> PlainTextResponse:
            """The reason why there is no page."""
            text = "This splitedge server runs with --no-dashboard; its API is at /api/v1 and /v2."
            return PlainTextResponse(f"{text}\n", status_code=404)

        return routes
    guard = sign_in.SignIn(services)
    routes.include_router(pages.router())
    routes.include_router(sign_in.router(services, guard))
    routes.include_router(reading.router(services, guard))
    routes.include_router(actions.router(services, guard))
    return routes
