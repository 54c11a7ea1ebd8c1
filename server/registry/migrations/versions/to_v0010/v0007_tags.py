"""Tags of devices."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the registry to this version."""
    op.add_column(
        "devices", sa.Column("tags", sa.Text(), nullable=False, server_default=sa.text("''"))
    )
