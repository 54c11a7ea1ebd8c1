"""The load of the server and of each sender: `/api/v1/load`, for the operator."""

from __future__ import annotations

from typing import Protocol

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from server.backend.inference import Inference
from server.routes.authentication import Presence


class LoadServices(Presence, Protocol):
    """The part of the server that this route needs."""

    @property
    def inference(self) -> Inference:
        """The queue, and the accounts of the senders."""


class EngineLoad(BaseModel):
    """Counts since the server started, and the number of queries that wait."""

    model_config = ConfigDict(from_attributes=True)

    waiting: int = 0
    batches: int
    queries: int
    refused: int
    expired: int
    failed: int


class SenderLoad(BaseModel):
    """Counts of one sender: a device, `operator`, or the address of an anonymous client.

    `requests`, `rows` and `bytes` arrived. A limit refused `limited` of them, the full queue or a
    deadline that would have passed there `refused`; `expired` were computed too late, or not.
    """

    model_config = ConfigDict(from_attributes=True)

    requests: int
    rows: int
    bytes: int
    answered: int
    limited: int
    refused: int
    expired: int
    failed: int


class LoadView(BaseModel):
    """The engine's load, and that of each sender, by its name."""

    engine: EngineLoad
    senders: dict[str, SenderLoad]


def router(services: LoadServices) -> APIRouter:
    """The route over `services`."""
    api = APIRouter(prefix="/api/v1", tags=["load"])

    @api.get("/load")
    def load() -> LoadView:
        """Counts of the engine and of the senders since the server started."""
        inference = services.inference
        engine = EngineLoad.model_validate(inference.batcher.load)
        engine.waiting = inference.batcher.waiting
        senders = {
            name: SenderLoad.model_validate(counts)
            for name, counts in inference.senders.counts().items()
        }
        return LoadView(engine=engine, senders=senders)

    return api
