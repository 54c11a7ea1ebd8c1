"""Measurements, conditions and failures of devices, and the operator's pins."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the registry to this version."""
    op.create_table(
        "measurements",
        sa.Column("device", sa.String(63), nullable=False),
        sa.Column("bundle", sa.String(160), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.Column("measured_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.id"], name="fk_measurements_device_devices"),
        sa.PrimaryKeyConstraint("device", "bundle", name="pk_measurements"),
    )
    op.create_table(
        "conditions",
        sa.Column("device", sa.String(63), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.Column("reported_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.id"], name="fk_conditions_device_devices"),
        sa.PrimaryKeyConstraint("device", name="pk_conditions"),
    )
    op.create_table(
        "failures",
        sa.Column("device", sa.String(63), nullable=False),
        sa.Column("bundle", sa.String(160), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("why", sa.String(300), nullable=False),
        sa.Column("failed_at", sa.Double(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.id"], name="fk_failures_device_devices"),
        sa.PrimaryKeyConstraint("device", "bundle", name="pk_failures"),
    )
    op.create_table(
        "pins",
        sa.Column("device", sa.String(63), nullable=False),
        sa.Column("depth", sa.Integer(), nullable=True),
        sa.Column("bundle", sa.String(160), nullable=True),
        sa.Column("pinned_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.id"], name="fk_pins_device_devices"),
        sa.PrimaryKeyConstraint("device", name="pk_pins"),
    )
