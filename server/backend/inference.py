"""From a decoded query to a job in the queue, for HTTP and MQTT alike."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from edge_sdk.errors import FrameError
from edge_sdk.session import Array
from edge_sdk.wire.codecs import decode
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import Problem, Query, entry_depth
from server.backend.batcher import Batcher, Done, Job
from server.backend.ladder import Entry
from server.backend.models import ModelStore, ServedModel
from server.errors import (
    BadRequestError,
    ExpiredError,
    NotReadyError,
    OverloadedError,
    ServerError,
    UnknownModelError,
)

_PROBLEMS: dict[type[ServerError], Problem] = {
    BadRequestError: Problem.BAD_REQUEST,
    UnknownModelError: Problem.UNKNOWN_MODEL,
    OverloadedError: Problem.OVERLOADED,
    NotReadyError: Problem.NOT_READY,
    ExpiredError: Problem.EXPIRED,
}


@dataclass(frozen=True, slots=True)
class Inference:
    """The models, and the queue in front of them."""

    models: ModelStore
    batcher: Batcher
    batch_max: int

    @property
    def ready(self) -> bool:
        """Whether a model is loaded and the queue takes queries."""
        return self.models.ready and not self.batcher.full

    def submit(self, query: Query, done: Done, *, may_run_here: bool = False) -> ServedModel:
        """Queue a query.

        Args:
            done: called with the answer, in the engine's thread; or in this one, where that is
                quicker and `may_run_here` allows it.
        Returns: the model that answers it.
        Raises: ServerError at once for a query that will not be run.
        """
        model = self.models.get(query.model, query.version)
        if query.tensor is None:
            raise BadRequestError("query: expected one input tensor, got none")
        entry = Entry(entry_depth(query.tensor.name), _decoded(query.tensor))
        model.engine.check(entry)
        rows = len(entry.array)
        if not 1 <= rows <= self.batch_max:
            raise BadRequestError(f"input: expected 1 to {self.batch_max} samples, got {rows}")
        deadline = None
        if query.deadline_ms is not None:
            deadline = time.monotonic() + query.deadline_ms / 1e3
        job = Job(model.engine, entry, deadline, done)
        self.batcher.submit(job, may_run_here=may_run_here)
        return model


def problem_of(error: ServerError) -> Problem:
    """The wire's word for an error."""
    return _PROBLEMS.get(type(error), Problem.FAILED)


def _decoded(tensor: Tensor) -> Array:
    if entry_depth(tensor.name) == 0:
        return tensor.array
    try:
        return np.ascontiguousarray(decode(tensor.array, tensor.parameters))
    except FrameError as err:
        raise BadRequestError(str(err)) from err
