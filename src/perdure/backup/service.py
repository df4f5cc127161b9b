"""Backups as the API sees them: one at a time, as a stream of events. A caller that goes away ends its backup.

A backup whose database is away when it ends cannot let go of its snapshots, and one whose last statement was under way then may
hold some after that. So the server looks from time to time for what is held by no backup of its own.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

import structlog

from perdure.backup.make import Made, Origin, Progress, make
from perdure.backup.place import directory_of, open_place
from perdure.core import ids
from perdure.core.clock import epoch_ms
from perdure.core.errors import Conflict, InvalidRequest, PerdureError
from perdure.snapshots.objects.client import ClientSettings
from perdure.wire import public

#: How long what a backup has left may be held, beyond the absence of its database.
REAP_S = 30.0

log = structlog.get_logger(__name__)


class BackupService:
    """``start`` once before the first backup: what one has left that was killed is let go. A server that stays calls ``watch``
    after that, and ``close`` before its database goes."""

    def __init__(self, origin: Origin, options: Callable[[], ClientSettings], *, reap_s: float = REAP_S) -> None:
        self._origin = origin
        self._options = options
        self._reap_s = reap_s
        self._under_way = False
        self._alive: str | None = None  # the backup that may hold something
        self._reaping = asyncio.Lock()
        self._over = asyncio.Event()  # one has ended: it may have left something
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._origin.database.run("backup.let_go_all")

    def watch(self) -> None:
        self._watch = asyncio.create_task(self._reap_often(), name="backup-reaper")

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])

    async def reap(self) -> None:
        """Let go of what no backup that is alive holds. Raises Unavailable while the database is away."""
        async with self._reaping:  # a backup that began meanwhile would lose what it holds
            await self._origin.database.run("backup.let_go_others", alive=self._alive)

    async def _reap_often(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._reap_s):
                    await self._over.wait()
            self._over.clear()
            try:
                await self.reap()
            except PerdureError as error:
                log.warning("what past backups may hold is not let go yet", error=error.message)

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
            if spec.with_master_key:
                _refuse_open_directory(place.url)
            async with self._reaping:
                self._alive = backup_id = ids.mint("bak", now_ms=epoch_ms(clock))
            options = {"with_master_key": spec.with_master_key, "skip_damaged": spec.skip_damaged}
            made = await make(self._origin, place, backup_id, told, **options)
            return info(made, place.url)
        finally:
            self._under_way, self._alive = False, None
            self._over.set()

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


def _refuse_open_directory(url: str) -> None:
    """The key opens everything. In a directory of others it could also be exchanged."""
    directory = directory_of(url)
    if directory is not None and directory.stat().st_mode & 0o077:
        raise InvalidRequest(
            f"{directory} is open to other users, so the master key is not put there.",
            hint=f"Run 'chmod -R go= {shlex.quote(str(directory))}', name a directory that is not there yet, or leave "
            "--with-master-key out.",
        )


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
        left_out=[
            public.LeftOutInfo(snapshot=one.snapshot_id, workspace=one.workspace, why=one.why, has_disk=one.has_disk)
            for one in record.left_out
        ],
    )
