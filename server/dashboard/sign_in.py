"""Signing in to the dashboard: a one-time link is traded for a session, which is a cookie.

The cookie is of use to no script (HttpOnly) and to no other site (SameSite=Strict). Requests that
another site makes a browser send are refused besides by what browsers say of them: the headers
Origin and Sec-Fetch-Site.
"""

from __future__ import annotations

from typing import Final, Protocol
from urllib.parse import urlsplit

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from server.audit.requests import WHO
from server.errors import AuthenticationError, ForbiddenError
from server.listening.proof import prove_peer
from server.registry.database import Registry
from server.registry.sign_in.sign_ins import SESSION_S, Session
from server.routes.rate_limit import RateLimit
from server.routes.turns import RegistryRoute
from server.settings import ServerSettings

SIGN_IN_AGAIN: Final = (
    "not signed in, or no longer; `splitedge server dashboard-link` prints a sign-in link"
)
READS_ONLY: Final = (
    "this sign-in is for reading alone; for changes, ask for a link of `splitedge server"
    " dashboard-link` without --read-only"
)


class SignInServices(Protocol):
    """The part of the server that these routes need; called from several threads at once."""

    @property
    def registry(self) -> Registry:
        """The sessions."""

    @property
    def settings(self) -> ServerSettings:
        """The state folder."""

    @property
    def operator_sha256(self) -> str:
        """The hash of the operator's secret, in hex; its first letters name the cookie."""


class Link(BaseModel):
    """The secret of a one-time link."""

    model_config = ConfigDict(extra="forbid")

    link: str = Field(max_length=200, repr=False)


class SignedIn(BaseModel):
    """The person who is signed in, and until when, UTC seconds since 1970; None for nobody.

    With `reads_only` the server refuses every action of this person. `state` is the server's
    folder, as commands on its machine name it.
    """

    who: str | None = None
    expires_at: float | None = None
    reads_only: bool = False
    state: str = ""


class SignIn:
    """Finds the session of a request; its methods are dependencies of routes."""

    def __init__(self, services: SignInServices) -> None:
        self._services = services

    def cookie(self, request: Request) -> str:
        """The cookie's name: that of no other server on the same host, which cookies do not part.

        Under TLS browsers keep a name that begins with `__Host-` to this host and to TLS.
        """
        name = f"splitedge-{self._services.operator_sha256[:8]}"
        return f"__Host-{name}" if request.url.scheme == "https" else name

    def session(self, request: Request) -> Session | None:
        """The session of a request of our own page; None without."""
        refuse_other_sites(request)
        secret = request.cookies.get(self.cookie(request))
        return None if secret is None else self._services.registry.sign_ins.find(secret)

    def reader(self, request: Request) -> Session:
        """The person who reads facts.

        Raises: AuthenticationError; ForbiddenError for a request that another site caused.
        """
        session = self.session(request)
        if session is None:
            raise AuthenticationError(SIGN_IN_AGAIN)
        setattr(request.state, WHO, session.who)
        prove_peer(request.scope)
        return session

    def actor(self, request: Request) -> Session:
        """The person who changes something.

        Raises: as `reader`; ForbiddenError too if the request does not say that it is our page's,
            or the person may only read.
        """
        require_own_origin(request)
        session = self.reader(request)
        if not session.may_act:
            raise ForbiddenError(READS_ONLY)
        return session


def router(services: SignInServices, sign_in: SignIn) -> APIRouter:
    """The routes that begin and end a session."""
    routes = APIRouter(
        prefix="/dashboard/session", route_class=RegistryRoute, include_in_schema=False
    )
    # 256 random bits cannot be guessed; the limit bounds what attempts write into the audit log
    limit = RateLimit(what="wrong links")
    state = str(services.settings.state)

    @routes.get("")
    def show(request: Request) -> SignedIn:
        """The person of this session, if there is one."""
        session = sign_in.session(request)
        return SignedIn() if session is None else _view(session, state)

    @routes.post("")
    def begin(body: Link, request: Request, response: Response) -> SignedIn:
        """Trade a one-time link for a session."""
        require_own_origin(request)
        address = "" if request.client is None else request.client.host
        limit.check(address)
        try:
            session, secret = services.registry.sign_ins.redeem(body.link)
        except AuthenticationError:
            limit.count(address)
            raise
        response.set_cookie(
            sign_in.cookie(request),
            secret,
            max_age=int(SESSION_S),
            path="/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return _view(session, state)

    @routes.delete("", status_code=204)
    def end(request: Request, response: Response) -> None:
        """End the session."""
        require_own_origin(request)
        name = sign_in.cookie(request)
        if sign_in.session(request) is not None:  # a stranger makes the registry write nothing
            services.registry.sign_ins.end(request.cookies.get(name, ""))
        response.delete_cookie(
            name,
            path="/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )

    return routes


def refuse_other_sites(request: Request) -> None:
    """Refuse a request that a page of another site caused, as far as the browser says so.

    Raises: ForbiddenError.
    """
    site = request.headers.get("sec-fetch-site", "same-origin")
    if site not in {"same-origin", "none"}:
        raise ForbiddenError(f"a page of another site (Sec-Fetch-Site: {site[:40]}) sent this")
    if "origin" in request.headers:
        require_own_origin(request)


def require_own_origin(request: Request) -> None:
    """Check that the header Origin names this server, which every browser says with a change.

    Host and port are compared, not the scheme: a proxy in front may end TLS.

    Raises: ForbiddenError.
    """
    origin = request.headers.get("origin", "")
    try:
        parts = urlsplit(origin)
    except ValueError:  # an open bracket, for example
        parts = urlsplit("")
    if parts.scheme not in {"http", "https"} or parts.netloc != request.headers.get("host"):
        raise ForbiddenError(f"Origin: expected this server's own, got {origin[:100] or 'none'!r}")


def _view(session: Session, state: str) -> SignedIn:
    return SignedIn(
        who=session.who,
        expires_at=session.expires_at,
        reads_only=not session.may_act,
        state=state,
    )
