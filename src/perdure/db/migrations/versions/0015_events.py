"""The feed of events, and webhooks."""

from __future__ import annotations

from alembic import op

from perdure.db.migrations import run_sql

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    run_sql(op, __file__)
