"""The HTTP application: routes over services."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse

import edge_sdk
from server.errors import AuthenticationError
from server.registry.credentials import is_secret
from server.routes import devices, errors, inference
from server.routes.errors import error_response
from server.services import Services


def create_app(services: Services) -> FastAPI:
    """The application over running services."""
    app = FastAPI(
        title="splitedge",
        version=edge_sdk.__version__,
        docs_url="/docs",
        redoc_url=None,
    )
    errors.install(app)
    app.include_router(inference.router(services.inference, _inference_guard(services)))
    app.include_router(devices.router(services))

    @app.get("/tuf/{part}/{path:path}", response_model=None)
    def signed_file(request: Request, part: str, path: str) -> Response:
        """TUF metadata and targets; ranges are honoured, so a download resumes."""
        authenticate(services, request)
        folder = {
            "metadata": services.artifacts.metadata_folder,
            "targets": services.artifacts.targets_folder,
        }.get(part)
        file = None if folder is None else (folder / path).resolve()
        inside = file is not None and folder is not None and file.is_relative_to(folder.resolve())
        if file is None or not inside or not file.is_file():
            return error_response(404, f"{part}/{path}: not there")
        return FileResponse(file, media_type="application/octet-stream")

    return app


def authenticate(services: Services, request: Request) -> None:
    """See that a device or the operator asks.

    Raises: AuthenticationError.
    """
    scheme, _, login = request.headers.get("authorization", "").partition(" ")
    name, colon, secret = login.partition(":")
    if scheme.lower() != "bearer" or not colon:
        raise AuthenticationError("expected the header Authorization: Bearer DEVICE:CREDENTIAL")
    if name == "operator":
        if not is_secret(secret, services.operator_sha256):
            raise AuthenticationError("operator: wrong secret")
        return
    services.registry.authenticate(name, secret)


def _inference_guard(services: Services) -> Callable[[Request], None]:
    def check(request: Request) -> None:
        if not services.settings.open_inference:
            authenticate(services, request)

    return check
