"""Until when nothing of a scope is collected: a recovery without all of it has left things that could be salvaged."""

from __future__ import annotations

from alembic import op

from perdure.db.migrations import run_sql

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    run_sql(op, __file__)
