"""Nodes, workspaces, snapshots, the journal, and the database's clock."""

from __future__ import annotations

from alembic import op

from perdure.db.migrations import run_sql

revision = "0001"
down_revision = None


def upgrade() -> None:
    run_sql(op, __file__)
