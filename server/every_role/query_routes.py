"""The HTTP application that every role has: queries, models, signed bundles, load, metrics.

Each process answers them from its own memory, so any of several may get a request.
"""

from __future__ import annotations

from typing import Protocol

from fastapi import FastAPI

import edge_sdk
from server.access.recent_logins import RecentLogins
from server.backend.inference import Inference
from server.metrics import routes as metrics
from server.metrics.server_metrics import BackendMetrics
from server.overload.early_refusals import EarlyRefusals
from server.routes import artifacts, errors, load
from server.routes.authentication import Guard, Presence
from server.routes.v2 import inference
from server.routes.v2 import models as v2_models
from server.routes.v2.inference import Queries
from server.settings import ServerSettings
from server.signing.artifacts import SignedFiles


class QueryServices(Presence, Protocol):
    """The parts of a process that these routes need."""

    @property
    def settings(self) -> ServerSettings:
        """The address of the process, and its limits."""

    @property
    def inference(self) -> Inference:
        """The models and the engine."""

    @property
    def signed(self) -> SignedFiles:
        """The signed bundles."""

    @property
    def recent_logins(self) -> RecentLogins:
        """The logins of the last queries."""

    @property
    def metrics(self) -> BackendMetrics:
        """The metrics."""


def query_app(services: QueryServices) -> FastAPI:
    """The application; a role with more routes adds them."""
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
    app.add_middleware(
        Guard,
        services=services,
        loopback=services.settings.local,
        recent=services.recent_logins,
    )
    app.add_middleware(EarlyRefusals, senders=services.inference.senders)
    app.include_router(v2_models.router(services.inference))
    app.include_router(inference.router())
    app.include_router(load.router(services))
    app.include_router(artifacts.router(services))
    app.include_router(metrics.router(services))
    return app
