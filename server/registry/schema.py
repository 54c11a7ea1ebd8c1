"""The registry's tables, as this version of the program knows them.

A change here needs a migration: `python -m server.registry.migrations "what changes"` writes its
first draft, and a test checks that both agree. The tables work on SQLite and PostgreSQL.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
    text,
)


class Words(TypeDecorator[tuple[str, ...]]):
    """Words without spaces, as one text."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, _dialect: Dialect) -> str:
        """The text that is stored."""
        return " ".join(value or ())

    def process_result_value(self, value: str | None, _dialect: Dialect) -> tuple[str, ...]:
        """The words of a stored text."""
        return tuple((value or "").split())


# constraints have names, so that a later migration can drop them on any database
METADATA: Final = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

devices: Final = Table(
    "devices",
    METADATA,
    Column("id", String(63), primary_key=True),
    Column("fleet", String(63), nullable=False, index=True),
    Column("credential_sha256", String(64), nullable=False),
    Column("mosquitto_hash", String(160)),
    Column("profile", JSON, nullable=False),
    Column("depth", Integer),
    Column("bundle", String(160)),
    Column("enrolled_at", Double, nullable=False),
    Column("revoked_at", Double),
    Column("last_seen", Double),
    # since then it is away: it said goodbye, or its connection broke; null again once it is heard
    Column("gone_at", Double),
    Column("approved_at", Double),
    # a new credential, until the device confirms it or its time is over
    Column("next_sha256", String(64)),
    Column("next_until", Double),
    Column("tags", Words, nullable=False, server_default=text("''")),
    # what people call it; no two devices have the same one
    Column("title", String(63), index=True, unique=True),
)

