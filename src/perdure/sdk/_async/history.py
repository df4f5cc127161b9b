"""What there is to ask of a workspace without waking it: how it is, its snapshots, its thread."""

from __future__ import annotations

import builtins
import time
from collections.abc import Mapping
from typing import TypeVar

from perdure.core.errors import Conflict, DeadlineExceeded
from perdure.sdk import _answers, _core
from perdure.sdk._async.client import AsyncClient
from perdure.sdk._core import Call
from perdure.wire import public

Model = TypeVar("Model", bound=public.Answer)


class AsyncHistory:
    """The part of ``AsyncWorkspace`` that looks at it, and how its calls are done."""

    info: public.WorkspaceInfo
    report: public.ResumeReport | None
    client: AsyncClient

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def name(self) -> str:
        return self.info.name

    async def refresh(self) -> public.WorkspaceInfo:
        """Ask the server how it is; never wakes it.

        >>> (await ws.refresh()).state.value
        'running'
        """
        self.info = await self.fetch(_core.get(self._path()), public.WorkspaceInfo)
        return self.info

    get_info = refresh

    async def snapshots(self) -> builtins.list[public.SnapshotPlace]:
        """Oldest first, each with what it descends from, what keeps it, what hangs on it and what it weighs.

        >>> snapshot = await ws.checkpoint("before")
        >>> [(one.name, one.is_head) for one in await ws.snapshots()]
        [('before', True)]
        """
        pages = self.client.pages(_core.get(self._path("snapshots"), limit=_core.PAGE), public.SnapshotList)
        return [snapshot async for page in pages for snapshot in page.snapshots]

    async def name_snapshot(self, snapshot: str, name: str | None) -> public.SnapshotInfo:
        """Give a snapshot (by id or name) a name, which keeps it; None takes its name away.

        >>> snapshot = await ws.checkpoint()
        >>> (await ws.name_snapshot(snapshot.id, "good")).name
        'good'
        """
        body = _core.checked(public.NameSnapshot, name=name)
        call = Call("PATCH", _core.snapshot_path(self.id, snapshot), body=body.model_dump(mode="json"), repeatable=True)
        return await self.fetch(call, public.SnapshotInfo)

    async def push_snapshot(self, snapshot: str | None = None, *, deadline_s: float | None = None) -> public.SnapshotInfo:
        """Wait until the object store has a snapshot, by id or name (None: what it wakes from), which is uploaded at once.

        Raises DeadlineExceeded when that takes longer, Conflict where there is no store, or why the upload failed; either way it
        goes on in the background, and the snapshot is durable on its node. Does not wake it.

        >>> snapshot = await ws.sleep()
        >>> (await ws.push_snapshot()).durable
        'store'
        """
        wanted = snapshot or (await self.refresh()).head_snapshot_id
        if wanted is None:
            raise Conflict(f"Workspace {self.name!r} has no snapshot yet.", hint="Put it to sleep, or take a checkpoint.")
        path = f"{_core.snapshot_path(self.id, wanted)}/push"
        ends_at = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            left_s = _core.PUSH_WAIT_S if ends_at is None else max(0.0, min(_core.PUSH_WAIT_S, ends_at - time.monotonic()))
            try:
                return await self.fetch(_core.post(path, {"deadline_s": left_s}), public.SnapshotInfo)
            except DeadlineExceeded:
                if ends_at is not None and time.monotonic() >= ends_at:
                    raise

    async def remove_snapshot(self, snapshot: str) -> public.SnapshotInfo:
        """Remove a snapshot (by id or name). Raises Conflict with the reason when a workspace stands on it.

        >>> old, new = await ws.checkpoint(), await ws.checkpoint()
        >>> (await ws.remove_snapshot(old.id)).id == old.id
        True
        """
        return await self.fetch(Call("DELETE", _core.snapshot_path(self.id, snapshot)), public.SnapshotInfo)

    async def verify(self, snapshot: str | None = None, *, boot: bool = False) -> builtins.list[public.VerifiedSnapshot]:
        """Check every stored byte of its snapshots, or of one; with ``boot`` also start each in a throwaway machine. Does not
        raise for damage: what each result says is what was found. Does not wake it.

        >>> snapshot = await ws.checkpoint("before")
        >>> [(one.name, one.intact) for one in await ws.verify()]
        [('before', True)]
        """
        events = self.client.verify(self.id, snapshot=snapshot, boot=boot)
        return [event.result async for event in events if event.result is not None]

    async def log(self, *, after_seq: int = 0, limit: int | None = None) -> builtins.list[public.LogEntry]:
        """Its thread: what happened to it, in order, from the first entry after a number; at most ``limit`` entries.

        >>> [entry.kind for entry in await ws.log()]
        ['awake']
        """
        return await self.client.log(self.id, after_seq=after_seq, limit=limit)

    async def resume_report(self) -> public.ResumeReport | None:
        """What its last wake kept, asked of the server; None if it never woke.

        >>> report = await ws.resume_report()
        >>> report.memory.value, report.generation
        ('new', 1)
        """
        return (await self.fetch(_core.get(self._path("report")), public.ReportAnswer)).report

    # ------------------------------------------------------------------------------------------------------------ internals

    def note(self, headers: Mapping[str, str]) -> None:
        """Keep what an answer's headers say about a wake it caused."""
        if public.RESUME_HEADER in headers:
            self.report = public.ResumeReport.model_validate_json(headers[public.RESUME_HEADER])

    async def fetch(self, call: Call, kind: type[Model]) -> Model:
        """Do a call on this workspace and parse its answer."""
        response = await self.client.request(call)
        self.note(response.headers)
        return _answers.parsed(call, kind, response.content)

    def _path(self, *rest: str) -> str:
        return _core.workspace_path(self.id, *rest)
