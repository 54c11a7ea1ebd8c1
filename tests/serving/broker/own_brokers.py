"""The two brokers that a server starts, for suites that both must pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal, get_args

from server.broker.child import BrokerChild, ListenSettings
from server.broker.mosquitto_child import MosquittoChild
from server.broker.mosquitto_files import BACKEND
from server.broker.policy import Principal, credential_sha256
from server.registry.credentials import mosquitto_hash

Program = Literal["embedded", "mosquitto"]
OwnBroker = BrokerChild | MosquittoChild

PROGRAMS: Final = get_args(Program)


def own_broker(
    program: Program,
    folder: Path,
    credential: str,
    settings: ListenSettings | None = None,
    **more: Any,
) -> OwnBroker:
    """A broker that is not started; its user `backend` has that credential."""
    if program == "mosquitto":
        return MosquittoChild(folder, settings, credential=credential, **more)
    child = BrokerChild(settings, **more)
    child.set_principal(Principal(BACKEND, "backend", None, credential_sha256(credential)))
    return child


def device_login(name: str, credential: str, fleet: str = "lab") -> Principal:
    """A device's login, as either broker knows it."""
    hashes = credential_sha256(credential), mosquitto_hash(credential)
    return Principal(name, "device", fleet, *hashes)


def let_in(broker: OwnBroker, principal: Principal, credential: str) -> None:
    """Let a device log in, in force on return."""
    if isinstance(broker, MosquittoChild):
        broker.set_principal(principal, credential)
    else:
        broker.set_principal(principal)
