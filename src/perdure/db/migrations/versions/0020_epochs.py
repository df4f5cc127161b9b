"""Since when the present epoch of the object store's collection lasts."""

from __future__ import annotations

from alembic import op

from perdure.db.migrations import run_sql

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    run_sql(op, __file__)
