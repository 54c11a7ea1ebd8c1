"""A query over HTTP between its head and its answer: what both ways of a query call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final

import numpy as np

from edge_sdk.session import Array
from edge_sdk.wire.answers import HEADER_LENGTH, pack_answer, read_header_length
from edge_sdk.wire.frames import HTTP_LIMITS, Frame, decode
from edge_sdk.wire.messages import Query, frame_id, read_deadline
from edge_sdk.wire.traceparent import TraceContext, read_traceparent
from server.access.heads import address_of
from server.access.rules import Login
from server.backend.inference import Inference
from server.backend.jobs import Done
from server.backend.models import ServedModel
from server.backend.senders import SenderLimits, Senders
from server.backend.turns import Turn
from server.errors import BadRequestError, ServerError
from server.listening.direct_request import Fields
from server.routes.v2.models import FEATURES
from server.tracing.query_traces import QueryTrace

# JSON makes a Python object of every value: 10 MB took 1.4 s, as binary a few ms
JSON_BYTES: Final = 1_000_000
LIMITS: Final = replace(HTTP_LIMITS, header_bytes=JSON_BYTES)
# a longer body is parsed in a thread; a shorter one is parsed before a thread would have woken
SHORT_BYTES: Final = 65_536

_JSON: Final = ((b"content-type", b"application/json"),)
_BINARY: Final = (b"content-type", b"application/octet-stream")
_LENGTH: Final = HEADER_LENGTH.lower().encode()


@dataclass(slots=True)
class Head:
    """Head of a query.

    Attributes:
        model, version: from its path.
        sender: whose limits and whose share of the engine count.
        json_bytes: how many bytes of the body are JSON; None for all.
        trace: the header `traceparent`.
    """

    model: str
    version: str | None
    sender: str
    json_bytes: int | None
    trace: str | None

    @classmethod
    def read(
        cls, names: tuple[str, str | None], sender: str, length: str | None, trace: str | None
    ) -> Head:
        """The head of a query.

        Args:
            names: of model and version. length: the header HEADER_LENGTH.
        Raises: FrameError.
        """
        return cls(*names, sender, read_header_length(length), trace)


@dataclass(slots=True)
class Asked:
    """A query that the engine has taken, and its trace, if it is traced."""

    frame: Frame
    query: Query
    model: ServedModel
    trace: QueryTrace | None


def ask(
    inference: Inference, head: Head, body: bytes, done: Done, turn: Turn | None = None
) -> Asked:
    """Read a query and hand it to the engine.

    Args:
        done: called with the outcome, from any thread; with a turn also within this call.
        turn: of the event loop that calls; None in another thread.
    Raises: ServerError; FrameError.
    """
    frame = decode(body, head.json_bytes, LIMITS)
    query = _query(frame, head, read_traceparent(head.trace))
    traced = inference.trace(query, head.sender)
    with ending(traced):
        model = inference.submit(query, done, sender=head.sender, turn=turn, trace=traced)
    return Asked(frame, query, model, traced)


def sender_of(login: Login | None, client: tuple[str, int] | None, senders: Senders) -> str:
    """The sender of a query, for its limits and its share of the engine: who has logged in, or the
    address of an anonymous client.
    """
    if login is None:
        return address_of(client)
    if login.key is not None:
        own = SenderLimits(login.key.requests, login.key.rows, login.key.bytes)
        senders.limit(login.name, own)
    return login.name


class ending:  # noqa: N801 - as contextlib's own
    """Record that a query ends with the error that leaves the block, if one does."""

    __slots__ = ("_trace",)

    def __init__(self, trace: QueryTrace | None) -> None:
        self._trace = trace

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._trace is not None and error is not None:
            if not isinstance(error, ServerError):  # such as the end of a client that disconnects
                error = ServerError(type(error).__name__)
            self._trace.end(error, None)


def packed(asked: Asked, outputs: Array) -> tuple[bytes, Fields]:
    """The body of an answer, and the fields that say what it is.

    Raises: FrameError for a requested output that there is not.
    """
    query, model = asked.query, asked.model
    computed = {FEATURES: outputs} if model.engine.output == FEATURES else _outputs(outputs)
    header: dict[str, Any] = {
        "model_name": model.manifest.name,
        "model_version": model.manifest.version,
    }
    if query.id:
        header["id"] = query.id
    body, length = pack_answer(asked.frame, header, computed)
    return body, _JSON if length is None else (_BINARY, (_LENGTH, b"%d" % length))


def _query(frame: Frame, head: Head, trace: TraceContext | None) -> Query:
    if len(frame.tensors) != 1:
        raise BadRequestError(f"inputs: expected one tensor, got {len(frame.tensors)}")
    deadline_ms = read_deadline(frame.parameters)
    return Query(frame_id(frame), head.model, head.version, frame.tensors[0], deadline_ms, trace)


def _outputs(logits: Array) -> dict[str, Array]:
    # `reduce` is what `max` and `sum` call in the end, after a microsecond each
    weights = np.exp(logits - np.maximum.reduce(logits, axis=1, keepdims=True))
    return {
        "logits": logits,
        "probabilities": weights / np.add.reduce(weights, axis=1, keepdims=True),
        "label": logits.argmax(axis=1),
    }
