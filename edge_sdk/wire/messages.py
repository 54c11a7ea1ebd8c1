"""One offload as typed values: the query a device sends and the reply it gets.

Pure, and used by both ends. The model is named in the frame's parameters because an MQTT topic
names only the device.
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

RAW_INPUT: Final = "x"
DEADLINE_MAX_MS: Final = 600_000.0
ID_CHARACTERS_MAX: Final = 64
RETRY_AFTER_MAX_S: Final = 60.0

_SMASHED = re.compile(r"z([1-9][0-9]{0,2})")


class Problem(StrEnum):
    """Why a query got no answer; the same words on both ends."""

    MALFORMED = "malformed"  # no valid frame
    BAD_REQUEST = "bad_request"  # a valid frame that cannot be served
    UNKNOWN_MODEL = "unknown_model"
    OVERLOADED = "overloaded"
    NOT_READY = "not_ready"
    EXPIRED = "expired"
    FAILED = "failed"  # the server's own fault


@dataclass(frozen=True, slots=True)
class Query:
    """One offload.

    Attributes:
        id: 16 random bytes as hex; the reply carries it back.
        model, version: whom to ask; None means the one that is active.
        tensor: `x` (raw input, the server does all) or `z{d}` (smashed data at depth d), encoded,
            with batch axis. None asks only whether the server is there (a probe).
        deadline_ms: time left when it was sent, never wall time; None means no hurry.
    """

    id: str
    model: str | None
    version: str | None
    tensor: Tensor | None
    deadline_ms: float | None = None

    @property
    def depth(self) -> int:
        """How many stages the tensor has passed: 0 for raw input."""
        return 0 if self.tensor is None else entry_depth(self.tensor.name)


@dataclass(frozen=True, slots=True)
class Reply:
    """The server's answer: tensors, or a problem with a sentence about it."""

    id: str
    tensors: Mapping[str, Array] = field(default_factory=dict)
    problem: Problem | None = None
    detail: str = ""
    retry_after_s: float = 0.0


def new_id() -> str:
    """16 random bytes as hex."""
    return secrets.token_hex(16)


def entry_depth(name: str) -> int:
    """The depth at which a tensor enters the network: `x` 0, `z3` 3.

    Raises: FrameError for any other name.
    """
    if name == RAW_INPUT:
        return 0
    if smashed := _SMASHED.fullmatch(name):
        return int(smashed[1])
    raise FrameError(f"tensor: expected x or z1, z2, ..., got {name[:100]!r}")


def pack_query(query: Query) -> bytes:
    """The query as it goes over MQTT."""
    parameters: dict[str, Any] = {"model_name": query.model, "model_version": query.version}
    if query.deadline_ms is not None:
        parameters["deadline_ms"] = query.deadline_ms
    tensors = () if query.tensor is None else (query.tensor,)
    return pack_request({"id": query.id, "parameters": parameters}, tensors)


def read_query(frame: Frame) -> Query:
    """The query a frame holds.

    Raises: FrameError naming what is missing or wrong.
    """
    if len(frame.tensors) > 1:
        raise FrameError(f"query: expected one tensor, got {len(frame.tensors)}")
    tensor = frame.tensors[0] if frame.tensors else None
    if tensor is not None:
        entry_depth(tensor.name)
    return Query(
        id=frame_id(frame),
        model=_text(frame.parameters, "model_name"),
        version=_text(frame.parameters, "model_version"),
        tensor=tensor,
        deadline_ms=read_deadline(frame.parameters),
    )


def frame_id(frame: Frame) -> str:
    """The frame's id, empty when it has none.

    Raises: FrameError when it is no short string.
    """
    value = frame.header.get("id") or ""  # null says as little as no id
    if not isinstance(value, str) or len(value) > ID_CHARACTERS_MAX:
        raise FrameError(f"id: expected at most {ID_CHARACTERS_MAX} characters, got {value!r:.100}")
    return value


def read_deadline(parameters: Mapping[str, Any]) -> float | None:
    """`deadline_ms` of a frame's parameters.

    Raises: FrameError when it is not a number of milliseconds in (0, 600000].
    """
    value = parameters.get("deadline_ms")
    if value is None:
        return None
    usable = type(value) in (int, float) and math.isfinite(value) and 0 < value <= DEADLINE_MAX_MS
    if not usable:
        raise FrameError(f"deadline_ms: expected 0 to {DEADLINE_MAX_MS:g}, got {value!r:.100}")
    return float(value)


def pack_reply(reply: Reply, model: str, version: str) -> bytes:
    """The reply as it goes over MQTT."""
    if reply.problem is not None:
        parameters = {"problem": reply.problem, "retry_after_s": reply.retry_after_s}
        header = {"id": reply.id, "error": reply.detail, "parameters": parameters}
        return pack_response(header, ())
    header = {"id": reply.id, "model_name": model, "model_version": version}
    return pack_response(header, [Tensor(name, array) for name, array in reply.tensors.items()])


def read_reply(frame: Frame) -> Reply:
    """The reply a frame holds.

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
