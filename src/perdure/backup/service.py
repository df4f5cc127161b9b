"""Backups as the API sees them: one at a time, as a stream of events. A caller that goes away ends its backup."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from perdure.backup.make import Made, Origin, Progress, make
from perdure.backup.place import directory_of, open_place
from perdure.core import ids
from perdure.core.clock import epoch_ms
from perdure.core.errors import Conflict, InvalidRequest, PerdureError
from perdure.snapshots.objects.client import ClientSettings
from perdure.wire import public


class BackupService:
    """``start`` once before the first backup: what one has left that was killed is let go."""

    def __init__(self, origin: Origin, options: Callable[[], ClientSettings]) -> None:
        self._origin = origin
        self._options = options
        self._under_way = False

    async def start(self) -> None:
        await self._origin.database.run("backup.let_go_all")

    async def make_to(self, spec: public.MakeBackup, told: Callable[[Progress], None]) -> public.BackupInfo:
        """Raises Conflict while another one is under way, or what ``make`` raises."""
        if self._under_way:
            raise Conflict("A backup is under way already.", hint="Wait until it is done.")
        if spec.with_master_key and self._origin.master is None:
            raise InvalidRequest("This server has no master key that a backup could hold.")
        self._under_way = True
        try:
            clock = self._origin.clock
            place = open_place(spec.to, lambda: epoch_ms(clock), make=True, options=self._options())
            self._refuse_own_home(place.url)
            backup_id = ids.mint("bak", now_ms=epoch_ms(clock))
            made = await make(self._origin, place, backup_id, told, with_master_key=spec.with_master_key)
            return info(made, place.url)
        finally:
            self._under_way = False

    def _refuse_own_home(self, url: str) -> None:
        directory, home = directory_of(url), self._origin.home.resolve()
        if directory is not None and directory.resolve().is_relative_to(home):
            raise InvalidRequest(
                f"{directory} is inside of {home}, which is what is backed up.", hint="Name a place outside, on another disk."
            )

    async def make(self, spec: public.MakeBackup) -> AsyncGenerator[public.BackupEvent, None]:
        """Progress as it comes, then ``done``. Closing the iterator ends the backup; what was sent is used by the next one."""
        events: asyncio.Queue[public.BackupEvent | None] = asyncio.Queue()

        async def work() -> public.BackupInfo:
            try:
                return await self.make_to(spec, lambda progress: events.put_nowait(as_event(progress)))
            finally:
                events.put_nowait(None)

        task = asyncio.create_task(work(), name="backup")
        try:
            while (event := await events.get()) is not None:
                yield event
            yield public.BackupEvent(type="done", backup=await task)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, PerdureError):
                await task


def as_event(progress: Progress) -> public.BackupEvent:
    """One line of the stream."""
    return public.BackupEvent(
        type="progress",
        what=progress.what,
        name=progress.name,
        done=progress.done,
        count=progress.count,
        sent_bytes=progress.sent_bytes,
    )


def info(made: Made, url: str) -> public.BackupInfo:
    record = made.record
    return public.BackupInfo(
        id=record.id,
        place=url,
        created_at=record.created_at,
        workspaces=record.workspaces,
        snapshots=len(record.snapshots),
        images=len(record.images),
        awake=list(made.awake),
        sent_bytes=made.sent_bytes,
        content_bytes=made.content_bytes,
        encrypted=record.sealed,
        has_master_key=record.master_key is not None,
    )
