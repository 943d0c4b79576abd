"""The session of a JSON trainer that writes its run alone."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To this revision."""
    op.add_column(
        "run",
        sa.Column("session", sa.String(length=64), nullable=False, server_default=""),
    )


def downgrade() -> None:
    """Back to the one before."""
    op.drop_column("run", "session")
