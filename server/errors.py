"""Errors of the server, as one tree.

SplitedgeError (edge_sdk.errors)
└── ServerError                 has the HTTP status of its answer
    ├── UnknownModelError           404
    ├── UnknownDeviceError          404
    ├── UnknownKeyError             404
    ├── UnknownRolloutError         404
    ├── BadRequestError             400: the peer's request cannot be served
    ├── AuthenticationError         401
    ├── ForbiddenError              403: the credential is right, but does not allow this
    ├── ApprovalError               403: the device waits for the operator's approval
    ├── TokenError                  403: the enrolment token is unknown, used or expired
    ├── ConflictError               409: the state of the registry does not allow this now
    ├── NotJoinedError              409: training: the device has not joined this trainer
    ├── EndedError                  410: training is over
    ├── ArtifactError               500: the signed repository on disk is damaged
    ├── OverloadedError             429: the queue is full; says when to try again
    ├── NotReadyError               503: no model loaded yet
    ├── ClockError                  503: the server's clock is wrong, so it signs nothing
    ├── RegistryError               503: the database cannot be opened, read or written
    ├── ExpiredError                504: the deadline passed before the answer was ready
    └── WorkerError                 500: a process that trains for a simulation has ended
"""

from __future__ import annotations

from typing import ClassVar

from edge_sdk.errors import SplitedgeError


class ServerError(SplitedgeError):
    """Base of the server's errors.

    Attributes:
        status: HTTP status of the answer.
        retry_after_s: seconds after which the peer may try again; None if that would not help.
    """

    status: ClassVar[int] = 500
    retry_after_s: float | None = None


class UnknownModelError(ServerError):
    """No such model or version; the text names the existing ones."""

    status = 404


class UnknownDeviceError(ServerError):
    """No such device."""

    status = 404


class UnknownKeyError(ServerError):
    """No such API key, or it is revoked."""

    status = 404


class UnknownRolloutError(ServerError):
    """No such roll-out."""

    status = 404


class BadRequestError(ServerError):
    """The peer's request is well-formed, but cannot be served."""

    status = 400


class AuthenticationError(ServerError):
    """Missing or wrong credential."""

    status = 401


class ForbiddenError(ServerError):
    """The credential is right, but does not allow this request."""

    status = 403


class ApprovalError(ServerError):
    """The device waits for the operator's approval; until then its credential opens nothing."""

    status = 403


class TokenError(ServerError):
    """The enrolment token is unknown, used or expired."""

    status = 403


class ArtifactError(ServerError):
    """Keys or metadata of the signed repository are damaged; the text says what to restore."""


class ConflictError(ServerError):
    """The registry's state does not allow this now; the text says what to do first."""

    status = 409


class NotJoinedError(ServerError):
    """The device has not joined this trainer, which may have been restarted since it did."""

    status = 409


class EndedError(ServerError):
    """Training is over."""

    status = 410


class OverloadedError(ServerError):
    """The queue is full; the caller answers locally and may try again later."""

    status = 429
    retry_after_s: float

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReadyError(ServerError):
    """No model is loaded yet."""

    status = 503


class ClockError(ServerError):
    """The server's clock is plainly wrong, so it signs nothing and enrols nobody."""

    status = 503
    retry_after_s = 60.0


class RegistryError(ServerError):
    """The registry's database cannot be opened, read or written."""

    status = 503
    retry_after_s = 1.0


class ExpiredError(ServerError):
    """The caller's deadline passed before the answer was ready."""

    status = 504


class WorkerError(ServerError):
    """A process that trains clients for a simulation has ended, or cannot train them."""


def gist(err: Exception) -> str:
    """The text of an error without its numbers, which differ from one try to the next."""
    return "".join(letter for letter in str(err) if not letter.isdigit() and letter != ".")
