"""Times to wake at, and what becomes of long sleepers."""

from __future__ import annotations

from alembic import op

from perdure.db.migrations import run_sql

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    run_sql(op, __file__)
