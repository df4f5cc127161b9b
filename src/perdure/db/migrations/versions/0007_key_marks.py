"""Which key each tenant has in the object store."""

from __future__ import annotations

from alembic import op

from perdure.db.migrations import run_sql

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    run_sql(op, __file__)
