"""Source, outcome and count of entries of the audit log, and events beside changes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the registry to this version."""
    for column in (
        sa.Column("kind", sa.String(8), nullable=False, server_default="change"),
        sa.Column("source", sa.String(64), nullable=False, server_default=sa.text("''")),
        sa.Column("outcome", sa.String(8), nullable=False, server_default="done"),
        sa.Column("count", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("until", sa.Double(), nullable=True),
    ):
        op.add_column("audit", column)
    op.create_index("ix_audit_kind_id", "audit", ["kind", "id"])
