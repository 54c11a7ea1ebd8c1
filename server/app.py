"""The HTTP application of a server: those of every role, and all that manages a fleet."""

from __future__ import annotations

from fastapi import FastAPI

from server.alerts import routes as alerts
from server.audit.requests import AuditRequests
from server.dashboard import dashboard
from server.every_role.query_routes import query_app
from server.rollouts import routes as rollouts
from server.routes import (
    audit,
    capabilities,
    devices,
    documentation,
    membership,
    models,
    signing,
)
from server.routes.v2 import repository
from server.services import Services
from server.telemetry import routes as telemetry


def create_app(services: Services) -> FastAPI:
    """Build the application of a server over running services."""
    app = query_app(services)
    app.add_middleware(AuditRequests, log=services.audit)  # it sees what the guard refuses
    app.include_router(repository.router(services))
    app.include_router(devices.router(services))
    app.include_router(capabilities.router(services))
    app.include_router(membership.router(services))
    app.include_router(models.router(services))
    app.include_router(rollouts.router(services))
    app.include_router(alerts.router(services))
    app.include_router(audit.router(services))
    app.include_router(telemetry.router(services))
    app.include_router(signing.router(services))
    app.include_router(documentation.router(app))
    app.include_router(dashboard.router(services))
    return app
