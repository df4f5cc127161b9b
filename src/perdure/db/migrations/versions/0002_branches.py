"""Branches that can be promoted: whose identity a snapshot carries, and what a rewind or a promotion has kept."""

from __future__ import annotations

from alembic import op

from perdure.db.migrations import run_sql

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    run_sql(op, __file__)
