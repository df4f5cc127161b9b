"""Backups that exist in words only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from perdure.core.errors import NoSpace
from perdure.wire import public
from perdure.workspaces.model import Context

LEFT_OUT = [
    public.LeftOutInfo(snapshot="snp_2", workspace="demo", why="Its index is damaged.", has_disk=True),
    public.LeftOutInfo(snapshot="snp_3", workspace="other", why="Its disk is damaged.", has_disk=False),
    public.LeftOutInfo(snapshot=None, workspace="new", why="Its kernel is damaged.", has_disk=False),
]


class FakeBackups:
    """A place that contains ``full`` has no room; one with ``endless`` takes its time until it is cancelled."""

    def __init__(self) -> None:
        self.asked: public.MakeBackup | None = None
        self.cancelled = asyncio.Event()

    async def make(self, ctx: Context, spec: public.MakeBackup) -> AsyncIterator[public.BackupEvent]:
        self.asked = spec
        yield public.BackupEvent(type="progress", what="images", name="0123456789ab", done=0, count=1)
        if "full" in spec.to:
            raise NoSpace(f"There is no room left in {spec.to}; no backup was made.", hint="Make room there.")
        if "endless" in spec.to:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        yield public.BackupEvent(type="progress", what="snapshots", name="snp_1", done=1, count=2, sent_bytes=1000)
        backup = public.BackupInfo(
            id="bak_1",
            place=spec.to,
            created_at=datetime(2026, 1, 1, tzinfo=UTC),
            workspaces=2,
            snapshots=2,
            images=1,
            awake=["demo"],
            sent_bytes=1_000_000,
            content_bytes=5_000_000,
            encrypted=False,
            has_master_key=spec.with_master_key,
            left_out=LEFT_OUT if spec.skip_damaged else [],
        )
        yield public.BackupEvent(type="done", backup=backup)
