"""HTTP/1.1 on a connection, as the rest of the service sees it: heads, bodies, responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, Protocol

from edge_sdk.service.messages import RequestError, Response

HEAD_BYTES: Final = 16_384
HEADERS_MAX: Final = 64
# seconds for a whole head; for the next request of a connection; for a body; for a response
HEAD_S: Final = 10.0
IDLE_S: Final = 60.0
BODY_S: Final = 30.0
SEND_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Head:
    """Start of a request.

    Attributes:
        path: without the query string.
        headers: names in lower case.
        keep: whether the client wants to go on with this connection.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    keep: bool = True


class Exchange(Protocol):
    """Requests and responses of one connection, in turn."""

    def read_head(self) -> Head | None:
        """The next request's head; None if the client has left.

        Raises: RequestError for what is no HTTP, after which the connection is of no use;
            TimeoutError, OSError.
        """

    def read_body(self, limit_bytes: int, grown: Callable[[int], None]) -> bytes:
        """The body of that request.

        Args:
            grown: called with the number of bytes that are about to be held; may raise.
        Raises: RequestError as soon as the body is, or declares itself, above the limit;
            TimeoutError, OSError.
        """

    def respond(self, response: Response, *, keep: bool) -> None:
        """Answer that request; one of HEAD gets the headers alone.

        Raises: TimeoutError, OSError.
        """


def too_long(limit_bytes: int) -> RequestError:
    """The error for a body above the limit."""
    return RequestError(413, f"the body: expected at most {limit_bytes} bytes, got more")


def response_headers(response: Response, *, keep: bool) -> list[tuple[str, str]]:
    """All headers of a response."""
    found = [*response.headers.items(), ("Content-Length", str(len(response.body)))]
    if not keep:
        found.append(("Connection", "close"))
    return found


def reason_of(status: int) -> str:
    """The text behind the status number."""
    return HTTPStatus(status).phrase
