"""Access rules of the broker: principals, and decisions as pure functions.

The embedded broker calls these functions. Mosquitto's roles are written from `device_rules`,
`BACKEND_HEARS` and `BACKEND_SAYS`, which come from the same topics.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.wire import topics
from edge_sdk.wire.topics import (
    FROM_DEVICE,
    ID_PATTERN,
    TO_DEVICE,
    Kind,
    Topic,
    all_devices,
    parse_topic,
)
from server.broker.core.rights import Refusal

Role = Literal["device", "backend"]

# Topics that a backend may subscribe to and publish to, as filters over all devices.
BACKEND_HEARS: Final = tuple(all_devices(kind) for kind in sorted(FROM_DEVICE))
BACKEND_SAYS: Final = tuple(all_devices(kind) for kind in sorted(TO_DEVICE))

_SHA256 = re.compile(r"[0-9a-f]{64}")
# compared with an unknown name's password, so that every refusal takes as long
_UNKNOWN: Final = hashlib.sha256(b"nobody").hexdigest()


@dataclass(frozen=True, slots=True)
class Principal:
    """A device or a backend that may log in.

    Attributes:
        client_id: user name; also the MQTT client id of a device. Several backends may log in as
            one principal, each as `{client_id}-{anything}`.
        fleet: the device's fleet; None for a backend.
        credential_sha256: hex digest of the password, see `credential_sha256`.
        mosquitto_hash: the hash by which Mosquitto checks it; None where it is not known.
    Raises: ConfigurationError for a role without its fleet, or a digest that is not one;
        FrameError for an id that cannot be part of a topic.
    """

    client_id: str
    role: Role
    fleet: str | None
    credential_sha256: str
    mosquitto_hash: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        topics.check_id(self.client_id, "client_id")
        if self.role not in ("device", "backend"):
            raise ConfigurationError(
                f"principal {self.client_id}: expected role device or backend, got {self.role!r}"
            )
        if (self.fleet is not None) != (self.role == "device"):
            raise ConfigurationError(
                f"principal {self.client_id}: a device has a fleet, a backend none; "
                f"got role {self.role} and fleet {self.fleet!r}"
            )
        if self.fleet is not None:
            topics.check_id(self.fleet, "fleet")
        if not _SHA256.fullmatch(self.credential_sha256):
            raise ConfigurationError(
                f"principal {self.client_id}: credential_sha256 must be 64 hex digits"
            )


def credential_sha256(credential: str) -> str:
    """The hex digest under which a credential is kept.

    A plain SHA-256 is enough for 256 random bits, which cannot be guessed.
    """
    return hashlib.sha256(credential.encode()).hexdigest()


def authenticate(
    principals: Mapping[str, Principal], client_id: str, username: str, password: bytes
) -> Principal | None:
    """The principal that logs in, or None for a wrong name, password or client id.

    Args:
        principals: by `client_id`.
        client_id, username, password: from the CONNECT packet.
    """
    principal = principals.get(username)
    expected = _UNKNOWN if principal is None else principal.credential_sha256
    matches = hmac.compare_digest(hashlib.sha256(password).hexdigest(), expected)
    if principal is None or not matches or not _may_be_called(principals, principal, client_id):
        return None
    return principal


def refusal(
    principals: Mapping[str, Principal],
    owners: Mapping[str, str],
    client_id: str,
    username: str,
    password: bytes,
) -> Refusal:
    """Why `authenticate` refuses a login, for the operator.

    Args:
        owners: ids of the principals, by the digest of their credential.
    """

    def owner_of(text: bytes) -> str | None:
        return owners.get(hashlib.sha256(text).hexdigest())

    # a user who puts things in the wrong place must not find a secret in the log
    shown = client_id if owner_of(client_id.encode()) is None else ""
    misplaced = owner_of(username.encode()) or owner_of(client_id.encode())
    if misplaced is not None:
        why = f"the credential of {misplaced} is in the place of its name: are the two swapped?"
        return Refusal(why, shown)
    named = ""
    if username != client_id:
        told = repr(username) if ID_PATTERN.fullmatch(username) else "no name of a device"
        named = f"; its user name was {told}"
    principal, owner = principals.get(username), owner_of(password)
    if owner is not None and owner != username:
        why = (
            f"it came with the credential of {owner}: were two devices' state folders swapped, or"
            f" was it copied? If nobody did that, revoke {owner}"
        )
        return Refusal(f"{why}{named}", shown, swapped=True)
    if owner is not None:
        return Refusal(f"the right credential, and another client id{named}", shown)
    what = "unknown name" if principal is None else "wrong credential"
    return Refusal(f"{what}{named}", shown)


def may_publish(principal: Principal, topic: str) -> bool:
    """Whether `principal` may publish to `topic`, wills included."""
    if principal.fleet is not None:
        return topics.may_publish(principal.fleet, principal.client_id, topic)
    return _kind(topic) in TO_DEVICE


def may_subscribe(principal: Principal, topic_filter: str) -> bool:
    """Whether `principal` may subscribe to `topic_filter`.

    A device may subscribe to its own reply and command topics, spelled out. A backend may
    subscribe to the topics of one device or of all. Shared subscriptions are left to other brokers.
    """
    if principal.fleet is not None:
        return topics.may_receive(principal.fleet, principal.client_id, topic_filter)
    return topic_filter in BACKEND_HEARS or _kind(topic_filter) in FROM_DEVICE


def may_receive(principal: Principal, topic: str) -> bool:
    """Whether a message on `topic` may be delivered to `principal`."""
    if principal.fleet is not None:
        return topics.may_receive(principal.fleet, principal.client_id, topic)
    return _kind(topic) in FROM_DEVICE


def may_retain(principal: Principal, topic: str) -> bool:
    """Whether `principal` may retain messages on `topic`: a device may, on its status topic."""
    return _kind(topic) is Kind.STATUS and may_publish(principal, topic)


def device_rules(fleet: str, device: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The literal topics a device may publish to, and those it may subscribe to and receive."""
    every = [str(Topic(fleet, device, kind)) for kind in Kind]
    return (
        tuple(topic for topic in every if topics.may_publish(fleet, device, topic)),
        tuple(topic for topic in every if topics.may_receive(fleet, device, topic)),
    )


def _may_be_called(
    principals: Mapping[str, Principal], principal: Principal, client_id: str
) -> bool:
    if client_id == principal.client_id:
        return True
    # with its suffix a backend must not have the name of another principal
    one_of_many = principal.role == "backend" and client_id.startswith(f"{principal.client_id}-")
    return one_of_many and client_id not in principals


def _kind(topic: str) -> Kind | None:
    try:
        return parse_topic(topic).kind
    except FrameError:
        return None
