"""Short queries answered from their connection (docs/decisions/0073, 0081).

The way of `Queries` behind its middlewares, without a task: the same checks in the same order, by
the same functions. Whatever is unusual is not let in here, and goes that way: a login too that was
not found right within the last second.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from edge_sdk.session import Array
from edge_sdk.wire.answers import HEADER_LENGTH
from server.access.heads import address_of, is_query
from server.access.recent_logins import RecentLogins
from server.access.rules import Rule
from server.access.table import KNOWN_LENGTH, KNOWN_PATHS, rule_of
from server.backend.inference import Inference
from server.backend.turns import Turn
from server.errors import ServerError
from server.listening.counting_loop import is_alone
from server.listening.direct_request import Answer, Fields
from server.routes.authentication import AUTHORIZATION, is_open_to
from server.routes.errors import ANSWERED, failure, surprise
from server.routes.host_names import OwnNames
from server.routes.v2.asking import SHORT_BYTES, Asked, Head, ask, packed, sender_of
from server.routes.v2.encodings import compressed, compressed_here, is_short

# who sends one of these goes through the application
UNUSUAL: Final = frozenset({b"content-encoding", b"expect", b"transfer-encoding", b"traceparent"})
_LENGTH: Final = HEADER_LENGTH.lower().encode()

_DIGITS: Final = len(str(SHORT_BYTES))

Answered = Callable[[Answer], None]


class _Route(NamedTuple):
    """Rule and path of a query, and the names of model and version in it."""

    rule: Rule
    path: str
    names: tuple[str, str | None]


class DirectQueries:
    """Lets queries in that a connection can answer itself.

    Args:
        names: of the server, if it listens on loopback.
        loopback: whether this machine's programs alone reach the server.
        logins: those that need not be read from the registry.
    """

    def __init__(
        self, inference: Inference, names: OwnNames | None, *, loopback: bool, logins: RecentLogins
    ) -> None:
        self.inference = inference
        self.turn = Turn(inference.batcher, is_alone)
        self._names = names
        self._loopback = loopback
        self._logins = logins
        self._hosts = functools.lru_cache(64)(self._is_own)

    def admit(
        self, method: bytes, url: bytes, fields: Fields, client: tuple[str, int] | None
    ) -> DirectQuery | None:
        """The query with this head; None for one that the application answers."""
        if method != b"POST" or self.inference.traces is not None:
            return None
        found = _route_of(url) if len(url) <= KNOWN_LENGTH else None
        head = dict(fields)
        if found is None or len(head) != len(fields):
            return None
        declared = _short_length(head)
        if not declared or not self._hosts(head.get(b"host")):
            return None
        login = None
        header = head.get(AUTHORIZATION)
        if header is None:
            if not is_open_to(found.rule, head.keys(), loopback=self._loopback):
                return None
        else:
            source = address_of(client)
            login = self._logins.find(header, source, found.rule, found.names[0])
            if login is None:
                return None
        sender = sender_of(login, client, self.inference.senders)
        return DirectQuery(self, found, head, sender, declared)

    def _is_own(self, host: bytes | None) -> bool:
        if self._names is None:
            return True
        return self._names.have(None if host is None else host.decode("latin-1"))


class DirectQuery:
    """One query that was let in."""

    __slots__ = (
        "_answered",
        "_asked",
        "_declared",
        "_fields",
        "_loop",
        "_outcome",
        "_owner",
        "_route",
        "_sender",
        "_thread",
    )

    def __init__(
        self,
        owner: DirectQueries,
        route: _Route,
        fields: Mapping[bytes, bytes],
        sender: str,
        declared: int,
    ) -> None:
        self._owner = owner
        self._route = route
        self._fields = fields
        self._sender = sender
        self._declared = declared
        self._asked: Asked | None = None
        self._outcome: Array | ServerError | None = None

    def serve(self, body: bytes, answered: Answered) -> None:
        """Answer it, on the event loop; `answered` is called once, in this call or later."""
        self._answered = answered
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        try:
            inference = self._owner.inference
            inference.senders.arrived(self._sender, self._declared)
            head = Head.read(self._route.names, self._sender, self._text(_LENGTH), None)
            self._asked = ask(inference, head, body, self._done, self._owner.turn)
            self._end_if_done()
        except Exception as err:  # noqa: BLE001 - outermost catch, as in the application
            self._fail(err)

    def _done(self, outcome: Array | ServerError) -> None:
        """Take the outcome, from any thread."""
        if threading.get_ident() == self._thread:
            self._settle(outcome)
        else:
            self._loop.call_soon_threadsafe(self._settle, outcome)

    def _settle(self, outcome: Array | ServerError) -> None:
        self._outcome = outcome
        try:
            self._end_if_done()
        except Exception as err:  # noqa: BLE001 - outermost catch, as in the application
            self._fail(err)

    def _end_if_done(self) -> None:
        """Answer, once the query was asked and has its outcome: either may come first."""
        outcome, asked = self._outcome, self._asked
        if asked is None or outcome is None:
            return
        if isinstance(outcome, ServerError):
            raise outcome
        body, kind = packed(asked, outcome)
        accepts = self._text(b"accept-encoding") or ""
        if is_short(body):
            self._answered(compressed_here(accepts, body, kind))
            return
        packing = self._loop.create_task(compressed(accepts, body, kind))
        packing.add_done_callback(self._packed)

    def _packed(self, packing: asyncio.Task[Answer]) -> None:
        if not packing.cancelled():
            self._answered(packing.result())

    def _fail(self, error: Exception) -> None:
        if isinstance(error, ANSWERED):
            response = failure(error)
        else:
            response = surprise("POST", self._route.path, error)
        self._answered(Answer(response.status_code, response.raw_headers, bytes(response.body)))

    def _text(self, name: bytes) -> str | None:
        value = self._fields.get(name)
        return None if value is None else value.decode("latin-1")


def _short_length(head: Mapping[bytes, bytes]) -> int:
    """Length of the body of a plain request with a short one; 0 for any other request."""
    declared = head.get(b"content-length", b"")
    if not declared.isdigit() or len(declared) > _DIGITS or not head.keys().isdisjoint(UNUSUAL):
        return 0
    length = int(declared)
    return length if length <= SHORT_BYTES else 0


@functools.lru_cache(KNOWN_PATHS)
def _route_of(url: bytes) -> _Route | None:
    """The route of a query's plain path; None for others."""
    if not url.isascii() or any(mark in url for mark in b"?#%"):
        return None
    path = url.decode("ascii")
    found = rule_of("POST", path) if is_query({"path": path, "method": "POST"}) else None
    if found is None:
        return None
    rule, names = found
    return _Route(rule, path, (names["name"], names.get("version")))
