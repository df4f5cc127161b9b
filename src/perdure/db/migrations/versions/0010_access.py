"""Tenants by name, and API keys with scopes."""

from __future__ import annotations

from alembic import op

from perdure.db.migrations import run_sql

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    run_sql(op, __file__)
