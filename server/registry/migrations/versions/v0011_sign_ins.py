"""Links to the dashboard, and the sessions that they opened."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the registry to this version."""
    op.create_table(
        "sign_ins",
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("who", sa.String(80), nullable=False),
        sa.Column("made_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("secret_sha256", name="pk_sign_ins"),
    )
