"""Alembic's migrations of the database; `Database` runs them when it opens."""
