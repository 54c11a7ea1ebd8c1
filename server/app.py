"""The HTTP application: routes over services."""

from __future__ import annotations

from fastapi import FastAPI, Request

import edge_sdk
from server.routes import artifacts, capabilities, devices, errors, inference, models
from server.routes.authentication import authenticate
from server.services import Services


def create_app(services: Services) -> FastAPI:
    """Build the application over running services."""
    app = FastAPI(title="splitedge", version=edge_sdk.__version__, redoc_url=None)
    errors.install(app)

    def authorize_inference(request: Request) -> None:
        if not services.settings.open_inference:
            authenticate(services, request)

    app.include_router(inference.router(services.inference, authorize_inference))
    app.include_router(devices.router(services))
    app.include_router(capabilities.router(services))
    app.include_router(models.router(services))
    app.include_router(artifacts.router(services))
    return app
