"""How Alembic reaches the database: over the connection that Database hands it."""

from __future__ import annotations

from alembic import context

from sentinel.sidecar.store.models import Base

# Without Alembic around it this is a module like any other, and does nothing.
if hasattr(context, "config"):
    context.configure(
        connection=context.config.attributes["connection"],
        target_metadata=Base.metadata,
        render_as_batch=True,  # SQLite cannot alter a table in place
    )
    with context.begin_transaction():
        context.run_migrations()
