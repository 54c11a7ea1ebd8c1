"""The HTTP application: routes over services."""

from __future__ import annotations

from fastapi import FastAPI

import edge_sdk
from server.alerts import routes as alerts
from server.audit.requests import AuditRequests
from server.dashboard import dashboard
from server.metrics import routes as metrics
from server.overload.early_refusals import EarlyRefusals
from server.rollouts import routes as rollouts
from server.routes import (
    artifacts,
    audit,
    capabilities,
    devices,
    documentation,
    errors,
    load,
    membership,
    models,
    signing,
)
from server.routes.authentication import Guard
from server.routes.v2 import inference, repository
from server.routes.v2 import models as v2_models
from server.routes.v2.inference import Queries
from server.services import Services
from server.telemetry import routes as telemetry


def create_app(services: Services) -> FastAPI:
    """Build the application over running services."""
    app = FastAPI(
        title="splitedge",
        version=edge_sdk.__version__,
        redoc_url=None,
        docs_url=None,
        openapi_url=None,
        # FastAPI's own, which asks three providers at each request, and would send to wherever
        # OTEL_EXPORTER_OTLP_ENDPOINT points
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    errors.install(app)
    app.add_middleware(Queries, inference=services.inference)  # the innermost, behind the guard
    app.add_middleware(Guard, services=services, loopback=services.settings.local)
    app.add_middleware(EarlyRefusals, senders=services.inference.senders)
    app.add_middleware(AuditRequests, log=services.audit)  # it sees what the guard refuses
    app.include_router(v2_models.router(services.inference))
    app.include_router(repository.router(services))
    app.include_router(inference.router())
    app.include_router(load.router(services))
    app.include_router(devices.router(services))
    app.include_router(capabilities.router(services))
    app.include_router(membership.router(services))
    app.include_router(models.router(services))
    app.include_router(rollouts.router(services))
    app.include_router(artifacts.router(services))
    app.include_router(alerts.router(services))
    app.include_router(audit.router(services))
    app.include_router(telemetry.router(services))
    app.include_router(metrics.router(services))
    app.include_router(signing.router(services))
    app.include_router(documentation.router(app))
    app.include_router(dashboard.router(services))
    return app
