"""The registry's tables, as this version of the program knows them.

A change here needs a migration: `python -m server.registry.migrations "what changes"` writes its
first draft, and a test checks that both agree. The tables work on SQLite and PostgreSQL.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

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
    Column("profile", JSON, nullable=False),
    Column("depth", Integer),
    Column("bundle", String(160)),
    Column("enrolled_at", Double, nullable=False),
    Column("revoked_at", Double),
    Column("last_seen", Double),
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

pins: Final = Table(
    "pins",
    METADATA,
    Column("device", String(63), ForeignKey("devices.id"), primary_key=True),
    Column("depth", Integer),
    Column("bundle", String(160)),
    Column("pinned_at", Double, nullable=False),
)

audit: Final = Table(
    "audit",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("at", Double, nullable=False),
    Column("who", String(80), nullable=False),
    Column("what", String(40), nullable=False),
    Column("detail", Text, nullable=False),
)
