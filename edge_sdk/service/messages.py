"""Requests and responses of a running agent's API, as values: no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from edge_sdk.errors import SplitedgeError

ERROR_CHARACTERS: Final = 500
JSON_TYPE: Final = "application/json"


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request.

    Attributes:
        path: without the query string.
        headers: names in lower case.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    """One HTTP response; its length is added when it is sent."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": JSON_TYPE})


class RequestError(SplitedgeError):
    """A request that gets an error as its answer.

    Attributes:
        status: of the HTTP response.
        retry_after_s: whole seconds after which the client may ask again; 0 for never.
    """

    def __init__(self, status: int, text: str, *, retry_after_s: int = 0) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after_s = retry_after_s


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as JSON."""
    return Response(status, orjson.dumps(value))


def error_response(error: RequestError) -> Response:
    """`{"error": text}`, which is how clients of the v2 protocol read errors."""
    headers = {"Content-Type": JSON_TYPE}
    if error.retry_after_s:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(error.status, orjson.dumps({"error": error_line(str(error))}), headers)


def error_line(text: str) -> str:
    """`text` as one line of at most 500 characters."""
    # the text may quote the peer, and a lone surrogate cannot be encoded
    line = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    return line[:ERROR_CHARACTERS]
