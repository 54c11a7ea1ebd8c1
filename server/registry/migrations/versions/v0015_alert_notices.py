"""Notices of alerts: what each receiver is told, and whether it was."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the registry to this version."""
    op.create_table(
        "alert_notices",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("alert", sa.Integer(), nullable=False),
        sa.Column("receiver", sa.String(16), nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("made_at", sa.Double(), nullable=False),
        sa.Column("done_at", sa.Double()),
        sa.ForeignKeyConstraint(
            ["alert"],
            ["alerts.id"],
            name="fk_alert_notices_alert_alerts",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name="pk_alert_notices"),
        sa.UniqueConstraint(
            "alert", "receiver", "state", name="uq_alert_notices_alert_receiver_state"
        ),
    )
    op.create_index("ix_alert_notices_done_at", "alert_notices", ["done_at"])
