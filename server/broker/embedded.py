"""The embedded broker: the core, its sockets, and the principals that may log in.

Good for about 500 devices on one machine. MQTT 3.1.1, no shared subscriptions; for more, use
Mosquitto or EMQX by URL.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from typing import Any, Final

from edge_sdk.errors import ConfigurationError
from edge_sdk.service.listening import listening_advice
from server.broker import policy
from server.broker.core.broker import Broker, Event
from server.broker.core.limits import BrokerLimits, Bucket
from server.broker.core.packets import Connect
from server.broker.core.rights import Refusal, Rights
from server.broker.policy import Principal
from server.broker.rights import FleetRights
from server.broker.sockets import Sockets

_LINES_PER_S: Final = 1  # of the log, which a stranger must not fill
_LINE_BURST: Final = 50
_ID_CHARACTERS: Final = 63
_LEVELS: Final = {
    "login": logging.DEBUG,
    "refused": logging.WARNING,
    "swapped": logging.WARNING,
    "denied": logging.WARNING,
    "cut": logging.INFO,
}

logger = logging.getLogger(__name__)

OnEvent = Callable[[dict[str, Any]], None]


class EmbeddedBroker:
    """A broker of the running DirectLoop. It refuses every login until a principal is set.

    Args:
        on_event: told of logins, refusals and cuts, as server.broker.__main__ writes them.
    """

    def __init__(
        self, limits: BrokerLimits | None = None, on_event: OnEvent = lambda _event: None
    ) -> None:
        limits = limits or BrokerLimits()
        self._on_event = on_event
        self._core = Broker(self._authenticate, limits, self._happened)
        self._sockets = Sockets(self._core, limits)
        self._principals: dict[str, Principal] = {}
        self._owners: dict[str, str] = {}  # ids of the principals, by the digest of the credential
        self._logged = Bucket(_LINES_PER_S, _LINE_BURST, self._sockets.time())
        self._left_out = 0

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Start, and return the port: `port`, or the one the system chose for 0.

        Raises: ConfigurationError where the address cannot be used.
        """
        try:
            return await self._sockets.listen(host, port, tls)
        except OSError as err:
            raise ConfigurationError(
                f"broker: cannot listen on {host} port {port}: {err.strerror};"
                f" {listening_advice(err)}"
            ) from err

    def set_principal(self, principal: Principal) -> None:
        """Let `principal` log in; a change cuts connections made under the old rules."""
        before = self._principals.get(principal.client_id)
        self._principals[principal.client_id] = principal
        self._disown(before)
        self._owners[principal.credential_sha256] = principal.client_id
        if before is not None and before != principal:
            self._revoke(before, "its principal changed", forget=False)

    def remove_principal(self, client_id: str) -> None:
        """Cut `client_id` at once, refuse it from now on, and drop its retained messages."""
        before = self._principals.pop(client_id, None)
        if before is not None:
            self._disown(before)
            self._revoke(before, "revoked", forget=True)

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        await self._sockets.close()

    def _revoke(self, principal: Principal, why: str, *, forget: bool) -> None:
        self._core.revoke(FleetRights(principal), why, self._sockets.time(), forget=forget)
        self._sockets.settle()

    def _disown(self, principal: Principal | None) -> None:
        if principal is not None:
            self._owners.pop(principal.credential_sha256, None)

    def _authenticate(self, connect: Connect) -> Rights | Refusal:
        principal = policy.authenticate(
            self._principals, connect.client_id, connect.username, connect.password
        )
        if principal is not None:
            return FleetRights(principal)
        return policy.refusal(
            self._principals, self._owners, connect.client_id, connect.username, connect.password
        )

    def _happened(self, event: Event) -> None:
        """Tell an event, and log it if its level is logged and the log has room for it."""
        kind, client_id, peer, why = event
        level = _LEVELS[kind]
        if not logger.isEnabledFor(level):
            pass
        elif self._logged.take_if_there(self._sockets.time()):
            text = "client=%.63r %s, peer %s: %s (%d lines left out before)"
            logger.log(level, text, client_id, kind, peer, why, self._left_out)
            self._left_out = 0
        else:
            self._left_out += 1
        told = {"event": kind, "client_id": client_id[:_ID_CHARACTERS], "peer": peer, "why": why}
        self._on_event(told)
