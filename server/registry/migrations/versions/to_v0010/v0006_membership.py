"""Approval of devices, new credentials that wait to be confirmed, and orders to devices."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the registry to this version."""
    op.add_column("devices", sa.Column("approved_at", sa.Double(), nullable=True))
    op.add_column("devices", sa.Column("next_sha256", sa.String(64), nullable=True))
    op.add_column("devices", sa.Column("next_until", sa.Double(), nullable=True))
    # whoever is here already was let in by a token alone
    op.execute("UPDATE devices SET approved_at = enrolled_at")
    op.add_column(
        "tokens", sa.Column("approve", sa.Boolean(), nullable=False, server_default=sa.false())
    )
    op.create_table(
        "orders",
        sa.Column("device", sa.String(63), nullable=False),
        sa.Column("op", sa.String(32), nullable=False),
        sa.Column("argument", sa.String(160), nullable=False),
        sa.Column("asked_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.id"], name="fk_orders_device_devices"),
        sa.PrimaryKeyConstraint("device", "op", "argument", name="pk_orders"),
    )
