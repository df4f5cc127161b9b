"""How many snapshots each workspace keeps, what else needs a snapshot, and a tree whose branches do not end in the air."""

from __future__ import annotations

from alembic import op

from perdure.db.migrations import run_sql

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    run_sql(op, __file__)
