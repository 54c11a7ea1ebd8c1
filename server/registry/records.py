"""Records of the registry: frozen values, never database rows.

Times are UTC seconds since 1970. Hashes of secrets are kept out of every repr, so that logs and
tracebacks do not show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Device:
    """One enrolled device.

    Attributes:
        id: unique over all fleets, `[a-z0-9-]{1,63}`.
        credential_sha256: hash of its credential in hex, with which a broker checks passwords.
        profile: the device's profile, as JSON.
        depth: stages that it runs, once decided.
        bundle: bundle that it should run, `{model}/{version}/{variant}`, once decided.
        last_seen: to within `TOUCH_RESOLUTION_S`.
    """

    id: str
    fleet: str
    credential_sha256: str = field(repr=False)
    profile: Mapping[str, Any] = field(repr=False)
    depth: int | None
    bundle: str | None
    enrolled_at: float
    revoked_at: float | None
    last_seen: float | None


@dataclass(frozen=True, slots=True)
class Token:
    """One enrolment token, without its secret."""

    token_sha256: str = field(repr=False)
    fleet: str
    note: str
    created_at: float
    expires_at: float
    used_at: float | None
    used_by: str | None


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One published version of a model; at most one version of a name is active."""

    name: str
    version: int
    active: bool
    published_at: float


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One entry of the audit trail; `what` is `device.enrol`, `token.create`..."""

    at: float
    who: str
    what: str
    detail: str
