"""Titles of devices."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the registry to this version."""
    op.add_column("devices", sa.Column("title", sa.String(63)))
    op.create_index("ix_devices_title", "devices", ["title"], unique=True)
