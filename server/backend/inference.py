"""From a decoded query to a job in the queue, for HTTP and MQTT alike."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from edge_sdk.errors import FrameError
from edge_sdk.session import Array
from edge_sdk.wire.codecs import CODEC, decode, rows_of
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import Problem, Query, entry_depth, is_narrow
from edge_sdk.wire.raw_inputs import decode_raw
from server.backend.batcher import Batcher
from server.backend.jobs import Done, Job
from server.backend.ladder import Entry, LadderEngine
from server.backend.models import ModelStore, ServedModel
from server.backend.senders import Senders
from server.backend.statistics import Statistics
from server.backend.turns import Turn
from server.errors import (
    BadRequestError,
    ExpiredError,
    NotReadyError,
    OverloadedError,
    ServerError,
    UnknownModelError,
)
from server.tracing.query_traces import QueryTrace, QueryTraces

_PROBLEMS: dict[type[ServerError], Problem] = {
    BadRequestError: Problem.BAD_REQUEST,
    UnknownModelError: Problem.UNKNOWN_MODEL,
    OverloadedError: Problem.OVERLOADED,
    NotReadyError: Problem.NOT_READY,
    ExpiredError: Problem.EXPIRED,
}


@dataclass(frozen=True, slots=True)
class Inference:
    """The models, the queue in front of them, the accounts of senders, and what was counted.

    Attributes:
        traces: makes traces of queries; None makes none.
    """

    models: ModelStore
    batcher: Batcher
    batch_max: int
    senders: Senders = field(default_factory=Senders)
    statistics: Statistics = field(default_factory=Statistics)
    traces: QueryTraces | None = None

    def __post_init__(self) -> None:
        self.batcher.observers.add(self.statistics)

    @property
    def ready(self) -> bool:
        """Whether a model is loaded and the queue takes queries."""
        return self.models.ready and not self.batcher.full

    def trace(self, query: Query, sender: str) -> QueryTrace | None:
        """The trace of a query that has come; whoever answers the query ends it."""
        return None if self.traces is None else self.traces.begin(query, sender)

    def submit(
        self,
        query: Query,
        done: Done,
        *,
        sender: str,
        may_run_here: bool = False,
        turn: Turn | None = None,
        trace: QueryTrace | None = None,
        model: ServedModel | None = None,
    ) -> ServedModel:
        """Queue a query, whose arrival the sender's account has noted.

        Args:
            sender: whose limits and whose share of the engine count.
            done: called with the answer, in the engine's thread; or in this one, where that is
                quicker and `may_run_here` or `turn` allows it.
            turn: of the event loop that calls, which gathers what arrives together.
            trace: of the query, if it is traced.
            model: that answers it; None looks up the one that the query names.
        Returns: the model that answers it.
        Raises: ServerError at once for a query that will not be run.
        """
        if model is None:
            model = self.models.served(query.model, query.version)
        if trace is not None:
            trace.asks(model.manifest.name, model.manifest.version)
        begin = time.monotonic()
        try:
            self._submit(model, query, done, trace, turn, sender=sender, may_run_here=may_run_here)
        except ServerError as err:
            self.batcher.observers.settled(model.engine, time.monotonic() - begin, err)
            raise
        return model

    def _submit(
        self,
        model: ServedModel,
        query: Query,
        done: Done,
        trace: QueryTrace | None,
        turn: Turn | None,
        *,
        sender: str,
        may_run_here: bool,
    ) -> None:
        if query.tensor is None:
            raise BadRequestError("query: expected one input tensor, got none")
        rows = rows_of(query.tensor.array, query.tensor.parameters)
        if not 1 <= rows <= self.batch_max:  # before they are decoded, which may take memory
            raise BadRequestError(f"input: expected 1 to {self.batch_max} samples, got {rows}")
        entry = _decoded(query.tensor, model.engine)
        model.engine.check(entry)
        self.senders.read(sender, rows)
        now = time.monotonic()
        deadline = None if query.deadline_ms is None else now + query.deadline_ms / 1e3

        def settled(outcome: Array | ServerError) -> None:
            self.senders.settled(sender, outcome)
            self.batcher.observers.settled(model.engine, time.monotonic() - now, outcome)
            done(outcome)

        job = Job(model.engine, entry, deadline, settled, sender, trace=trace)
        try:
            if turn is not None:
                turn.submit(job)
            else:
                self.batcher.submit(job, may_run_here=may_run_here)
        except OverloadedError as err:
            self.senders.settled(sender, err)
            raise


def problem_of(error: ServerError) -> Problem:
    """The wire's word for an error."""
    return _PROBLEMS.get(type(error), Problem.FAILED)


def _decoded(tensor: Tensor, engine: LadderEngine) -> Entry:
    depth = entry_depth(tensor.name)
    if depth == 0 and CODEC not in tensor.parameters:
        return Entry(0, tensor.array)
    narrow = is_narrow(tensor.name)
    expected = engine.input_at(depth, narrow=narrow)
    try:
        if depth == 0:
            given = (tensor.array, tensor.parameters, expected.dtype, expected.shape)
            return Entry(0, decode_raw(*given))
        values = decode(tensor.array, tensor.parameters, expected.shape)
    except FrameError as err:
        raise BadRequestError(str(err)) from err
    return Entry(depth, np.ascontiguousarray(values), narrow)
