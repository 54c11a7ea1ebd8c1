"""Service of a running agent: its API in the state folder, and over HTTP if asked for."""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from edge_sdk.errors import ConfigurationError
from edge_sdk.service.agent_api import AgentApi
from edge_sdk.service.carrier import Carrier
from edge_sdk.service.exchange import Head
from edge_sdk.service.guard import Guard, read_secret
from edge_sdk.service.inference import body_limit
from edge_sdk.service.listening import Listener, connect_in, listen, listen_in
from edge_sdk.service.local_exchange import LocalExchange
from edge_sdk.settings_file.serve_table import ServeTable
from edge_sdk.wire.address import Address
from edge_sdk.wire.answers import HEADER_LENGTH

if TYPE_CHECKING:
    from edge_sdk.agent import EdgeAgent

logger = logging.getLogger(__name__)

#: Places of the socket in the state folder beside those of inferences: one update, one rotation,
#: and the rest for what is answered at once, so that the agent finds one for asking itself.
BESIDE_INFERENCES: Final = 8
# what the agent asks itself: its answer needs the agent's locks, and the threads of the socket
STATUS_REQUEST: Final = b"GET /agent/status HTTP/1.1\r\nHost: localhost\r\n\r\n"
OK: Final = b"HTTP/1.1 200"


class AgentService:
    """Answers other programs for an agent.

        with AgentService(state, table) as service:
            with EdgeAgent.open(state) as agent, service.answering(agent):
                ...

    It listens from the start, so that a port that is taken is told before anything else begins, and
    so that clients learn that the agent is starting.

    Args:
        state: folder of the agent.
        table: settings of HTTP; paths in it are relative to the folder.
    Attributes:
        url: where HTTP is served; None if it is not.
        new_secret: the file with a secret that was made now; None if there was one before.
    Raises: ConfigurationError if the address is taken, or a file cannot be used.
    """

    def __init__(self, state: Path, table: ServeTable) -> None:
        self._state = state
        self._table = table
        self._api = AgentApi(table.in_flight)
        self._parts = contextlib.ExitStack()
        self.url: str | None = None
        self.new_secret: Path | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as parts:
            if self._table.address is not None:
                self._serve(Address.parse(self._table.address, "address"), parts)
            self._parts = parts.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    @contextlib.contextmanager
    def answering(self, agent: EdgeAgent) -> Iterator[None]:
        """Answer for `agent`, which holds the lock of the state folder, within the block."""
        with contextlib.ExitStack() as parts:
            try:
                listening = parts.enter_context(listen_in(self._state))
            except OSError as err:
                logger.warning(
                    "%s: no socket can be made here (%s): `splitedge agent predict` cannot ask "
                    "this agent",
                    self._state,
                    err.strerror,
                )
            else:
                local = Carrier(
                    listening,
                    exchange=LocalExchange,
                    check=lambda _: None,
                    limit=_limit,
                    answer=lambda request: self._api.answer(request, local=True, trusted=True),
                    connections=self._table.in_flight + BESIDE_INFERENCES,
                )
                parts.enter_context(local)
            self._api.agent = agent
            parts.callback(self._forget)
            yield

    def hangs(self, limit_s: float) -> str:
        """Why programs of this device get no answer; empty while they do, or before they can.

        Args:
            limit_s: time that an answer may take.
        """
        if self._api.agent is None:
            return ""
        try:
            asking = connect_in(self._state)
            if asking is None:  # no socket could be made here, which was said at the start
                return ""
            with asking:
                asking.settimeout(limit_s)
                asking.sendall(STATUS_REQUEST)
                answer = asking.recv(len(OK))
        except OSError as err:
            return f"programs that ask the agent get no answer ({err})"
        if answer != OK and self._api.agent is not None:
            return f"the agent answers with {answer!r} when it is asked for its status"
        return ""

    def _forget(self) -> None:
        self._api.agent = None

    def _serve(self, address: Address, parts: contextlib.ExitStack) -> None:
        from edge_sdk.service.network_exchange import NetworkExchange  # noqa: PLC0415 - extra serve

        table = self._table
        tls = None
        if table.cert is not None and table.key is not None:
            tls = _server_context(self._state / table.cert, self._state / table.key)
        secret = None
        if table.secret is not None:
            path = self._state / table.secret
            secret, new = read_secret(path)
            self.new_secret = path if new else None
        trusted = secret is not None
        listener: Listener = listen(address, "--serve")
        carrier = Carrier(
            listener.socket,
            exchange=NetworkExchange,
            check=Guard(secret, loopback=address.loopback).check,
            limit=_limit,
            answer=lambda request: self._api.answer(request, local=False, trusted=trusted),
            connections=table.connections,
            tls=tls,
        )
        parts.enter_context(carrier)
        self.url = f"{'http' if tls is None else 'https'}://{listener.address}"


def _limit(head: Head) -> int:
    return body_limit(head.headers.get(HEADER_LENGTH.lower()))


def _server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """A context that shows the certificate.

    Raises: ConfigurationError if the files cannot be used.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except ssl.SSLError as err:
        raise ConfigurationError(
            f"{cert}, {key}: expected a PEM certificate and its own key ({err.reason})"
        ) from err
    except OSError as err:
        raise ConfigurationError(f"{cert}, {key}: cannot be read ({err.strerror})") from err
    return context
