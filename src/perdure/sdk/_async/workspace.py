"""A workspace: one persistent machine."""

from __future__ import annotations

import builtins
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeVar, Unpack, overload

from perdure.core.errors import AlreadyExists, Conflict, DeadlineExceeded, PerdureError
from perdure.sdk import _core
from perdure.sdk._acompat import default_async_client
from perdure.sdk._async.client import AsyncClient
from perdure.sdk._async.commands import AsyncCommands
from perdure.sdk._async.files import AsyncFiles
from perdure.sdk._async.ports import AsyncPorts
from perdure.sdk._async.programs import AsyncInvocation, AsyncProgram
from perdure.sdk._async.pty import AsyncPtys
from perdure.sdk._core import Call
from perdure.sdk._invoke import InvokeOptions, InvokeResult, invocation
from perdure.sdk._options import CreateOptions, create_fields
from perdure.sdk.errors import rebuild
from perdure.wire import public

if TYPE_CHECKING:
    from perdure.sdk._forward import AsyncForward

Model = TypeVar("Model", bound=public.Answer)


class AsyncWorkspace:
    """Make one with ``create``, find one with ``connect``. Leaving a ``with`` block neither stops nor deletes it.

    ``info`` is the workspace as the last answer described it, ``report`` says what the last wake that this object saw has kept,
    ``warnings`` what the create that made it was asked for and will not work as things are.
    """

    def __init__(self, info: public.WorkspaceInfo, client: AsyncClient, report: public.ResumeReport | None = None) -> None:
        self.info = info
        self.report = report
        self.warnings: builtins.list[str] = []
        self.client = client
        self.commands = AsyncCommands(self)
        self.files = AsyncFiles(self)
        self.ports = AsyncPorts(self)
        self.program = AsyncProgram(self)
        self.pty = AsyncPtys(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.info.name} {self.info.state.value} generation {self.info.generation}>"

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def name(self) -> str:
        return self.info.name

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        return None

    # ------------------------------------------------------------------------------------------------------- make and find

    @classmethod
    async def create(
        cls,
        name: str | None = None,
        *,
        exist_ok: bool = False,
        client: AsyncClient | None = None,
        **options: Unpack[CreateOptions],
    ) -> Self:
        """A new workspace, awake. Raises AlreadyExists for a name in use; with ``exist_ok`` connects to that one instead."""
        client = client or default_async_client()
        body = _core.checked(public.CreateWorkspace, name=_core.fresh_name() if name is None else name, **create_fields(options))
        call = _core.post("/v1/workspaces", body.model_dump(mode="json", exclude_defaults=True))
        try:
            made = await client.fetch(call, public.CreatedAnswer)
        except AlreadyExists:
            if not exist_ok:
                raise
            return await cls.connect(body.name, client=client)
        workspace = cls(made.workspace, client, made.report)
        workspace.warnings = made.warnings
        return workspace

    @classmethod
    async def connect(cls, ref: str, *, wake: bool = True, client: AsyncClient | None = None) -> Self:
        """The workspace of that name or id, awake; its ``report`` says what was kept. With ``wake=False`` it may sleep on."""
        client = client or default_async_client()
        if not wake:
            return cls(await client.fetch(_core.get(_core.workspace_path(ref)), public.WorkspaceInfo), client)
        found = await client.fetch(_core.post(_core.workspace_path(ref, "wake"), repeatable=True), public.AwakeAnswer)
        return cls(found.workspace, client, found.report)

    @classmethod
    async def list(
        cls,
        *,
        states: Sequence[str] = (),
        metadata: Mapping[str, str] | None = None,
        client: AsyncClient | None = None,
    ) -> builtins.list[Self]:
        """All workspaces in any of the states that have all of the metadata, newest last."""
        client = client or default_async_client()
        query = [("state", state) for state in states]
        query += [("metadata", f"{key}={value}") for key, value in (metadata or {}).items()]
        found = await client.fetch(Call("GET", "/v1/workspaces", tuple(query), repeatable=True), public.WorkspaceList)
        return [cls(info, client) for info in found.workspaces]

    # ---------------------------------------------------------------------------------------------------------- lifecycle

    async def refresh(self) -> public.WorkspaceInfo:
        """Ask the server how it is; never wakes it."""
        self.info = await self.fetch(_core.get(self._path()), public.WorkspaceInfo)
        return self.info

    get_info = refresh

    async def wake(self, *, deadline_s: float | None = None) -> public.ResumeReport:
        """Wake it if it sleeps; the report says what was kept. One that is awake answers with its last report."""
        body = {} if deadline_s is None else {"deadline_s": deadline_s}
        answer = await self.fetch(_core.post(self._path("wake"), body, repeatable=True), public.AwakeAnswer)
        self.info, self.report = answer.workspace, answer.report
        return answer.report

    async def sleep(self, *, durable: Literal["local", "store"] = "local") -> public.SnapshotInfo:
        """Hibernate it: memory, files and processes are kept, nothing of it runs. The next call of any kind wakes it.

        With ``durable="store"`` it also waits until the object store has the snapshot, as ``push_snapshot`` does.
        """
        answer = await self.fetch(_core.post(self._path("sleep"), repeatable=True), public.AsleepAnswer)
        self.info = answer.workspace
        return await self._durable(answer.snapshot, durable)

    async def checkpoint(self, name: str | None = None, *, durable: Literal["local", "store"] = "local") -> public.SnapshotInfo:
        """Record it while it runs; it pauses for some milliseconds. ``durable`` as for ``sleep``."""
        call = _core.post(self._path("checkpoint"), {} if name is None else {"name": name})
        return await self._durable(await self.fetch(call, public.SnapshotInfo), durable)

    async def _durable(self, snapshot: public.SnapshotInfo, durable: str) -> public.SnapshotInfo:
        return await self.push_snapshot(snapshot.id) if durable == "store" else snapshot

    async def fork(
        self, count: int = 1, *, snapshot: str | None = None, names: Sequence[str] = ()
    ) -> builtins.list[Self | PerdureError]:
        """Copies of it, awake, each with its own identity, from one checkpoint taken now or from ``snapshot``.

        A copy that failed is an error in the list and does not fail the others.
        """
        body = _core.checked(public.ForkWorkspace, count=count, snapshot=snapshot, names=[*names])
        answer = await self.fetch(_core.post(self._path("fork"), body.model_dump(mode="json")), public.ForkAnswer)
        return [
            type(self)(one.workspace, self.client) if one.workspace else rebuild(one.model_dump(), 500) for one in answer.results
        ]

    async def rewind(self, snapshot: str) -> public.ResumeReport:
        """Go on from an earlier snapshot (id or name), awake. The report's ``kept_branch`` is what it was until now."""
        body = _core.checked(public.RewindWorkspace, snapshot=snapshot)
        answer = await self.fetch(_core.post(self._path("rewind"), body.model_dump(mode="json")), public.AwakeAnswer)
        self.info, self.report = answer.workspace, answer.report
        return answer.report

    async def promote(self) -> Self:
        """Of a branch: the workspace it was forked from goes on with its state, and is returned, awake, with ``report``; this one
        ends. What the workspace was is in the report's ``kept_branch``."""
        answer = await self.fetch(_core.post(self._path("promote")), public.AwakeAnswer)
        return type(self)(answer.workspace, self.client, answer.report)

    async def discard(self) -> None:
        """Free a branch; what is not one is refused. Discarding a discarded one succeeds."""
        await self.fetch(_core.post(self._path("discard"), repeatable=True), public.Done)

    async def tree(self) -> builtins.list[public.TreeNode]:
        """What was forked from what, in the tree that it belongs to: parents before their branches."""
        return (await self.fetch(_core.get(self._path("tree")), public.WorkspaceTree)).nodes

    async def keep_awake(self, seconds: float) -> None:
        """Do not hibernate it for idleness for so many seconds; 0 ends an earlier wish."""
        self.info = await self.fetch(
            _core.post(self._path("keep-awake"), {"seconds": seconds}, repeatable=True), public.WorkspaceInfo
        )

    async def wake_at(self, when: datetime | timedelta | None) -> None:
        """Let it wake by itself, once: at an aware time, or so much later than now on the server's clock. None: not any more.

        Another time takes the place of the one before. ``info.wake_at`` says when; after the wake its report has ``wake_at`` and
        ``late_s``.
        """
        given: dict[str, object] = {"at": None}
        if isinstance(when, timedelta):
            given = {"in_s": when.total_seconds()}
        elif when is not None:
            given = {"at": _core.instant(when)}
        body = _core.checked(public.WakeAt, **given).model_dump(mode="json", exclude_unset=True)
        self.info = await self.fetch(_core.post(self._path("wake-at"), body, repeatable=True), public.WorkspaceInfo)

    async def configure(
        self,
        *,
        keep_snapshots: int | Literal["default"] | None = None,
        idle_timeout_s: float | None = None,
        checkpoint_interval_s: float | None = None,
        asleep_after_days: float | None = None,
        asleep_action: public.AsleepAction | None = None,
    ) -> None:
        """Change its timers, how many of the snapshots that nobody asked for it keeps, and what becomes of it when it has been
        asleep for so many days: ``archive``, ``delete`` or ``keep``. What is left out stays as it is."""
        body = _core.checked(
            public.ConfigureWorkspace,
            keep_snapshots=keep_snapshots,
            idle_timeout_s=idle_timeout_s,
            checkpoint_interval_s=checkpoint_interval_s,
            asleep_after_days=asleep_after_days,
            asleep_action=asleep_action,
        )
        call = Call("PATCH", self._path(), body=body.model_dump(mode="json", exclude_none=True), repeatable=True)
        self.info = await self.fetch(call, public.WorkspaceInfo)

    async def resize(self, disk_gib: int) -> None:
        """Grow the disk; takes effect at its next disk boot."""
        call = _core.post(self._path("resize"), {"disk_gib": disk_gib}, repeatable=True)
        self.info = await self.fetch(call, public.WorkspaceInfo)

    async def recover(self, how: str) -> public.ResumeReport:
        """Leave the state ``failed``: ``retry``, ``rewind`` (the snapshot before the head), ``disk-boot`` (without memory) or
        ``damaged-disk`` (the same, though what is on the disk may be wrong)."""
        answer = await self.fetch(_core.post(self._path("recover"), {"how": how}), public.AwakeAnswer)
        self.info, self.report = answer.workspace, answer.report
        return answer.report

    async def delete(self) -> None:
        """Free everything it holds, snapshots included. Deleting a deleted one succeeds."""
        await self.client.request(Call("DELETE", self._path(), repeatable=True))

    pause = sleep
    resume = wake
    kill = delete

    # ------------------------------------------------------------------------------------------------------------- history

    async def snapshots(self) -> builtins.list[public.SnapshotPlace]:
        """Oldest first, each with what it descends from, what keeps it, what hangs on it and what it weighs."""
        return (await self.fetch(_core.get(self._path("snapshots")), public.SnapshotList)).snapshots

    async def name_snapshot(self, snapshot: str, name: str | None) -> public.SnapshotInfo:
        """Give a snapshot (by id or name) a name, which keeps it; None takes its name away."""
        body = _core.checked(public.NameSnapshot, name=name)
        call = Call("PATCH", _core.snapshot_path(self.id, snapshot), body=body.model_dump(mode="json"), repeatable=True)
        return await self.fetch(call, public.SnapshotInfo)

    async def push_snapshot(self, snapshot: str | None = None, *, deadline_s: float | None = None) -> public.SnapshotInfo:
        """Wait until the object store has a snapshot, by id or name (None: what it wakes from), which is uploaded at once.

        Raises DeadlineExceeded when that takes longer, Conflict where there is no store, or why the upload failed; either way it
        goes on in the background, and the snapshot is durable on its node. Does not wake it.
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
        """Remove a snapshot (by id or name). Raises Conflict with the reason when a workspace stands on it."""
        return await self.fetch(Call("DELETE", _core.snapshot_path(self.id, snapshot)), public.SnapshotInfo)

    async def verify(self, snapshot: str | None = None, *, boot: bool = False) -> builtins.list[public.VerifiedSnapshot]:
        """Check every stored byte of its snapshots, or of one; with ``boot`` also start each in a throwaway machine. Does not
        raise for damage: what each result says is what was found. Does not wake it."""
        events = self.client.verify(self.id, snapshot=snapshot, boot=boot)
        return [event.result async for event in events if event.result is not None]

    async def log(self, *, after_seq: int = 0, limit: int = 1000) -> builtins.list[public.LogEntry]:
        """Its thread: what happened to it, in order."""
        return (await self.fetch(_core.get(self._path("log"), after_seq=after_seq, limit=limit), public.Log)).entries

    async def resume_report(self) -> public.ResumeReport | None:
        """What its last wake kept, asked of the server; None if it never woke."""
        return (await self.fetch(_core.get(self._path("report")), public.ReportAnswer)).report

    # ---------------------------------------------------------------------------------------------------- program, ports

    @overload
    async def invoke(
        self, payload: object = None, *, stream: Literal[False] = False, **options: Unpack[InvokeOptions]
    ) -> InvokeResult: ...

    @overload
    async def invoke(
        self, payload: object = None, *, stream: Literal[True], **options: Unpack[InvokeOptions]
    ) -> AsyncInvocation: ...

    async def invoke(
        self, payload: object = None, *, stream: bool = False, **options: Unpack[InvokeOptions]
    ) -> InvokeResult | AsyncInvocation:
        """Call its program with a payload, bytes as they are and everything else as JSON; wakes it and waits until it is ready.

        An error that the program answers is a result. ProgramNotReady says why there is no answer; ConnectionLost is ambiguous,
        and nothing is repeated by itself. With ``stream`` the answer's events come one by one to who iterates over the result.
        """
        made = AsyncInvocation(self, invocation(self.id, payload, options), options.get("timeout_s"))
        return made if stream else await made.result()

    def forward(self, port: int, *, local_port: int = 0, host: str = "127.0.0.1") -> AsyncForward:
        """A local port that leads to ``port`` inside: ``async with workspace.forward(8000) as tunnel: tunnel.url``."""
        from perdure.sdk._forward import AsyncForward  # it brings the WebSockets, which nothing else needs

        return AsyncForward(self.client.target, self.id, port, (host, local_port))

    async def get_host(self, port: int) -> str:
        """The host, with its own port where it has one, at which a port inside is reached over HTTP."""
        return await self.ports.host(port)

    # ------------------------------------------------------------------------------------------------------------ internals

    def note(self, headers: Mapping[str, str]) -> None:
        """Keep what an answer's headers say about a wake it caused."""
        if public.RESUME_HEADER in headers:
            self.report = public.ResumeReport.model_validate_json(headers[public.RESUME_HEADER])

    async def fetch(self, call: Call, kind: type[Model]) -> Model:
        """Do a call on this workspace and parse its answer."""
        response = await self.client.request(call)
        self.note(response.headers)
        return kind.model_validate_json(response.content)

    def _path(self, *rest: str) -> str:
        return _core.workspace_path(self.id, *rest)
