"""History of devices: points in spans of time, and the last reading of each device."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the registry to this version."""
    op.create_table(
        "telemetry",
        sa.Column("device", sa.String(63), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("exits", sa.BigInteger(), nullable=False),
        sa.Column("offloads", sa.BigInteger(), nullable=False),
        sa.Column("fallbacks", sa.BigInteger(), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["device"], ["devices.id"], name="fk_telemetry_device_devices", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("device", "step", "at", name="pk_telemetry"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_telemetry_step_at", "telemetry", ["step", "at"])
    op.create_index("ix_telemetry_at", "telemetry", ["at"])
    op.create_table(
        "telemetry_last",
        sa.Column("device", sa.String(63), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["device"], ["devices.id"], name="fk_telemetry_last_device_devices", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("device", name="pk_telemetry_last"),
    )
