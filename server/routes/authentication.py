"""Authentication: `Authorization: Bearer {device}:{credential}` or `Bearer operator:{secret}`."""

from __future__ import annotations

from typing import Final, Protocol

from fastapi import Request

from server.errors import AuthenticationError, ForbiddenError
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


class Access:
    """Rules of who may use a route, as dependencies that run before a body is read."""

    def __init__(self, credentials: CredentialStore) -> None:
        self._credentials = credentials

    def anyone(self, request: Request) -> Device | None:
        """Any device, or the operator (None)."""
        device = authenticate(self._credentials, request)
        if device is not None:
            self._credentials.registry.touch(device.id)
        return device

    def itself(self, request: Request, device_id: str) -> None:
        """The device that the path names."""
        device = self.anyone(request)
        if device is None or device.id != device_id:
            raise ForbiddenError("a device may ask about itself only")

    def itself_or_operator(self, request: Request, device_id: str) -> None:
        """The device that the path names, or the operator."""
        device = self.anyone(request)
        if device is not None and device.id != device_id:
            raise ForbiddenError("a device may ask about itself only")

    def operator(self, request: Request) -> None:
        """The operator."""
        if self.anyone(request) is not None:
            raise ForbiddenError(
                "only the operator may do this; its secret is in keys/operator.key"
            )
