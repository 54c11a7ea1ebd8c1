"""The Open Inference Protocol v2 over HTTP: health, models, inference.

Bodies are parsed here, not by FastAPI: existing clients send no Content-Type, ask for binary
tensors by default, and read errors only as `{"error": ...}`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

import edge_sdk
from edge_sdk.session import Array
from edge_sdk.wire.answers import HEADER_LENGTH, datatype_of, pack_answer, read_header_length
from edge_sdk.wire.frames import HTTP_LIMITS, Frame, decode
from edge_sdk.wire.messages import Query, frame_id, read_deadline
from server.backend.inference import Inference
from server.backend.models import ServedModel
from server.errors import BadRequestError, ServerError
from server.routes.bodies import BodyBudget, read_body

# JSON makes a Python object of every value: 10 MB took 1.4 s, as binary a few ms
JSON_BYTES: Final = 1_000_000
LIMITS: Final = replace(HTTP_LIMITS, header_bytes=JSON_BYTES)
# a longer body is parsed in a thread; a shorter one is parsed before a thread would have woken
SHORT_BYTES: Final = 65_536
LONG_BODIES_BYTES: Final = 64_000_000

# of a network whose last layer is on the device: nothing here knows its labels
FEATURES: Final = "features"


def router(inference: Inference, authorize: Callable[[Request], None]) -> APIRouter:
    """The v2 routes.

    Args:
        authorize: raises AuthenticationError for a request without a valid credential.
    """
    routes = APIRouter()
    budget = BodyBudget(LONG_BODIES_BYTES, SHORT_BYTES)
    guarded = [Depends(_as_dependency(authorize))]

    @routes.get("/v2")
    def server() -> dict[str, Any]:
        extensions = ["binary_tensor_data", "model_repository"]
        return {"name": "splitedge", "version": edge_sdk.__version__, "extensions": extensions}

    @routes.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @routes.get("/v2/health/ready")
    async def ready() -> Response:
        """200 if a model is loaded and the queue takes queries, else 503."""
        ok = inference.ready
        return JSONResponse({"ready": ok}, status_code=200 if ok else 503)

    @routes.post("/v2/repository/index")
    async def index() -> list[dict[str, str]]:
        return _index(inference)

    @routes.get("/v2/models/{name}")
    @routes.get("/v2/models/{name}/versions/{version}")
    async def model(name: str, version: str | None = None) -> dict[str, Any]:
        found = inference.models.get(name, version)
        versions = [m.manifest.version for m in inference.models.all() if m.manifest.name == name]
        return _metadata(found, versions)

    @routes.get("/v2/models/{name}/ready")
    @routes.get("/v2/models/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str | None = None) -> Response:
        inference.models.get(name, version)
        return JSONResponse({"ready": True})

    @routes.post("/v2/models/{name}/infer", dependencies=guarded)
    @routes.post("/v2/models/{name}/versions/{version}/infer", dependencies=guarded)
    async def infer(request: Request, name: str, version: str | None = None) -> Response:
        with budget.body() as grown:
            length = read_header_length(request.headers.get(HEADER_LENGTH))
            limit = JSON_BYTES if length is None else LIMITS.frame_bytes
            body = await read_body(request, limit, grown)
            answer = _Answer()

            def ask() -> tuple[Frame, Query, ServedModel]:
                frame = decode(body, length, LIMITS)
                query = _query(frame, name, version)
                return frame, query, inference.submit(query, answer.done)

            asked = ask() if len(body) <= SHORT_BYTES else await asyncio.to_thread(ask)
            return _respond(*asked, await answer.outputs())

    return routes


def _as_dependency(authorize: Callable[[Request], None]) -> Callable[[Request], None]:
    # FastAPI reads the annotations of a dependency, which a plain callable does not have
    def check(request: Request) -> None:
        authorize(request)

    return check


def _index(inference: Inference) -> list[dict[str, str]]:
    manifests = [model.manifest for model in inference.models.all()]
    listed = [
        {"name": manifest.name, "version": manifest.version, "state": "READY", "reason": ""}
        for manifest in manifests
    ]
    broken = [
        {"name": name, "version": version, "state": "UNAVAILABLE", "reason": reason}
        for (name, version), reason in inference.models.broken().items()
    ]
    return listed + broken


def _metadata(model: ServedModel, versions: Sequence[str]) -> dict[str, Any]:
    manifest = model.manifest
    classes = len(manifest.class_names)
    # each of these is a complete input: the raw sample, or smashed data at one of the cuts
    inputs = [
        {
            "name": "x" if segment.entry == 0 else f"z{segment.entry}",
            "datatype": datatype_of(segment.input.dtype),
            "shape": [-1, *segment.input.shape],
        }
        for segment in manifest.segments
    ]
    outputs = [
        {"name": "logits", "datatype": "FP32", "shape": [-1, classes]},
        {"name": "probabilities", "datatype": "FP32", "shape": [-1, classes]},
        {"name": "label", "datatype": "INT64", "shape": [-1]},
    ]
    if model.engine.output == FEATURES:
        shape = [-1, *manifest.segments[-1].output.shape]
        outputs = [{"name": FEATURES, "datatype": "FP32", "shape": shape}]
    return {
        "name": manifest.name,
        "versions": list(versions),
        "platform": "onnxruntime_onnx",
        "inputs": inputs,
        "outputs": outputs,
        "parameters": {"one_input_of_these": True, "class_names": list(manifest.class_names)},
    }


def _query(frame: Frame, name: str, version: str | None) -> Query:
    if len(frame.tensors) != 1:
        raise BadRequestError(f"inputs: expected one tensor, got {len(frame.tensors)}")
    deadline_ms = read_deadline(frame.parameters)
    return Query(frame_id(frame), name, version, frame.tensors[0], deadline_ms)


class _Answer:
    """The answer of the engine's thread, handed to the event loop that made this object."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Array | ServerError] = self._loop.create_future()

    def done(self, outcome: Array | ServerError) -> None:
        """Hand over the outcome, from any thread."""
        self._loop.call_soon_threadsafe(self._settle, outcome)

    async def outputs(self) -> Array:
        """Wait for the outcome.

        Raises: ServerError if the outcome is an error.
        """
        outcome = await self._outcome
        if isinstance(outcome, ServerError):
            raise outcome
        return outcome

    def _settle(self, outcome: Array | ServerError) -> None:
        if not self._outcome.done():  # the client may have disconnected
            self._outcome.set_result(outcome)


def _respond(frame: Frame, query: Query, model: ServedModel, outputs: Array) -> Response:
    computed = {FEATURES: outputs} if model.engine.output == FEATURES else _outputs(outputs)
    header: dict[str, Any] = {
        "model_name": model.manifest.name,
        "model_version": model.manifest.version,
    }
    if query.id:
        header["id"] = query.id
    body, length = pack_answer(frame, header, computed)
    if length is None:
        return Response(body, media_type="application/json")
    headers = {HEADER_LENGTH: str(length)}
    return Response(body, media_type="application/octet-stream", headers=headers)


def _outputs(logits: Array) -> dict[str, Array]:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return {
        "logits": logits,
        "probabilities": weights / weights.sum(axis=1, keepdims=True),
        "label": logits.argmax(axis=1),
    }
