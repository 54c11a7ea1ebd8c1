"""The trainer's HTTP side (edge_sdk.training.protocol.http): devices join, fetch messages, reply.

A device that has nothing to do holds a long poll. Bodies are bounded before they are read, and
decoded away from the event loop.
"""

# no `from __future__ import annotations`: FastAPI could not look up dependencies that are closures
import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

from fastapi import Depends, FastAPI, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from edge_sdk.training.protocol.http import (
    ALIVE_PATH,
    DECLINE_PATH,
    ID_CHARACTERS,
    JOIN_PATH,
    MESSAGE_ID,
    MESSAGE_TYPE,
    NEXT_PATH,
    POLL_S,
    REASON_CHARACTERS,
    REPLY_PATH,
    Join,
    Welcome,
)
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
from server.registry.trail.events import printable
from server.routes import errors
from server.routes.authentication import CredentialStore, authenticate
from server.routes.bodies import BoundedRoute, read_body
from server.training.fleet.mailbox import Mailbox
from server.training.fleet.reply_slots import ReplySlots
from server.training.rounds.reply_checks import samples_fault

logger = logging.getLogger(__name__)


class JoinBody(BaseModel):
    """`Join`, with the bounds of what may come over the network."""

    model_config = ConfigDict(extra="forbid")

    samples: int = Field(ge=1)
    input_shape: list[Annotated[int, Field(ge=1)]] = Field(min_length=1, max_length=8)


class DeclineBody(BaseModel):
    """`Decline`, with the bounds of what may come over the network."""

    model_config = ConfigDict(extra="forbid")

    message: str = Field(max_length=ID_CHARACTERS)
    reason: str = Field(max_length=REASON_CHARACTERS)


def create_app(  # noqa: C901, PLR0915 - one entry a route
    mailbox: Mailbox,
    keys: CredentialStore,
    welcome: Welcome,
    input_shape: tuple[int, ...],
    *,
    reply_bytes_max: int,
    samples_max: int | None = None,
    refused: Callable[[str, str], None] = lambda _device, _why: None,
    withdrew: Callable[[str, str], None] = lambda _device, _why: None,
) -> FastAPI:
    """The application over a mailbox.

    Args:
        input_shape: of the recipe's samples; a device with other ones is refused.
        reply_bytes_max: longest reply that is read.
        samples_max: most samples that a device may bring; None for any number.
        refused: called, in a thread of the server, with a device that was refused, and why.
        withdrew: called so with a device that takes no part of its own will.
    """
    app = FastAPI(title="splitedge trainer", redoc_url=None, docs_url=None, openapi_url=None)
    app.router.route_class = BoundedRoute
    errors.install(app)
    slots = ReplySlots()

    def device(request: Request) -> str:
        found = authenticate(keys, request).device
        if found is None:
            raise ForbiddenError("devices train; the operator and keys do not")
        return found.id

    def see_end(name: str) -> None:
        if mailbox.ended:
            mailbox.leave(name)
            raise EndedError("training is over")

    def member(name: Annotated[str, Depends(device)]) -> str:
        see_end(name)
        if not mailbox.knows(name):
            raise NotJoinedError(f"{name}: expected a device that joined this trainer; join first")
        return name

    @app.post(JOIN_PATH)
    def join(name: Annotated[str, Depends(device)], body: JoinBody) -> Welcome:
        see_end(name)
        shape = tuple(body.input_shape)
        fault = samples_fault(body.samples, samples_max)
        if shape != input_shape:
            fault = (
                f"expected inputs {input_shape}, got {shape}; this is not the data of the recipe"
            )
        if fault is not None:
            logger.warning("device=%s refused: %s", name, fault)
            refused(name, fault)
            raise BadRequestError(f"{name}: {fault}")
        mailbox.join(name, Join(body.samples, shape))
        logger.info("device=%s samples=%d there", name, body.samples)
        return welcome

    @app.get(NEXT_PATH, response_class=Response)
    async def fetch(
        request: Request,
        name: Annotated[str, Depends(member)],
        after: Annotated[str, Query(max_length=ID_CHARACTERS)] = "",
        wait_s: Annotated[float, Query(ge=0, le=POLL_S)] = POLL_S,
    ) -> Response:
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        end = loop.time() + wait_s
        with mailbox.listening(name, lambda: loop.call_soon_threadsafe(changed.set)):
            # a device that hung up does not have its message
            while not await request.is_disconnected():
                see_end(name)
                message = mailbox.fetch(name, after)
                if message is not None:
                    raw = await run_in_threadpool(message.raw)
                    return Response(raw, media_type=MESSAGE_TYPE, headers={MESSAGE_ID: message.id})
                left_s = end - loop.time()
                if left_s <= 0:
                    break
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), left_s)
                changed.clear()
        return Response(status_code=204)

    @app.post(REPLY_PATH)
    async def reply(
        request: Request,
        name: Annotated[str, Depends(member)],
        message: Annotated[str, Query(max_length=ID_CHARACTERS)] = "",
    ) -> dict[str, str]:
        async with slots.acquire(name) as receive:
            raw = await receive(read_body(request, reply_bytes_max))
            outcome = await run_in_threadpool(lambda: mailbox.reply(name, message, _reply(raw)))
            return {"outcome": outcome}

    @app.post(ALIVE_PATH, status_code=204)
    def alive(name: Annotated[str, Depends(device)]) -> None:
        # the end is told to a device that asks for work, which then counts as told
        mailbox.alive(name)

    @app.post(DECLINE_PATH, status_code=204)
    def decline(name: Annotated[str, Depends(member)], body: DeclineBody) -> None:
        reason = printable(body.reason, REASON_CHARACTERS)  # it goes to a terminal and a report
        logger.warning("device=%s declines: %s", name, reason)
        if body.message:
            mailbox.decline(name, body.message, reason)
        else:
            withdrew(name, reason)
            mailbox.withdraw(name, reason)

    return app


def _reply(raw: bytes) -> Reply:
    message = from_bytes(raw)
    if isinstance(message, StartRound | Step | Outputs | EndRound | Evaluate):
        raise BadRequestError(f"expected a reply, got {type(message).__name__}")
    return message
