"""Inference of the v2 protocol on a device: raw input in, the agent's answers out.

For one row, what the answer is from stands in the response's parameters. For several rows it stands
in output tensors of one value a row.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edge_sdk.answers.prediction import Prediction
from edge_sdk.errors import FrameError, shown
from edge_sdk.manifest import BundleManifest, TensorSpec
from edge_sdk.service.messages import Request, RequestError, Response, json_response
from edge_sdk.session import Array
from edge_sdk.tracing.caller import called_in
from edge_sdk.wire.answers import HEADER_LENGTH, datatype_of, pack_answer, read_header_length
from edge_sdk.wire.frames import HTTP_LIMITS, Frame, Tensor, decode
from edge_sdk.wire.messages import RAW_INPUT, frame_id, read_deadline
from edge_sdk.wire.traceparent import TRACEPARENT, read_traceparent
from profiles.checks import is_number

if TYPE_CHECKING:
    from edge_sdk.agent import EdgeAgent

# JSON makes a Python object of each value: a body of 4 MB takes about 30 MB while it is read
JSON_BYTES: Final = 4_000_000
LIMITS: Final = replace(HTTP_LIMITS, header_bytes=JSON_BYTES)
ROWS_MAX: Final = 4096

ANSWERS: Final = ("label", "probabilities")
ORIGINS: Final = ("source", "uncertainty", "threshold", "latency_ms")
FLOAT_MAX: Final = sys.float_info.max


def body_limit(header_length: str | None) -> int:
    """Bytes that a body may have; one with binary tensors may have more than one of JSON alone."""
    return JSON_BYTES if header_length is None else LIMITS.frame_bytes


def find(manifest: BundleManifest, name: str, version: str | None) -> BundleManifest:
    """The bundle that runs here, if it has that model and version.

    Raises: RequestError naming the model that the device has.
    """
    if name != manifest.model or version not in (None, manifest.version):
        asked = name if version is None else f"{name} version {version}"
        raise RequestError(
            404,
            f"{asked!r:.100}: no such model; this device has {manifest.model} version"
            f" {manifest.version} (bundle {manifest.bundle})",
        )
    return manifest


def metadata(manifest: BundleManifest) -> dict[str, Any]:
    """Description of the model: inputs, outputs, class names."""
    classes = len(manifest.class_names)
    datatype = datatype_of(manifest.input.dtype)
    return {
        "name": manifest.model,
        "versions": [manifest.version],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": RAW_INPUT, "datatype": datatype, "shape": [-1, *manifest.input.shape]}],
        "outputs": [
            {"name": "label", "datatype": "INT64", "shape": [-1]},
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, classes]},
        ],
        "parameters": {
            "bundle": manifest.bundle,
            "depth": manifest.depth,
            "class_names": list(manifest.class_names),
        },
    }


def infer(agent: EdgeAgent, request: Request) -> Response:
    """Answer an inference request.

    Its parameters may hold `deadline_ms`, `threshold` and `local`, for this request only.

    Raises: FrameError, InputError for a bad request; RequestError if the bundle changes meanwhile.
    """
    frame, answers, manifest = _ask(agent, request)
    header: dict[str, Any] = {"model_name": manifest.model, "model_version": manifest.version}
    if identifier := frame_id(frame):
        header["id"] = identifier
    if len(answers) == 1:
        header["parameters"] = _parameters(answers[0])
    body, length = pack_answer(frame, header, _outputs(frame, answers))
    if length is None:
        return Response(200, body)
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(length)}
    return Response(200, body, headers)


def predict(agent: EdgeAgent, request: Request) -> Response:
    """Answer an inference request with whole predictions as JSON, for the command line."""
    _, answers, _ = _ask(agent, request)
    return json_response({"predictions": [as_row(answer) for answer in answers]})


def as_row(prediction: Prediction) -> dict[str, Any]:
    """A prediction as JSON takes it; a number that is not finite becomes null there."""
    return {**asdict(prediction), "probabilities": prediction.probabilities.tolist()}


def _ask(agent: EdgeAgent, request: Request) -> tuple[Frame, list[Prediction], BundleManifest]:
    length = read_header_length(request.headers.get(HEADER_LENGTH.lower()))
    frame = decode(request.body, length, LIMITS)
    manifest = agent.manifest
    if len(frame.tensors) != 1:
        raise FrameError(f"inputs: expected one tensor, got {len(frame.tensors)}")
    rows = _rows(frame.tensors[0], manifest.input)
    options = _options(frame)
    with called_in(read_traceparent(request.headers.get(TRACEPARENT))):
        if len(rows) == 1:
            return frame, [agent.predict(rows[0], **options)], manifest
        return frame, list(agent.predict_many(rows, **options)), manifest


def _rows(tensor: Tensor, spec: TensorSpec) -> Array:
    """The input's rows.

    Raises: FrameError naming expected and got.
    """
    array = tensor.array
    datatype = datatype_of(spec.dtype)
    if (
        tensor.name != RAW_INPUT
        or array.shape[1:] != spec.shape
        or datatype_of(array.dtype) != datatype
        or not 1 <= len(array) <= ROWS_MAX
    ):
        sizes = ", ".join(map(str, spec.shape))
        raise FrameError(
            f"inputs: expected {RAW_INPUT} of {datatype} [n, {sizes}] with 1 to {ROWS_MAX} rows,"
            f" got {tensor.name} of {datatype_of(array.dtype)} {list(array.shape)}"
        )
    return array


def _options(frame: Frame) -> dict[str, Any]:
    """The settings of this one request, as arguments of `predict`."""
    given = frame.parameters
    options: dict[str, Any] = {}
    deadline_ms = read_deadline(given)
    if deadline_ms is not None:
        options["deadline_s"] = deadline_ms / 1e3
    threshold = given.get("threshold")
    if threshold is not None:
        if not is_number(threshold):
            raise FrameError(f"threshold: expected a number, got {shown(threshold)}")
        options["threshold"] = float(threshold)
    local = given.get("local")
    if local is not None:
        if not isinstance(local, bool):
            raise FrameError(f"local: expected true or false, got {shown(local)}")
        options["local"] = local
    return options


def _parameters(answer: Prediction) -> dict[str, Any]:
    """Parameters of a response with one row: texts and finite numbers, as the protocol has them."""
    found: dict[str, Any] = {
        "source": answer.source,
        "uncertainty": _finite(answer.uncertainty),
        "threshold": _finite(answer.threshold),
        "latency_ms": answer.latency_ms,
        "class_name": answer.class_name,
        "bytes_up": answer.bytes_up,
        "bytes_down": answer.bytes_down,
    }
    if answer.joules is not None:
        found |= {"joules": answer.joules, "energy_source": answer.energy_source}
    for name in ("id", "reason"):
        if value := getattr(answer, name):
            found[name] = value
    return found


def _outputs(frame: Frame, answers: Sequence[Prediction]) -> dict[str, Array]:
    """The outputs that the request names, or those it gets without naming any.

    Raises: FrameError for an output that there is not.
    """
    names = [name for name, _ in frame.requested]
    if not names:
        names = [*ANSWERS] if len(answers) == 1 else [*ANSWERS, *ORIGINS]
    for name in names:
        if name not in OUTPUTS:
            raise FrameError(f"output {name!r:.100}: expected one of {', '.join(OUTPUTS)}")
    return {name: OUTPUTS[name](answers) for name in names}


def _probabilities(answers: Sequence[Prediction]) -> Array:
    """The (n, classes) probabilities; 0 where the network gave none that is finite."""
    try:
        stacked = np.stack([answer.probabilities for answer in answers])
    except ValueError as err:  # an update in between brought another number of classes
        raise RequestError(503, "the bundle has changed; ask again", retry_after_s=1) from err
    return stacked if np.isfinite(stacked).all() else np.nan_to_num(stacked)


def _finite(value: float) -> float:
    """`value`, or the largest number in place of infinity, which JSON cannot write.

    An uncertainty that is no number never exits: it counts as the largest.
    """
    if math.isnan(value):
        return FLOAT_MAX
    return min(max(value, -FLOAT_MAX), FLOAT_MAX)


# every output that a request may name: how it is made of the answers, one row each
OUTPUTS: Final[Mapping[str, Callable[[Sequence[Prediction]], Array]]] = {
    "label": lambda answers: np.array([one.label for one in answers], np.int64),
    "probabilities": _probabilities,
    "source": lambda answers: np.array([one.source for one in answers]),
    "uncertainty": lambda answers: np.array([_finite(one.uncertainty) for one in answers]),
    "threshold": lambda answers: np.array([_finite(one.threshold) for one in answers]),
    "latency_ms": lambda answers: np.array([one.latency_ms for one in answers]),
    "class_name": lambda answers: np.array([one.class_name for one in answers]),
    "id": lambda answers: np.array([one.id for one in answers]),
    "reason": lambda answers: np.array([one.reason for one in answers]),
    "bytes_up": lambda answers: np.array([one.bytes_up for one in answers], np.int64),
    "bytes_down": lambda answers: np.array([one.bytes_down for one in answers], np.int64),
}