tokens: Final = Table(
    "tokens",
    METADATA,
    Column("token_sha256", String(64), primary_key=True),
    Column("fleet", String(63), nullable=False),
    Column("note", String(200), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("used_at", Double),
    Column("used_by", String(63), ForeignKey("devices.id")),
    Column("approve", Boolean, nullable=False, server_default=false()),
    # an enrolled device that comes back with this token under its own name
    Column("device", String(63)),
)

keys: Final = Table(
    "keys",
    METADATA,
    Column("key_sha256", String(64), primary_key=True),
    Column("name", String(63), nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("models", JSON, nullable=False),
    Column("fleets", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    Column("requests", Double),
    Column("rows", Double),
    Column("bytes", Double),
    Column("uses", BigInteger, nullable=False),
    Column("used_at", Double),
)
# the database refuses a second key of a name, unless the first one is revoked
Index(
    "uq_keys_valid_name",
    keys.c.name,
    unique=True,
    sqlite_where=keys.c.revoked_at.is_(None),
    postgresql_where=keys.c.revoked_at.is_(None),
)

models: Final = Table(
    "models",
    METADATA,
    Column("name", String(63), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("active", Boolean, nullable=False),
    Column("published_at", Double, nullable=False),
    Column("activated_at", Double),
    Column("removed_at", Double),
    Column("digest", String(64)),
)
# the database refuses a second active version of a name
Index(
    "uq_models_active_name",
    models.c.name,
    unique=True,
    sqlite_where=models.c.active,
    postgresql_where=models.c.active,
)

# a fleet without a row has the model that was published first
fleets: Final = Table(
    "fleets",
    METADATA,
    Column("name", String(63), primary_key=True),
    Column("model", String(63), nullable=False),
    Column("version", Integer),
    Column("assigned_at", Double, nullable=False),
)

reports: Final = Table(
    "reports",
    METADATA,
    Column("device", String(63), ForeignKey("devices.id"), primary_key=True),
    Column("running", String(160)),
    Column("refused", String(160)),
    Column("why", String(500)),
    Column("refused_at", Double),
)

measurements: Final = Table(
    "measurements",
    METADATA,
    Column("device", String(63), ForeignKey("devices.id"), primary_key=True),
    Column("bundle", String(160), primary_key=True),
    Column("report", JSON, nullable=False),
    Column("measured_at", Double, nullable=False),
)

conditions: Final = Table(
    "conditions",
    METADATA,
    Column("device", String(63), ForeignKey("devices.id"), primary_key=True),
    Column("report", JSON, nullable=False),
    Column("reported_at", Double, nullable=False),
)

failures: Final = Table(
    "failures",
    METADATA,
    Column("device", String(63), ForeignKey("devices.id"), primary_key=True),
    Column("bundle", String(160), primary_key=True),
    Column("kind", String(20), nullable=False),
    Column("why", String(300), nullable=False),
    Column("failed_at", Double, nullable=False),
    Column("count", Integer, nullable=False),
)

# what devices are told over MQTT until they say that it is done
orders: Final = Table(
    "orders",
    METADATA,
    Column("device", String(63), ForeignKey("devices.id"), primary_key=True),
    Column("op", String(32), primary_key=True),
    Column("argument", String(160), primary_key=True),
    Column("asked_at", Double, nullable=False),
)

pins: Final = Table(
    "pins",
    METADATA,
    Column("device", String(63), ForeignKey("devices.id"), primary_key=True),
    Column("depth", Integer),
    Column("bundle", String(160)),
    Column("pinned_at", Double, nullable=False),
)

# ways into the dashboard; `kind` is "link" until the link is used, and then "session"
sign_ins: Final = Table(
    "sign_ins",
    METADATA,
    Column("secret_sha256", String(64), primary_key=True),
    Column("kind", String(8), nullable=False),
    Column("who", String(80), nullable=False),
    Column("made_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
)

# `fleet`, `tag` and `device` are what was chosen, all of which a device must fulfil; `base` is the
# version that the fleets should run without the roll-out
rollouts: Final = Table(
    "rollouts",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("model", String(63), nullable=False),
    Column("version", Integer, nullable=False),
    Column("base", Integer, nullable=False),
    Column("fleet", String(63)),
    Column("tag", String(63)),
    Column("device", String(63)),
    Column("shares", JSON, nullable=False),
    Column("health", String(1000), nullable=False),
    Column("wait_s", Double, nullable=False),
    Column("answers_min", Integer, nullable=False),
    Column("failures_max", Integer, nullable=False),
    Column("state", String(12), nullable=False, index=True),
    Column("stage", Integer, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("stage_at", Double, nullable=False),
    Column("watched_at", Double),
    Column("ended_at", Double),
    Column("standing", Boolean, nullable=False),
    Column("reason", Text, nullable=False),
    Column("who", String(80), nullable=False),
    Column("revision", Integer, nullable=False),
)

rollout_members: Final = Table(
    "rollout_members",
    METADATA,
    Column("rollout", Integer, ForeignKey("rollouts.id"), primary_key=True),
    Column("device", String(63), ForeignKey("devices.id", ondelete="CASCADE"), primary_key=True),
    Column("stage", Integer, nullable=False),
    Column("before", String(160)),
    Column("joined_at", Double, nullable=False),
    Column("taken_at", Double),
    Column("returned_at", Double),
    Column("trouble", String(700), nullable=False),
)

# `kind` is "change" for what changed the registry, "event" for logins and refusals
audit: Final = Table(
    "audit",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("at", Double, nullable=False),
    Column("who", String(80), nullable=False),
    Column("what", String(40), nullable=False),
    Column("detail", Text, nullable=False),
    Column("kind", String(8), nullable=False, server_default="change"),
    Column("source", String(64), nullable=False, server_default=text("''")),
    Column("outcome", String(8), nullable=False, server_default="done"),
    Column("count", Integer, nullable=False, server_default="1"),
    Column("until", Double),
    Index("ix_audit_kind_id", "kind", "id"),
)

# points of devices in spans of `step` seconds (0: between two heartbeats), which end at `at`;
# `content` is JSON, the sums that are asked of all devices have columns
telemetry: Final = Table(
    "telemetry",
    METADATA,
    Column("device", String(63), ForeignKey("devices.id", ondelete="CASCADE"), primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("at", BigInteger, primary_key=True, autoincrement=False),
    Column("exits", BigInteger, nullable=False),
    Column("offloads", BigInteger, nullable=False),
    Column("fallbacks", BigInteger, nullable=False),
    Column("content", Text, nullable=False),
    Index("ix_telemetry_step_at", "step", "at"),
    # sums over all devices are read from the index alone
    Index("ix_telemetry_at_counts", "at", "device", "exits", "offloads", "fallbacks"),
    sqlite_with_rowid=False,
)

# the last reading of each device, which the next point begins at
telemetry_last: Final = Table(
    "telemetry_last",
    METADATA,
    Column("device", String(63), ForeignKey("devices.id", ondelete="CASCADE"), primary_key=True),
    Column("at", Double, nullable=False),
    Column("content", Text, nullable=False),
)

# `about` is a device, a training, or "server"; an alert stays when its device is removed
alerts: Final = Table(
    "alerts",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("about", String(63), nullable=False),
    Column("text", Text, nullable=False),
    Column("level", String(16), nullable=False),
    Column("opened_at", Double, nullable=False),
    Column("closed_at", Double, index=True),
    Column("silenced_until", Double),
    Index("ix_alerts_kind_about", "kind", "about"),
)

# one row for each receiver and each of an alert's two messages; `done_at` is null while it waits
alert_notices: Final = Table(
    "alert_notices",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("alert", Integer, ForeignKey("alerts.id", ondelete="CASCADE"), nullable=False),
    Column("receiver", String(16), nullable=False),
    Column("state", String(8), nullable=False),
    Column("made_at", Double, nullable=False),
    Column("done_at", Double, index=True),
    UniqueConstraint("alert", "receiver", "state"),
)
