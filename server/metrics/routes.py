"""The metrics of the server for Prometheus: `GET /metrics`."""

from __future__ import annotations

from typing import Protocol

from fastapi import APIRouter, Request, Response

from server.metrics.server_metrics import BackendMetrics


class MetricServices(Protocol):
    """The part of the server that this route needs."""

    @property
    def metrics(self) -> BackendMetrics:
        """The metrics."""


def router(services: MetricServices) -> APIRouter:
    """The route over `services`."""
    routes = APIRouter(tags=["metrics"])

    @routes.get("/metrics", response_class=Response)
    def metrics(request: Request) -> Response:
        """Metrics in the text format of Prometheus, or as OpenMetrics."""
        body, content_type = services.metrics.text(request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    return routes
