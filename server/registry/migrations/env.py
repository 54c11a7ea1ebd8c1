"""Alembic's entry point; it uses the connection and the transaction that it is given."""

from __future__ import annotations

from alembic import context

from server.registry.schema import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    # SQLite alters a table by copying it
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
