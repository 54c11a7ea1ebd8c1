"""The head of a request, as the middlewares read it: fields, and whether it is a query.

Starlette's `Request` would take longer for that than what it is asked for.
"""

from __future__ import annotations

from starlette.types import Scope


def field_of(scope: Scope, name: bytes) -> str | None:
    """The first field of that name, which is in lower case; None if there is none."""
    for known, value in scope["headers"]:
        if known == name:
            text: str = value.decode("latin-1")
            return text
    return None


def address_of(client: tuple[str, int] | None) -> str:
    """The address of a request's client, empty if it is not known."""
    return "" if client is None else str(client[0])


def headers_of(scope: Scope) -> dict[str, str]:
    """The fields of a request by their names, in lower case; of two of one name the first."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return headers


def is_query(scope: Scope) -> bool:
    """Whether a request asks a model, if a route has its path."""
    path: str = scope["path"]
    return path.endswith("/infer") and path.startswith("/v2/models/") and scope["method"] == "POST"
