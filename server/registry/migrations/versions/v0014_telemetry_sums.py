"""Sums over the devices' history are read from an index alone."""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the registry to this version."""
    columns = ["at", "device", "exits", "offloads", "fallbacks"]
    op.create_index("ix_telemetry_at_counts", "telemetry", columns)
    op.drop_index("ix_telemetry_at", "telemetry")
