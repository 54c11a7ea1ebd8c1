"""Records of the registry: frozen values, never database rows.

Times are UTC seconds since 1970. Hashes of secrets are kept out of every repr, so that logs and
tracebacks do not show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from profiles.measured import BundleMeasurement, Conditions

FailureKind = Literal["memory", "conditions"]
Scope = Literal["infer", "operate", "train"]

SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)


@dataclass(frozen=True, slots=True)
class Device:
    """One enrolled device.

    Attributes:
        id: unique over all fleets, `[a-z0-9-]{1,63}`.
        credential_sha256: hash of its credential in hex, with which the embedded broker and HTTP
            check it.
        mosquitto_hash: hash by which Mosquitto checks it; None for a device enrolled before this
            was kept, until it logs in over HTTP.
        profile: the device's profile, as JSON.
        depth: stages that it runs, once decided.
        bundle: bundle that it should run, `{model}/{version}/{variant}`, once decided.
        last_seen: to within `TOUCH_RESOLUTION_S`.
        gone_at: when it said goodbye or its connection broke; None if it was heard after that.
        approved_at: None while it waits for the operator's approval.
        next_sha256: hash of a new credential, which is valid beside the other one until the device
            confirms it, at most until `next_until`.
        tags: the operator's words for it, sorted.
        title: what people call it; None if they use its id.
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
    mosquitto_hash: str | None = field(default=None, repr=False)
    approved_at: float | None = 0.0
    next_sha256: str | None = field(default=None, repr=False)
    next_until: float | None = None
    tags: tuple[str, ...] = ()
    title: str | None = None
    gone_at: float | None = None

    @property
    def active(self) -> bool:
        """Whether its credential opens anything: it is approved, and not revoked."""
        return self.approved_at is not None and self.revoked_at is None


@dataclass(frozen=True, slots=True)
class Order:
    """Something that a device was told to do, and has not done yet.

    Attributes:
        op: `rotate`, or `lift-quarantine` of the bundle `argument`.
    """

    device: str
    op: str
    argument: str
    asked_at: float


@dataclass(frozen=True, slots=True)
class Token:
    """One enrolment token, without its secret.

    Attributes:
        approve: whether its device waits for the operator.
        device: the enrolled device that comes back with it; None for any new one.
    """

    token_sha256: str = field(repr=False)
    fleet: str
    note: str
    created_at: float
    expires_at: float
    used_at: float | None
    used_by: str | None
    approve: bool = False
    device: str | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One API key, without its secret.

    Attributes:
        name: unique among the keys that work; another one may have it once this one is revoked.
        scopes: what it opens; see `server.access`.
        models, fleets: the models that it may ask, by name and by the fleet that runs them; all of
            them if both are empty.
        expires_at: None for a key that is valid until it is revoked.
        requests, rows, bytes: most queries, samples and bytes a second; None as for all senders.
        uses: requests with it, without those of the last half minute; the last at `used_at`.
    """

    key_sha256: str = field(repr=False)
    name: str
    scopes: tuple[Scope, ...]
    models: tuple[str, ...]
    fleets: tuple[str, ...]
    created_at: float
    expires_at: float | None
    revoked_at: float | None = None
    requests: float | None = None
    rows: float | None = None
    bytes: float | None = None
    uses: int = 0
    used_at: float | None = None


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One published version of a model; at most one version of a name is active.

    Attributes:
        activated_at: when it last became active; None if it never did, or was rolled back.
        removed_at: when it was removed; its number stays taken.
        digest: SHA-256 over its files in hex; None if it was published before this was kept.
    """

    name: str
    version: int
    active: bool
    published_at: float
    activated_at: float | None = None
    removed_at: float | None = None
    digest: str | None = None

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"


@dataclass(frozen=True, slots=True)
class FleetModel:
    """The model of one fleet.

    Attributes:
        model: None while nothing is published.
        version: the one that its devices should run.
        pinned: whether it stays at that version; else it follows the active version.
        assigned: whether an operator chose the model; else it is the one published first.
    """

    fleet: str
    model: str | None
    version: int | None
    pinned: bool
    assigned: bool


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """A device's last report on its bundles.

    Attributes:
        running: bundle that it runs, `{model}/{version}/{variant}`.
        refused: bundle that it could not take on, and `why`; None once it took the one it was told.
    """

    device: str
    running: str | None = None
    refused: str | None = None
    why: str | None = None
    refused_at: float | None = None


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One entry of the audit log.

    Attributes:
        id: grows with every entry.
        at: UTC seconds since 1970. until: the last of several alike.
        who: device, "operator" or "server"; in a refusal, the name that the peer gave itself.
        what: `device.enrol`, `token.create`, `mqtt.login`...
        source: address of the peer; "USER on this machine" for a command.
        outcome: "done" or "refused".
        count: how often, from `at` to `until`.
    """

    id: int
    at: float
    until: float
    who: str
    what: str
    source: str
    outcome: str
    count: int
    detail: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A bundle that a device had to leave.

    Attributes:
        kind: "memory" if it ran out of memory there; "conditions" if the device got too slow for it
            or had too little memory left.
        count: how often, each time within days of the one before.
    """

    bundle: str
    why: str
    failed_at: float
    count: int = 1
    kind: FailureKind = "memory"


@dataclass(frozen=True, slots=True)
class Pin:
    """The operator's choice for one device: a depth of its model, or a bundle of any model."""

    depth: int | None
    bundle: str | None

    def __str__(self) -> str:
        return f"depth {self.depth}" if self.bundle is None else self.bundle


@dataclass(frozen=True, slots=True)
class Capability:
    """Everything that is known of what a device can do.

    Attributes:
        measurements: oldest first, one a bundle.
        conditions: the last that it reported; None before the first report.
        failures: oldest first, one a bundle.
        pin: None if the fleet's rule chooses.
    """

    measurements: tuple[BundleMeasurement, ...] = ()
    conditions: Conditions | None = None
    failures: tuple[Failure, ...] = ()
    pin: Pin | None = None
