"""Tenants whose key in the object store is thrown away."""

from __future__ import annotations

from alembic import op

from perdure.db.migrations import run_sql

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    run_sql(op, __file__)
