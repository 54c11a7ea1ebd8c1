"""Authentication: `Authorization: Bearer {device}:{credential}` or `Bearer operator:{secret}`."""

from __future__ import annotations

from typing import Final, Protocol

from fastapi import Request

from server.errors import AuthenticationError
from server.registry.credentials import is_secret
from server.registry.database import Registry
from server.registry.records import Device

OPERATOR: Final = "operator"


class CredentialStore(Protocol):
    """The part of the server that logins are checked with."""

    @property
    def registry(self) -> Registry:
        """The devices."""

    @property
    def operator_sha256(self) -> str:
        """The hash of the operator's secret, in hex."""


def authenticate(credentials: CredentialStore, request: Request) -> Device | None:
    """The device that sent the request; None for the operator.

    Raises: AuthenticationError.
    """
    scheme, _, login = request.headers.get("authorization", "").partition(" ")
    name, colon, secret = login.strip().partition(":")
    if scheme.lower() != "bearer" or not colon:
        raise AuthenticationError("expected the header Authorization: Bearer DEVICE:CREDENTIAL")
    if name != OPERATOR:
        return credentials.registry.authenticate(name, secret)
    if not is_secret(secret, credentials.operator_sha256):
        raise AuthenticationError("operator: wrong secret; it is in keys/operator.key")
    return None
