"""Share links as rows, so that one can be taken back."""

from __future__ import annotations

from alembic import op

from perdure.db.migrations import run_sql

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    run_sql(op, __file__)
