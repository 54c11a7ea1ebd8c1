"""Refusals of queries over HTTP before anything is paid for them: login, route, body."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from server.access.heads import field_of, headers_of, is_query
from server.access.rules import Login
from server.backend.senders import Senders
from server.errors import OverloadedError
from server.routes.authentication import LOGIN
from server.routes.bodies import declared_bytes
from server.routes.errors import answer_to

KNOWN_MOST: Final = 10_000


class EarlyRefusals:
    """Middleware that answers 429 to a sender whose queries the full queue refuses now.

    The sender is known by the header of a login that was right before. It opens nothing: what is
    not refused here goes the whole way, to the check of its login.
    """

    def __init__(self, app: ASGIApp, senders: Senders) -> None:
        self._app = app
        self._senders = senders
        # sender by the hash of its header, those heard lately last
        self._known: OrderedDict[bytes, str] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        header = field_of(scope, b"authorization") if _is_query(scope) else None
        if header is None:
            await self._app(scope, receive, send)
            return
        mark = hashlib.sha256(header.encode("latin-1")).digest()
        sender = self._known.get(mark)
        if sender is not None:
            self._known.move_to_end(mark)
            try:
                self._senders.refuse_early(sender, declared_bytes(headers_of(scope)))
            except OverloadedError as err:
                await answer_to(Request(scope), err)(scope, receive, send)
                return
        await self._app(scope, receive, send)
        login = scope.get("state", {}).get(LOGIN)
        if isinstance(login, Login):
            self._known[mark] = login.name
            if len(self._known) > KNOWN_MOST:
                self._known.popitem(last=False)


def _is_query(scope: Scope) -> bool:
    return scope["type"] == "http" and is_query(scope)
