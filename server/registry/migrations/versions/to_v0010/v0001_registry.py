"""Devices, tokens, models and the audit trail."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the registry to this version."""
    op.create_table(
        "devices",
        sa.Column("id", sa.String(63), nullable=False),
        sa.Column("fleet", sa.String(63), nullable=False),
        sa.Column("credential_sha256", sa.String(64), nullable=False),
        sa.Column("profile", sa.JSON(), nullable=False),
        sa.Column("depth", sa.Integer(), nullable=True),
        sa.Column("bundle", sa.String(160), nullable=True),
        sa.Column("enrolled_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("last_seen", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_devices"),
    )
    op.create_index("ix_devices_fleet", "devices", ["fleet"])
    op.create_table(
        "tokens",
        sa.Column("token_sha256", sa.String(64), nullable=False),
        sa.Column("fleet", sa.String(63), nullable=False),
        sa.Column("note", sa.String(200), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=True),
        sa.Column("used_by", sa.String(63), nullable=True),
        sa.ForeignKeyConstraint(["used_by"], ["devices.id"], name="fk_tokens_used_by_devices"),
        sa.PrimaryKeyConstraint("token_sha256", name="pk_tokens"),
    )
    op.create_table(
        "models",
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.Column("published_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", "version", name="pk_models"),
    )
    op.create_index(
        "uq_models_active_name",
        "models",
        ["name"],
        unique=True,
        sqlite_where=sa.text("active"),
        postgresql_where=sa.text("active"),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("who", sa.String(80), nullable=False),
        sa.Column("what", sa.String(40), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
