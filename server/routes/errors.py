"""Answers to failures: always JSON, always `{"error": one line}`.

ServerError             its own status, and Retry-After where trying again helps
LinkError               503: the broker does not answer
FrameTooLargeError      413
FrameError              400
RequestValidationError  400, the first fault by name; never the value sent
HTTPException           its own status (no such route, wrong verb, body too large)
anything else           500 with a fixed text; the traceback is logged
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from edge_sdk.errors import FrameError, FrameTooLargeError, LinkError
from edge_sdk.service.messages import error_line
from server.audit.requests import REFUSED
from server.errors import ServerError

logger = logging.getLogger(__name__)


def install(app: FastAPI) -> None:
    """Make `app` answer every failure in this way."""
    for kind in ANSWERED:
        app.add_exception_handler(kind, _answered)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, _surprise)


# what a request may fail with by itself, answered by `error_answer`
ANSWERED: Final = (ServerError, LinkError, FrameError, ClientDisconnect)


def error_answer(request: Request, error: Exception) -> JSONResponse:
    """The answer to a request that failed with one of `ANSWERED`."""
    return answer_to(request, error) if isinstance(error, ServerError) else failure(error)


def failure(error: Exception) -> JSONResponse:
    """The answer to any request that failed with one of `ANSWERED`; nothing is audited."""
    if isinstance(error, ServerError):
        headers = None
        if error.retry_after_s is not None:
            # the header counts whole seconds, and 0 would mean "now"
            headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        return error_response(error.status, str(error), headers)
    if isinstance(error, LinkError):
        logger.warning("the broker was not told: %s", error)
        text = "the broker does not answer now, so it is not told yet; try again"
        return error_response(503, text, {"Retry-After": "1"})
    if isinstance(error, FrameError):
        return error_response(413 if isinstance(error, FrameTooLargeError) else 400, str(error))
    return error_response(400, "the client disconnected before its request was read")


def error_response(
    status: int, text: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """`{"error": text}` on one line of at most 500 characters."""
    return JSONResponse({"error": error_line(text)}, status_code=status, headers=headers)


def answer_to(request: Request, error: ServerError) -> JSONResponse:
    """The answer to a request that the server refuses; its reason goes to the audit log too."""
    setattr(request.state, REFUSED, str(error))  # for the audit log
    return failure(error)


async def _answered(request: Request, error: Exception) -> JSONResponse:
    return error_answer(request, error)


async def _validation_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults = error.errors()
    first = faults[0]
    place = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return error_response(400, f"{place}: {first['msg']}{more}")


async def _http_exception(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, str(error.detail), error.headers)


async def _surprise(request: Request, error: Exception) -> JSONResponse:
    return surprise(request.method, request.url.path, error)


def surprise(method: str, path: str, error: Exception) -> JSONResponse:
    """The answer to a request that failed with anything else: the log gets the traceback, the peer
    a fixed text.
    """
    logger.error("%s %s failed", method, path, exc_info=error)
    return error_response(500, "the server failed on this request; its log says why")
