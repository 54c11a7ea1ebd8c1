"""The trainer's HTTP side, `/api/v1/training/…`: devices say hello, fetch messages, post replies.

A device that has nothing to do holds a long poll. Bodies are bounded before they are read, and
decoded away from the event loop.
"""

# no `from __future__ import annotations`: FastAPI could not look up dependencies that are closures
import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Final

from fastapi import Depends, FastAPI, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from edge_sdk.training.protocol.messages import (
    EndRound,
    Evaluate,
    Outputs,
    Reply,
    StartRound,
    Step,
    from_bytes,
)
from server.errors import BadRequestError, EndedError, ForbiddenError, NotJoinedError
from server.routes import errors
from server.routes.authentication import CredentialStore, authenticate
from server.routes.bodies import BoundedRoute, read_body
from server.training.fleet.mailbox import Hello, Mailbox
from server.training.fleet.reply_slots import OneReplyEach
from server.training.rounds.reply_checks import samples_fault

logger = logging.getLogger(__name__)

POLL_S: Final = 20.0
MESSAGE_ID: Final = "Training-Message"
CONTENT_TYPE: Final = "application/octet-stream"


class HelloBody(BaseModel):
    """What a device says of its data; the data stay where they are.

    Nothing of its labels, which may be no peer's business: a device refuses a plan of fewer classes
    than it has, and labels that are sent are checked as they come.
    """

    model_config = ConfigDict(extra="forbid")

    samples: int = Field(ge=1)
    input_shape: list[Annotated[int, Field(ge=1)]] = Field(min_length=1, max_length=8)


class Welcome(BaseModel):
    """What it takes part in.

    run: one training of that name, from its first round to its last.
    no_reply_s: silence after which a device goes on by itself.
    alive_s: how often it says that it is there, whatever it does meanwhile.
    """

    training: str
    run: str
    no_reply_s: float
    alive_s: float


class Declined(BaseModel):
    """A message that the device cannot do."""

    model_config = ConfigDict(extra="forbid")

    message: str = Field(max_length=64)
    reason: str = Field(max_length=500)


class ReplyOutcome(BaseModel):
    """What became of a reply."""

    outcome: str


def create_app(  # noqa: C901, PLR0915 - one entry a route
    mailbox: Mailbox,
    keys: CredentialStore,
    welcome: Welcome,
    expected: Hello,
    *,
    reply_bytes_max: int,
    samples_max: int | None = None,
    refused: Callable[[str, str], None] = lambda _device, _why: None,
) -> FastAPI:
    """The application over a mailbox.

    Args:
        expected: inputs that fit.
        samples_max: most samples that a device may bring; None for any number.
        refused: told of a device whose data do not fit, and why, by a thread of the server's.
    """
    app = FastAPI(title="splitedge trainer", redoc_url=None, docs_url=None, openapi_url=None)
    app.router.route_class = BoundedRoute
    errors.install(app)
    one_each = OneReplyEach()

    def device(request: Request) -> str:
        found = authenticate(keys, request)
        if found is None:
            raise ForbiddenError("devices train, the operator does not")
        return found.id

    def see_end(name: str) -> None:
        if mailbox.ended:
            mailbox.told_end(name)
            raise EndedError("training is over")

    def member(name: Annotated[str, Depends(device)]) -> str:
        see_end(name)
        if not mailbox.knows(name):
            raise NotJoinedError(f"{name}: say hello first")
        return name

    @app.post("/api/v1/training/hello")
    def hello(name: Annotated[str, Depends(device)], body: HelloBody) -> Welcome:
        see_end(name)
        shape = tuple(body.input_shape)
        fault = samples_fault(body.samples, samples_max)
        if shape != expected.input_shape:
            fault = (
                f"expected inputs {expected.input_shape}, got {shape};"
                " this is not the data of the recipe"
            )
        if fault is not None:
            logger.warning("device=%s refused: %s", name, fault)
            refused(name, fault)
            raise BadRequestError(f"{name}: {fault}")
        mailbox.hello(name, replace(expected, samples=body.samples))
        logger.info("device=%s samples=%d there", name, body.samples)
        return welcome

    @app.get("/api/v1/training/next", response_class=Response)
    async def fetch(
        request: Request,
        name: Annotated[str, Depends(member)],
        after: Annotated[str, Query(max_length=64)] = "",
        wait_s: Annotated[float, Query(ge=0, le=POLL_S)] = POLL_S,
    ) -> Response:
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        end = loop.time() + wait_s
        with mailbox.listening(name, lambda: loop.call_soon_threadsafe(changed.set)):
            # one that hung up would otherwise be taken for one that has its message
            while not await request.is_disconnected():
                see_end(name)
                message = mailbox.fetch(name, after)
                if message is not None:
                    raw = await run_in_threadpool(message.raw)
                    return Response(raw, media_type=CONTENT_TYPE, headers={MESSAGE_ID: message.id})
                left_s = end - loop.time()
                if left_s <= 0:
                    break
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), left_s)
                changed.clear()
        return Response(status_code=204)

    @app.post("/api/v1/training/reply")
    async def reply(
        request: Request,
        name: Annotated[str, Depends(member)],
        message: Annotated[str, Query(max_length=64)] = "",
    ) -> ReplyOutcome:
        async with one_each.turn(name) as arrived:
            raw = await arrived(read_body(request, reply_bytes_max))
            outcome = await run_in_threadpool(lambda: mailbox.reply(name, message, _reply(raw)))
            return ReplyOutcome(outcome=outcome)

    @app.post("/api/v1/training/alive", status_code=204)
    def alive(name: Annotated[str, Depends(device)]) -> None:
        # that training is over is told to who asks for work, and counted then
        mailbox.alive(name)

    @app.post("/api/v1/training/decline", status_code=204)
    def decline(name: Annotated[str, Depends(member)], body: Declined) -> None:
        logger.warning("device=%s declines: %s", name, body.reason)
        mailbox.decline(name, body.message, body.reason)

    return app


def _reply(raw: bytes) -> Reply:
    message = from_bytes(raw)
    if isinstance(message, StartRound | Step | Outputs | EndRound | Evaluate):
        raise BadRequestError(f"expected a reply, got {type(message).__name__}")
    return message
