"""The server and its models by the Open Inference Protocol v2: health, metadata, configuration.

Inference is in `inference.py`, loading and unloading in `repository.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

import edge_sdk
from edge_sdk.manifest import TensorSpec
from edge_sdk.wire.answers import datatype_of
from server.access.rules import Login
from server.backend.inference import Inference
from server.backend.models import ServedModel
from server.backend.statistics import ModelCounts, Sum
from server.routes.authentication import login_of

# of a network whose last layer is on the device: nothing here knows its labels
FEATURES: Final = "features"
EXTENSIONS: Final = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "statistics",
)

_NS: Final = 1e9
_TYPES: Final = {"BOOL": "TYPE_BOOL", "BYTES": "TYPE_STRING"}


def router(inference: Inference) -> APIRouter:
    """The routes that describe the server and its models."""
    routes = APIRouter()

    @routes.get("/v2")
    async def server() -> dict[str, Any]:
        extensions = list(EXTENSIONS)
        return {"name": "splitedge", "version": edge_sdk.__version__, "extensions": extensions}

    @routes.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @routes.get("/v2/health/ready")
    async def ready() -> Response:
        """200 if a model is loaded and the queue takes queries, else 503."""
        ok = inference.ready
        return JSONResponse({"ready": ok}, status_code=200 if ok else 503)

    @routes.get("/v2/models/stats")
    async def all_stats(request: Request) -> dict[str, Any]:
        """Statistics of all models that the sender may ask."""
        return _stats(inference, [one for one in _served(inference) if may_ask(request, one)])

    @routes.get("/v2/models/{name}")
    @routes.get("/v2/models/{name}/versions/{version}")
    async def model(request: Request, name: str, version: str | None = None) -> dict[str, Any]:
        """Inputs and outputs of a model."""
        check_model(request, name)
        found = inference.models.served(name, version)
        versions = [one.manifest.version for one in _served(inference, name)]
        return _metadata(found, versions)

    @routes.get("/v2/models/{name}/config")
    @routes.get("/v2/models/{name}/versions/{version}/config")
    async def config(request: Request, name: str, version: str | None = None) -> dict[str, Any]:
        """Configuration of a model, in the form of Triton's."""
        check_model(request, name)
        return _config(inference.models.served(name, version), inference.batch_max)

    @routes.get("/v2/models/{name}/stats")
    @routes.get("/v2/models/{name}/versions/{version}/stats")
    async def stats(request: Request, name: str, version: str | None = None) -> dict[str, Any]:
        """Statistics of a model, of one version or of all, since the server started."""
        check_model(request, name)
        found = inference.models.served(name, version)
        return _stats(inference, _served(inference, name) if version is None else [found])

    @routes.get("/v2/models/{name}/ready")
    @routes.get("/v2/models/{name}/versions/{version}/ready")
    async def model_ready(request: Request, name: str, version: str | None = None) -> Response:
        check_model(request, name)
        inference.models.served(name, version)
        return JSONResponse({"ready": True})

    return routes


def check_model(request: Request, name: str) -> Login | None:
    """Check that the sender of a request may ask a model.

    Returns: who it is.
    Raises: ForbiddenError.
    """
    login = login_of(request)
    if login is not None:
        login.check_model(name)
    return login


def may_ask(request: Request, model: ServedModel) -> bool:
    """Whether the sender of a request may ask a model."""
    login = login_of(request)
    return login is None or login.models is None or model.manifest.name in login.models


def _served(inference: Inference, name: str | None = None) -> list[ServedModel]:
    """The models in memory, of all names or of one."""
    return [
        model
        for model in inference.models.all()
        if isinstance(model, ServedModel) and name in (None, model.manifest.name)
    ]


def _inputs(model: ServedModel) -> list[tuple[str, TensorSpec]]:
    """Name and form of each complete input: the raw sample, or smashed data at one of the cuts."""
    return [
        ("x" if segment.entry == 0 else f"z{segment.entry}", segment.input)
        for segment in model.manifest.segments
    ]


def _outputs(model: ServedModel) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape of each output of one sample."""
    if model.engine.output == FEATURES:
        return [(FEATURES, "FP32", model.manifest.segments[-1].output.shape)]
    classes = (len(model.manifest.class_names),)
    return [("logits", "FP32", classes), ("probabilities", "FP32", classes), ("label", "INT64", ())]


def _metadata(model: ServedModel, versions: Sequence[str]) -> dict[str, Any]:
    manifest = model.manifest
    return {
        "name": manifest.name,
        "versions": list(versions),
        "platform": "onnxruntime_onnx",
        "inputs": [
            {"name": name, "datatype": datatype_of(spec.dtype), "shape": [-1, *spec.shape]}
            for name, spec in _inputs(model)
        ],
        "outputs": [
            {"name": name, "datatype": datatype, "shape": [-1, *shape]}
            for name, datatype, shape in _outputs(model)
        ],
        "parameters": {"one_input_of_these": True, "class_names": list(manifest.class_names)},
    }


def _config(model: ServedModel, batch_max: int) -> dict[str, Any]:
    manifest = model.manifest
    return {
        "name": manifest.name,
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "version_policy": {"all": {}},
        "max_batch_size": batch_max,
        # a query has one of these
        "input": [
            {
                "name": name,
                "data_type": _type(datatype_of(spec.dtype)),
                "dims": list(spec.shape),
                "optional": True,
            }
            for name, spec in _inputs(model)
        ],
        "output": [
            # Triton counts a value for each sample as one dimension
            {"name": name, "data_type": _type(datatype), "dims": list(shape) or [1]}
            for name, datatype, shape in _outputs(model)
        ],
        "instance_group": [{"name": manifest.name, "kind": "KIND_CPU", "count": 1}],
        "default_model_filename": "model.json",
        "dynamic_batching": {"preferred_batch_size": [batch_max]},
        "parameters": {
            "backbone": {"string_value": manifest.backbone},
            "version": {"string_value": manifest.version},
        },
    }


def _type(datatype: str) -> str:
    """Triton's word for a datatype of the protocol."""
    return _TYPES.get(datatype, f"TYPE_{datatype}")


def _stats(inference: Inference, models: Sequence[ServedModel]) -> dict[str, Any]:
    return {
        "model_stats": [
            {
                "name": model.manifest.name,
                "version": model.manifest.version,
                **_counted(inference.statistics.of(model.engine)),
            }
            for model in models
        ]
    }


def _counted(counts: ModelCounts) -> dict[str, Any]:
    nothing = _duration(Sum())
    return {
        "last_inference": round(1e3 * counts.last_at),
        "inference_count": counts.samples,
        "execution_count": counts.batches,
        "inference_stats": {
            "success": _duration(counts.success),
            "fail": _duration(counts.failure),
            "queue": _duration(counts.queue),
            "compute_input": nothing,
            "compute_infer": _duration(counts.compute),  # inputs and outputs are joined in it
            "compute_output": nothing,
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": nothing,
                "compute_infer": _duration(total),
                "compute_output": nothing,
            }
            for size, total in counts.by_size.items()
        ],
        "memory_usage": [],
        "response_stats": {},
    }


def _duration(total: Sum) -> dict[str, int]:
    return {"count": total.count, "ns": round(_NS * total.seconds)}
