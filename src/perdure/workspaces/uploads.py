"""Snapshots on their way to the object store: the loop that uploads them, what it says of each, and how to wait for one.

What has to be uploaded is read from the rows, so that a crash forgets nothing but how often something has failed; the node's half
goes on where it was. An upload never holds a workspace's turn: wakes and captures do not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from perdure.core import metrics
from perdure.core.errors import Conflict, DeadlineExceeded, NotFound, PerdureError, StaleGeneration
from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.wire.node import Node, SecondHome, Sent
from perdure.workspaces.facts import facts_of
from perdure.workspaces.model import Snapshot, Upload, UploadState
from perdure.workspaces.tools import Tools

_log = logging.getLogger(__name__)

#: How often rows are read without anybody saying that there is something new.
INTERVAL_S = 10.0
#: After the first failure; doubled with each that follows.
BACKOFF_S = 5.0
BACKOFF_MAX_S = 600.0
#: Rows that one look at them takes; the next look follows as soon as one of them is done.
ROWS = 100

NO_STORE = "This server has no object store."
NO_STORE_HINT = "Name one by PERDURE_STORE_URL and start the server again."


NOTHING = Sent(0, 0)


@dataclass(slots=True)
class _Job:
    """What is known here of a snapshot that is not in the store yet. ``due`` on the monotonic clock."""

    workspace_id: WorkspaceId
    total_bytes: int
    sent: Sent = NOTHING
    failures: int = 0
    error: PerdureError | None = None
    due: float = 0.0
    task: asyncio.Task[None] | None = None


class Uploads:
    """``on_stored`` hears of the workspace of which something more is in the store."""

    def __init__(self, tools: Tools, node: Node, on_stored: Callable[[WorkspaceId], None]) -> None:
        self._tools = tools
        self._node = node
        self._on_stored = on_stored
        self._database = tools.store.database
        self._jobs: dict[SnapshotId, _Job] = {}
        self.more = asyncio.Event()  # ``begin`` is due
        self._is_closing = False

    # ---------------------------------------------------------------------------------------------------------------- the loop

    @property
    def is_on(self) -> bool:
        return self._node.second_home is not None

    def home(self) -> SecondHome:
        """The store, as the node reaches it. Raises Conflict where there is none."""
        home = self._node.second_home
        if home is None:
            raise Conflict(NO_STORE, hint=NO_STORE_HINT)
        return home

    def soon(self) -> None:
        """There may be something to upload."""
        self.more.set()

    async def begin(self) -> None:
        """Begin as many uploads as there may be at once."""
        self.more.clear()
        home = self._node.second_home
        if home is None or self._is_closing:
            return
        now = self._tools.clock.monotonic()
        skip = [snapshot_id for snapshot_id, job in self._jobs.items() if job.task is not None or job.due > now]
        rows = await self._database.all("homes.unstored", node_id=self._node.node_id, skip=skip, limit=ROWS)
        found = {SnapshotId(row["id"]): row for row in rows}
        gone = [key for key, job in self._jobs.items() if job.task is None and job.due <= now and key not in found]
        for snapshot_id in gone if len(rows) < ROWS else ():
            del self._jobs[snapshot_id]  # it was removed, or somebody else has uploaded it
        running = sum(job.task is not None for job in self._jobs.values())
        for snapshot_id, row in list(found.items())[: max(0, self._tools.settings.store_uploads - running)]:
            job = self._jobs.setdefault(snapshot_id, _Job(WorkspaceId(row["workspace_id"]), row["total_bytes"]))
            self._start(home, snapshot_id, job)

    def _start(self, home: SecondHome, snapshot_id: SnapshotId, job: _Job) -> None:
        job.task = asyncio.create_task(self._upload(home, snapshot_id, job), name=f"upload-{snapshot_id}")

    async def drain(self) -> None:
        """Wait until no upload is under way."""
        while tasks := [job.task for job in self._jobs.values() if job.task is not None and not job.task.done()]:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Cut off what is under way; the next start goes on with it."""
        await asyncio.gather(*self.stop(), return_exceptions=True)

    def stop(self) -> list[asyncio.Task[None]]:
        """The same without waiting for it, as a crash would; returns what was cut off."""
        self._is_closing = True
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    async def _upload(self, home: SecondHome, snapshot_id: SnapshotId, job: _Job) -> None:
        """One attempt. Its outcome is in the job, or in the row that says durable."""

        def told(sent: Sent) -> None:
            metrics.STORE_SENT.add(max(0, sent.sent_bytes - job.sent.sent_bytes))
            job.sent = sent

        try:
            await home.upload(snapshot_id, await facts_of(self._database, snapshot_id), told)
        except (NotFound, StaleGeneration, Conflict) as error:
            await self._given_up(snapshot_id, job, error)
        except PerdureError as error:
            self._failed(snapshot_id, job, error)
        except Exception as error:  # noqa: BLE001 - the top of a background task
            _log.exception("the upload of %s failed in a way nobody foresaw", snapshot_id)
            self._failed(snapshot_id, job, PerdureError("The upload failed in a way nobody foresaw.", internal=str(error)))
        else:
            self._jobs.pop(snapshot_id, None)
            self._on_stored(job.workspace_id)
        finally:
            job.task = None
            self.soon()

    async def _given_up(self, snapshot_id: SnapshotId, job: _Job, error: PerdureError) -> None:
        """Retention, or its owner, may have removed it meanwhile: then that is all. Otherwise it is a failure like any other."""
        with suppress(PerdureError):
            if await self._database.one("homes.is_complete", id=snapshot_id) is None:
                self._jobs.pop(snapshot_id, None)
                return
        self._failed(snapshot_id, job, error)

    def _failed(self, snapshot_id: SnapshotId, job: _Job, error: PerdureError) -> None:
        wait_s = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(job.failures, 16))
        job.failures, job.error, job.due = job.failures + 1, error, self._tools.clock.monotonic() + wait_s
        what = "snapshot %s was not uploaded: %s It is tried again in %.0f s. (%s)"
        _log.warning(what, snapshot_id, error.message, wait_s, error.internal)

    # ----------------------------------------------------------------------------------------------------------------- waiting

    async def push(self, snapshot: Snapshot, deadline_s: float) -> None:
        """Returns when the store has a snapshot; it is uploaded at once, whatever failed before.

        Raises Conflict where there is no store, DeadlineExceeded (it goes on), or the error of this attempt (it is tried again).
        """
        home = self.home()
        if await self.is_stored(snapshot):
            return
        job = self._jobs.setdefault(
            snapshot.id, _Job(snapshot.workspace_id, snapshot.memory_total_bytes + snapshot.disk_total_bytes)
        )
        if job.task is None:
            self._start(home, snapshot.id, job)
        task = job.task
        assert task is not None, "it was started"
        done, _ = await asyncio.wait([task], timeout=deadline_s)
        if await self.is_stored(snapshot):
            return
        if not done:
            raise DeadlineExceeded(
                f"Snapshot {snapshot.id} is not in the object store after {deadline_s:g} seconds; the upload goes on.",
                hint="Ask again, or look at it with 'perdure snapshot ls NAME'.",
            )
        error = job.error
        if error is None:
            raise NotFound(f"Snapshot {snapshot.id} was removed before it was in the object store.")
        twin = error.twin()
        twin.hint = twin.hint or "It is tried again in the background; the node has it."
        raise twin

    async def is_stored(self, snapshot: Snapshot) -> bool:
        tenant_id = await self._database.one("homes.tenant_of", id=snapshot.id)
        if tenant_id is None:
            return False
        row = await self._database.one("homes.is_stored", scope=tenant_id["tenant_id"], name=snapshot.id)
        return row is not None

    # ----------------------------------------------------------------------------------------------------------------- showing

    def shown(self, snapshot: Snapshot) -> Snapshot:
        """With how far its upload is, where there is a store and it is not there yet."""
        if snapshot.stored_at is not None or not self.is_on:
            return snapshot
        job = self._jobs.get(snapshot.id)
        if job is None:
            return replace(snapshot, upload=Upload(UploadState.WAITING))
        state = UploadState.UPLOADING if job.task is not None else UploadState.FAILED if job.error else UploadState.WAITING
        retry_s = max(0.0, job.due - self._tools.clock.monotonic()) if state is UploadState.FAILED else None
        error = job.error.message if job.error is not None else ""
        sent = job.sent
        return replace(snapshot, upload=Upload(state, sent.read_bytes, sent.sent_bytes, job.total_bytes, error, retry_s))
