"""Authentication: who sends a request, and whether the table of rules lets it through.

`Authorization: Bearer DEVICE:CREDENTIAL`, `Bearer operator:SECRET` or `Bearer KEY`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from server.access.heads import address_of, is_query
from server.access.recent_logins import RecentLogins
from server.access.rules import Login, Rule
from server.access.table import is_guarded, methods_of, rule_of
from server.audit.requests import WHO
from server.errors import AuthenticationError, RegistryError, ServerError
from server.listening.proof import prove_peer
from server.registry.credentials import is_secret
from server.registry.database import Registry
from server.registry.keys import PREFIX
from server.registry.records import ApiKey, Device
from server.registry.transactions import OPERATOR
from server.routes.errors import answer_to, error_response

LOGINS: Final = 4  # that are read from the registry at one time

# a proxy in front of a server on loopback brings requests of others
FORWARDED: Final = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via")

AUTHORIZATION: Final = b"authorization"

# what the guard leaves in the state of a request
LOGIN: Final = "login"


class CredentialStore(Protocol):
    """The part of the server that logins are checked with."""

    @property
    def registry(self) -> Registry:
        """The devices and the keys."""

    @property
    def operator_sha256(self) -> str:
        """The hash of the operator's secret, in hex."""

    def logged_in(self, device: Device, credential: str) -> None:
        """Note that a device showed its credential."""


class Presence(CredentialStore, Protocol):
    """Logins, and whom they show to be there."""

    def seen(self, device_id: str) -> None:
        """Note that a device was heard, without waiting: it must be let in on a full disk too."""


def secret_of(request: Request) -> str:
    """The secret of a request's login, right or wrong.

    Raises: AuthenticationError if it has none.
    """
    return _login_of(request)[1]


def login_of(request: Request) -> Login | None:
    """The sender of a request, as the guard found; None for a request that needed no login."""
    found = getattr(request.state, LOGIN)
    assert found is None or isinstance(found, Login)
    return found


def device_of(request: Request) -> Device:
    """The device that sent a request, on a route that devices alone may use."""
    login = login_of(request)
    assert login is not None
    assert login.device is not None
    return login.device


def authenticate(
    credentials: CredentialStore, request: Request, *, even_unapproved: bool = False
) -> Login:
    """The device, the key or the operator that sent the request.

    Args:
        even_unapproved: also a device that waits for approval.
    Raises: AuthenticationError; ApprovalError; RegistryError.
    """
    name, secret = _login_of(request)
    if name is None:
        key = credentials.registry.keys.authenticate(secret)
        login = Login(key=key, models=_models_of(credentials.registry, key))
    elif name == OPERATOR:
        if not is_secret(secret, credentials.operator_sha256):
            raise AuthenticationError("operator: wrong secret; it is in keys/operator.key")
        login = Login()
    else:
        device = credentials.registry.authenticate(name, secret, even_unapproved=even_unapproved)
        # a new credential is not told to the broker before the device has confirmed it
        if device.active and is_secret(secret, device.credential_sha256):
            credentials.logged_in(device, secret)
        login = Login(device=device)
    setattr(request.state, WHO, login.name)  # for the audit log
    prove_peer(request.scope)
    return login


class Guard:
    """Middleware that lets a request through if the table allows it, before its body is read.

    A route that is not in the table is answered with 404; what lies outside of the table's paths
    has a sign-in of its own.

    Args:
        loopback: whether this machine's programs alone reach the server.
        recent: logins of queries that need not be read again; None reads all of them.
    """

    def __init__(
        self,
        app: ASGIApp,
        services: Presence,
        *,
        loopback: bool = False,
        recent: RecentLogins | None = None,
    ) -> None:
        self._app = app
        self._services = services
        self._loopback = loopback
        self._recent = recent
        # Logins are read from the registry in threads of their own. Those that FastAPI uses may all
        # be busy with requests that wait for the registry's database.
        self._threads = ThreadPoolExecutor(LOGINS, thread_name_prefix="logins")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] == "lifespan" or not is_guarded(scope["path"]):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no route of the table is a WebSocket
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
            return
        found = rule_of(scope["method"], scope["path"])
        if found is None:
            await _no_route(scope["path"])(scope, receive, send)
            return
        try:
            login = await self._login(scope, *found)
        except ServerError as err:
            await answer_to(Request(scope), err)(scope, receive, send)
            return
        scope.setdefault("state", {})[LOGIN] = login
        await self._app(scope, receive, send)

    async def _login(self, scope: Scope, rule: Rule, names: Mapping[str, str]) -> Login | None:
        """Raises: ServerError for a request that is refused."""
        fields = {name for name, _ in scope["headers"]}
        is_open = is_open_to(rule, fields, loopback=self._loopback)
        if is_open and (rule.without_login == "always" or AUTHORIZATION not in fields):
            return None
        recent = self._recent if is_query(scope) else None
        header, source = _header_and_source(scope)
        if recent is not None:
            known = recent.find(header, source, rule, names["name"])
            if known is not None:
                scope.setdefault("state", {})[WHO] = known.name
                return known
        request = Request(scope)
        loop = asyncio.get_running_loop()
        try:
            login = await loop.run_in_executor(self._threads, self._check, request, rule, names)
        except (AuthenticationError, RegistryError):
            if is_open:  # then it is anonymous
                return None
            raise
        if recent is not None:
            recent.keep(header, source, login)
        return login

    def _check(self, request: Request, rule: Rule, names: Mapping[str, str]) -> Login:
        login = authenticate(self._services, request, even_unapproved=rule.waiting)
        if login.device is not None:
            self._services.seen(login.device.id)
        rule.check(login, names.get("device_id"))
        return login


def is_open_to(rule: Rule, fields: AbstractSet[bytes], *, loopback: bool) -> bool:
    """Whether a request needs no login.

    Args:
        fields: names in its head, in lower case.
        loopback: whether this machine's programs alone reach the server.
    """
    return rule.is_open(loopback=loopback and fields.isdisjoint(FORWARDED))


def _header_and_source(scope: Scope) -> tuple[bytes, str]:
    """The login of a request as it was sent, empty if there is none, and its client's address."""
    header = next((value for name, value in scope["headers"] if name == AUTHORIZATION), b"")
    return header, address_of(scope.get("client"))


def _no_route(path: str) -> ASGIApp:
    methods = methods_of(path)
    if methods:
        return error_response(405, "Method Not Allowed", {"Allow": ", ".join(methods)})
    return error_response(404, "Not Found")


def _login_of(request: Request) -> tuple[str | None, str]:
    """Name and secret of a login; a key has no name.

    Raises: AuthenticationError if the request has none.
    """
    scheme, _, login = request.headers.get("authorization", "").partition(" ")
    login = login.strip()
    if scheme.lower() == "bearer":
        if login.startswith(PREFIX):
            return None, login
        name, colon, secret = login.partition(":")
        if colon:
            return name, secret
    raise AuthenticationError(
        "expected the header Authorization: Bearer KEY, or Bearer DEVICE:CREDENTIAL; the operator"
        " makes keys with `splitedge server keys create`"
    )


def _models_of(registry: Registry, key: ApiKey) -> frozenset[str] | None:
    """The models that a key may ask now; None for all."""
    if not key.models and not key.fleets:
        return None
    of_fleets = [registry.catalogue.wanted(fleet).model for fleet in key.fleets]
    return frozenset([*key.models, *(model for model in of_fleets if model is not None)])
