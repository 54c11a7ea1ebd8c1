"""The hash by which Mosquitto checks a device's credential.

It cannot be made of the stored SHA-256: devices that are enrolled already get it at a login.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the registry to this version."""
    op.add_column("devices", sa.Column("mosquitto_hash", sa.String(160), nullable=True))
