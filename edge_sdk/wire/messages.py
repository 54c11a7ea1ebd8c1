"""Messages of one offload: the query of a device and the reply of the server.

Pure, and used by both ends. The frame's parameters name the model, because an MQTT topic names only
the device.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from edge_sdk.errors import FrameError
from edge_sdk.wire.frames import Array, Frame, Tensor, pack_request, pack_response
from edge_sdk.wire.rows import joined, parted
from edge_sdk.wire.traceparent import TRACEPARENT, TraceContext, read_traceparent

RAW_INPUT: Final = "x"
DEADLINE_MAX_MS: Final = 600_000.0
ID_CHARACTERS_MAX: Final = 64
RETRY_AFTER_MAX_S: Final = 60.0

_SMASHED = re.compile(r"[bz]([1-9][0-9]{0,2})")


class Problem(StrEnum):
    """Why a query got no answer; both ends use the same words."""

    MALFORMED = "malformed"  # no valid frame
    BAD_REQUEST = "bad_request"  # a valid frame that cannot be served
    UNKNOWN_MODEL = "unknown_model"
    OVERLOADED = "overloaded"
    NOT_READY = "not_ready"
    EXPIRED = "expired"
    FAILED = "failed"  # a fault of the server


@dataclass(frozen=True, slots=True)
class Query:
    """One offload.

    Attributes:
        id: 16 random bytes as hex; the reply has the same id.
        model, version: the model to ask; None means the active one.
        tensor: `x` (raw input, the server runs all stages), `z{d}` (smashed data at depth d) or
            `b{d}` (the same through a bottleneck), encoded, with batch axis; several rows have the
            parameters that edge_sdk.wire.rows gives them. None makes it a probe: only whether the
            server answers.
        deadline_ms: time left when it was sent, never wall time; None means no deadline.
        trace: the span of the sender that waits for the reply; None if it is not traced.
    """

    id: str
    model: str | None
    version: str | None
    tensor: Tensor | None
    deadline_ms: float | None = None
    trace: TraceContext | None = None

    @property
    def depth(self) -> int:
        """Number of stages the tensor has passed: 0 for raw input."""
        return 0 if self.tensor is None else entry_depth(self.tensor.name)


@dataclass(frozen=True, slots=True)
class Reply:
    """The server's answer: tensors, or a problem with a sentence that explains it."""

    id: str
    tensors: Mapping[str, Array] = field(default_factory=dict)
    problem: Problem | None = None
    detail: str = ""
    retry_after_s: float = 0.0


def new_id() -> str:
    """16 random bytes as hex."""
    return secrets.token_hex(16)


def entry_depth(name: str) -> int:
    """The depth at which a tensor enters the network: `x` 0, `z3` and `b3` 3.

    Raises: FrameError for any other name.
    """
    if name == RAW_INPUT:
        return 0
    if smashed := _SMASHED.fullmatch(name):
        return int(smashed[1])
    raise FrameError(f"tensor: expected x, z1, z2, ... or b1, b2, ..., got {name[:100]!r}")


def is_narrow(name: str) -> bool:
    """Whether a tensor is the output of a bottleneck: `b3`."""
    return name.startswith("b")


def pack_query(query: Query) -> bytes:
    """The query's bytes for MQTT."""
    parameters: dict[str, Any] = {"model_name": query.model, "model_version": query.version}
    if query.deadline_ms is not None:
        parameters["deadline_ms"] = query.deadline_ms
    if query.trace is not None:
        parameters[TRACEPARENT] = query.trace.traceparent
    tensors = () if query.tensor is None else parted(query.tensor)
    return pack_request({"id": query.id, "parameters": parameters}, tensors)


def read_query(frame: Frame) -> Query:
    """The query in a frame.

    Raises: FrameError naming what is missing or wrong.
    """
    tensor = joined(frame.tensors)
    if tensor is not None:
        entry_depth(tensor.name)
    return Query(
        id=frame_id(frame),
        model=_text(frame.parameters, "model_name"),
        version=_text(frame.parameters, "model_version"),
        tensor=tensor,
        deadline_ms=read_deadline(frame.parameters),
        trace=read_traceparent(frame.parameters.get(TRACEPARENT)),
    )


def frame_id(frame: Frame) -> str:
    """The frame's id; empty if it has none.

    Raises: FrameError if it is not a short string.
    """
    value = frame.header.get("id") or ""  # null means no id
    if not isinstance(value, str) or len(value) > ID_CHARACTERS_MAX:
        raise FrameError(f"id: expected at most {ID_CHARACTERS_MAX} characters, got {value!r:.100}")
    return value


def read_deadline(parameters: Mapping[str, Any]) -> float | None:
    """`deadline_ms` of a frame's parameters; None without one.

    Raises: FrameError if it is not a number of milliseconds in (0, 600000].
    """
    value = parameters.get("deadline_ms")
    if value is None:
        return None
    usable = type(value) in (int, float) and math.isfinite(value) and 0 < value <= DEADLINE_MAX_MS
    if not usable:
        raise FrameError(f"deadline_ms: expected 0 to {DEADLINE_MAX_MS:g}, got {value!r:.100}")
    return float(value)


def pack_reply(reply: Reply, model: str, version: str) -> bytes:
    """The reply's bytes for MQTT."""
    if reply.problem is not None:
        parameters = {"problem": reply.problem, "retry_after_s": reply.retry_after_s}
        header = {"id": reply.id, "error": reply.detail, "parameters": parameters}
        return pack_response(header, ())
    header = {"id": reply.id, "model_name": model, "model_version": version}
    return pack_response(header, [Tensor(name, array) for name, array in reply.tensors.items()])


def read_reply(frame: Frame) -> Reply:
    """The reply in a frame.

    Raises: FrameError.
    """
    identifier = frame_id(frame)
    if frame.header.get("error") is not None:
        word = frame.parameters.get("problem")
        known = {problem.value: problem for problem in Problem}
        retry = frame.parameters.get("retry_after_s")
        seconds = float(retry) if isinstance(retry, int | float) else 0.0
        return Reply(
            identifier,
            problem=known.get(word, Problem.FAILED) if isinstance(word, str) else Problem.FAILED,
            detail=str(frame.header["error"])[:500],
            retry_after_s=min(max(seconds, 0.0), RETRY_AFTER_MAX_S),
        )
    return Reply(identifier, {tensor.name: tensor.array for tensor in frame.tensors})


def _text(parameters: Mapping[str, Any], name: str) -> str | None:
    value = parameters.get(name)
    if value is not None and (not isinstance(value, str) or len(value) > 100):
        raise FrameError(f"{name}: expected at most 100 characters, got {value!r:.100}")
    return value
