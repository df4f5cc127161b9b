"""Who we are: the name by which an object store knows its owner."""

from __future__ import annotations

from alembic import op

from perdure.db.migrations import run_sql

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    run_sql(op, __file__)
