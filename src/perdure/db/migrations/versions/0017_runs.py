"""Durable executions: functions, workers, executions, their operations and histories."""

from __future__ import annotations

from alembic import op

from perdure.db.migrations import run_sql

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    run_sql(op, __file__)
