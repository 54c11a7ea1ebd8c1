"""Devices that said goodbye, or whose connection broke."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the registry to this version."""
    op.add_column("devices", sa.Column("gone_at", sa.Double(), nullable=True))
