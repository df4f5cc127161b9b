"""Executions that have ended are deleted some time later; heads of histories are signed."""

from __future__ import annotations

from alembic import op

from perdure.db.migrations import run_sql

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    run_sql(op, __file__)
