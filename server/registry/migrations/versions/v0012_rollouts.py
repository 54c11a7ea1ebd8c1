"""Roll-outs, and the devices of their shares."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the registry to this version."""
    op.create_table(
        "rollouts",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(63), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("base", sa.Integer(), nullable=False),
        sa.Column("fleet", sa.String(63), nullable=True),
        sa.Column("tag", sa.String(63), nullable=True),
        sa.Column("device", sa.String(63), nullable=True),
        sa.Column("shares", sa.JSON(), nullable=False),
        sa.Column("health", sa.String(1000), nullable=False),
        sa.Column("wait_s", sa.Double(), nullable=False),
        sa.Column("answers_min", sa.Integer(), nullable=False),
        sa.Column("failures_max", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("stage", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("stage_at", sa.Double(), nullable=False),
        sa.Column("watched_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("standing", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("who", sa.String(80), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_rollouts"),
    )
    op.create_index("ix_rollouts_state", "rollouts", ["state"])
    op.create_table(
        "rollout_members",
        sa.Column("rollout", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(63), nullable=False),
        sa.Column("stage", sa.Integer(), nullable=False),
        sa.Column("before", sa.String(160), nullable=True),
        sa.Column("joined_at", sa.Double(), nullable=False),
        sa.Column("taken_at", sa.Double(), nullable=True),
        sa.Column("returned_at", sa.Double(), nullable=True),
        sa.Column("trouble", sa.String(700), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout"], ["rollouts.id"], name="fk_rollout_members_rollout_rollouts"
        ),
        sa.ForeignKeyConstraint(
            ["device"],
            ["devices.id"],
            name="fk_rollout_members_device_devices",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("rollout", "device", name="pk_rollout_members"),
    )
