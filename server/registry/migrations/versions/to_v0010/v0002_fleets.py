"""The model of each fleet, versions that are removed, and what devices report on their bundles.

Until now every device got the active version of the name published last, so each fleet that exists
is assigned that model: nothing moves because of the migration.
"""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the registry to this version."""
    op.add_column("models", sa.Column("activated_at", sa.Double(), nullable=True))
    op.add_column("models", sa.Column("removed_at", sa.Double(), nullable=True))
    op.add_column("models", sa.Column("digest", sa.String(64), nullable=True))
    op.create_table(
        "fleets",
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("model", sa.String(63), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("assigned_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_fleets"),
    )
    op.create_table(
        "reports",
        sa.Column("device", sa.String(63), nullable=False),
        sa.Column("running", sa.String(160), nullable=True),
        sa.Column("refused", sa.String(160), nullable=True),
        sa.Column("why", sa.String(500), nullable=True),
        sa.Column("refused_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["device"], ["devices.id"], name="fk_reports_device_devices"),
        sa.PrimaryKeyConstraint("device", name="pk_reports"),
    )
    _keep_assignments(op.get_bind())


def _keep_assignments(connection: sa.Connection) -> None:
    # each version became active when it was published
    connection.execute(sa.text("UPDATE models SET activated_at = published_at"))
    newest = "SELECT name FROM models WHERE active ORDER BY published_at DESC LIMIT 1"
    name = connection.execute(sa.text(newest)).scalar_one_or_none()
    if name is None:
        return
    known = "SELECT fleet FROM devices UNION SELECT fleet FROM tokens"
    rows = [
        {"name": fleet, "model": name, "assigned_at": time.time()}
        for fleet in connection.scalars(sa.text(known)).all()
    ]
    if rows:
        fleets = sa.table("fleets", sa.column("name"), sa.column("model"), sa.column("assigned_at"))
        connection.execute(sa.insert(fleets), rows)
