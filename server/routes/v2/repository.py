"""The model repository extension of the Open Inference Protocol v2: list, load and unload models.

Loading and unloading is about the server's memory alone. What devices run, and the models that
fleets are assigned, do not change; devices whose model is unloaded answer alone. A restart loads
all models.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, Protocol

import orjson
from fastapi import APIRouter, Request

from edge_sdk.errors import BundleError
from server.backend.inference import Inference
from server.backend.models import ServedModel
from server.errors import BadRequestError
from server.registry.database import Registry
from server.registry.transactions import OPERATOR
from server.routes.authentication import login_of
from server.routes.bodies import read_body

BODY_BYTES: Final = 65_536
UNLOADED: Final = "unloaded"


class RepositoryServices(Protocol):
    """The part of the server that these routes need."""

    @property
    def inference(self) -> Inference:
        """The models."""

    @property
    def registry(self) -> Registry:
        """The audit log."""


def router(services: RepositoryServices) -> APIRouter:
    """The routes over `services`."""
    routes = APIRouter()
    models = services.inference.models

    @routes.post("/v2/repository/index")
    async def index(request: Request) -> list[dict[str, str]]:
        """The models, and whether each is ready; with `{"ready": true}` only those that are."""
        asked = await _json(request)
        login = login_of(request)
        names = None if login is None else login.models
        return [
            one
            for one in _index(services.inference)
            if (names is None or one["name"] in names)
            and (one["state"] == "READY" or asked.get("ready") is not True)
        ]

    @routes.post("/v2/repository/models/{name}/load")
    async def load(request: Request, name: str) -> dict[str, Any]:
        """Read a model from the disk again, and answer queries for it."""
        parameters = (await _json(request)).get("parameters") or {}
        if parameters:
            raise BadRequestError(
                f"parameters: expected none, got {', '.join(parameters)[:100]}; models come from"
                " the server's own disk, by `splitedge export`"
            )
        try:
            await asyncio.to_thread(models.load_name, name)
        except BundleError as err:
            raise BadRequestError(f"model {name}: cannot be loaded: {err}") from err
        await asyncio.to_thread(services.registry.trail.record, OPERATOR, "model.load", name)
        return {}

    @routes.post("/v2/repository/models/{name}/unload")
    async def unload(request: Request, name: str) -> dict[str, Any]:
        """Take a model out of memory, and refuse queries for it until it is loaded."""
        await _json(request)  # its one parameter is about models that need this one: none do
        await asyncio.to_thread(models.unload, name)
        await asyncio.to_thread(services.registry.trail.record, OPERATOR, "model.unload", name)
        return {}

    return routes


async def _json(request: Request) -> dict[str, Any]:
    """The JSON object of a request; empty without a body.

    Raises: BadRequestError; FrameTooLargeError.
    """
    body = await read_body(request, BODY_BYTES)
    try:
        found = orjson.loads(body) if body else {}
    except orjson.JSONDecodeError as err:
        raise BadRequestError(f"body: expected JSON ({err})") from err
    if not isinstance(found, dict) or not isinstance(found.get("parameters", {}), dict):
        raise BadRequestError("body: expected a JSON object, and one under `parameters`")
    return found


def _index(inference: Inference) -> list[dict[str, str]]:
    listed = []
    for model in inference.models.all():
        served = isinstance(model, ServedModel)
        listed.append(
            {
                "name": model.manifest.name,
                "version": model.manifest.version,
                "state": "READY" if served else "UNAVAILABLE",
                "reason": "" if served else UNLOADED,
            }
        )
    broken = [
        {"name": name, "version": version, "state": "UNAVAILABLE", "reason": reason}
        for (name, version), reason in inference.models.broken().items()
    ]
    return listed + broken
