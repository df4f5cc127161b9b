"""Lists of workspaces by metadata and page by page, and what a create was called by its caller."""

from __future__ import annotations

from alembic import op

from perdure.db.migrations import run_sql

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    run_sql(op, __file__)
