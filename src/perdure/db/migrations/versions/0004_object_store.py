"""Items, packs and holds of the object store."""

from __future__ import annotations

from alembic import op

from perdure.db.migrations import run_sql

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    run_sql(op, __file__)
