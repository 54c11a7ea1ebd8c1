"""HTTP requests in the audit log: what was refused for want of a right, and who logged in."""

from __future__ import annotations

from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_sdk.wire.topics import ID_PATTERN
from server.access.heads import address_of
from server.audit.log import AuditLog
from server.registry.trail.events import Event
from server.registry.transactions import acting_from

# what a request leaves in its state for this module
WHO: Final = "authenticated"
REFUSED: Final = "refused"

_REFUSALS: Final = (401, 403)
_PATH_MOST: Final = 120


class AuditRequests:
    """Middleware that notes refusals and logins, and from where a request changes the registry."""

    def __init__(self, app: ASGIApp, log: AuditLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        source = address_of(scope.get("client"))
        state = scope.setdefault("state", {})
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        def actor() -> str | None:
            """The key, or whoever else acts for the operator."""
            who = state.get(WHO)
            return None if who is None else str(who)

        with acting_from(source, actor):
            await self._app(scope, receive, watched)
        if status in _REFUSALS:
            self._log.note(_refusal(scope, state, source))
        elif WHO in state:
            self._log.note_use(state[WHO], source)


def _refusal(scope: Scope, state: dict[str, Any], source: str) -> Event:
    path = str(scope.get("path", ""))
    why = f"{scope['method']} {path[:_PATH_MOST]}: {state.get(REFUSED, '')}"
    what = "device.enrol" if path.endswith("/enroll") else "http.request"
    if WHO in state:
        return Event(what, "refused", str(state[WHO]), source, why, proven=True)
    return Event(what, "refused", _claimed(scope), source, why)


def _claimed(scope: Scope) -> str:
    """The name in a request's login, without the secret; empty if there is none."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, login = value.decode("latin-1").partition(" ")
            who, colon, _ = login.strip().partition(":")
            # without the colon, the text may be a secret
            return who if scheme.lower() == "bearer" and colon and _is_name(who) else ""
    return ""


def _is_name(text: str) -> bool:
    """Whether a text can be the name of a device or `operator`.

    A secret that was put before the colon is none: of 43 letters and digits, some are capitals.
    """
    return ID_PATTERN.fullmatch(text) is not None
