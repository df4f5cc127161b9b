"""A workspace: one persistent machine."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeVar, Unpack, overload

from perdure.core.errors import AlreadyExists, NotFound, PerdureError
from perdure.sdk import _core
from perdure.sdk._acompat import default_async_client
from perdure.sdk._async.client import AsyncClient
from perdure.sdk._async.commands import AsyncCommands
from perdure.sdk._async.files import AsyncFiles
from perdure.sdk._async.history import AsyncHistory
from perdure.sdk._async.ports import AsyncPorts
from perdure.sdk._async.programs import AsyncInvocation, AsyncProgram
from perdure.sdk._async.pty import AsyncPtys
from perdure.sdk._async.python import AsyncPython
from perdure.sdk._core import Call
from perdure.sdk._invoke import InvokeOptions, InvokeResult, invocation
from perdure.sdk._options import CreateOptions, ListFilters, check_same, create_fields, list_query
from perdure.sdk.errors import rebuild
from perdure.wire import public

if TYPE_CHECKING:
    from perdure.sdk._forward import AsyncForward

Model = TypeVar("Model", bound=public.Answer)


class AsyncWorkspace(AsyncHistory):
    """Make one with ``create``, find one with ``connect``. Leaving a ``with`` block neither stops nor deletes it.

    ``info`` is the workspace as the last answer described it, ``report`` says what the last wake that this object saw has kept,
    ``warnings`` what the create that made it was asked for and will not work as things are.

    >>> ws = await AsyncWorkspace.connect("alice", create={"memory_mib": 1024})
    >>> result = await ws.commands.run("echo hello")
    >>> result.stdout
    'hello\\n'
    >>> snapshot = await ws.sleep()
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
        self.python = AsyncPython(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.info.name} {self.info.state.value} generation {self.info.generation}>"

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
        """A new workspace, awake. Raises AlreadyExists for a name in use; with ``exist_ok`` it is ``connect(name, create=…)``.

        An answer that is lost on its way is asked for again: that makes nothing twice.

        >>> ws = await AsyncWorkspace.create("alice", memory_mib=1024, metadata={"user": "7"})
        >>> ws.info.state.value, ws.info.memory_mib
        ('running', 1024)
        """
        if exist_ok and name is not None:
            return await cls.connect(name, create=options, client=client)
        client = client or default_async_client()
        fields = {"name": _core.fresh_name() if name is None else name, "request_key": _core.request_key()}
        body = _core.checked(public.CreateWorkspace, **fields, **create_fields(options))
        call = _core.post("/v1/workspaces", body.model_dump(mode="json", exclude_defaults=True), keyed=True)
        made = await client.fetch(call, public.CreatedAnswer)
        workspace = cls(made.workspace, client, made.report)
        workspace.warnings = made.warnings
        return workspace

    @classmethod
    async def connect(
        cls, ref: str, *, wake: bool = True, create: CreateOptions | None = None, client: AsyncClient | None = None
    ) -> Self:
        """The workspace of that name or id, awake; its ``report`` says what was kept. With ``wake=False`` it may sleep on.

        With ``create`` it is made if there is none: however many call this at once, there is one workspace. Raises SpecConflict
        when there is one of another image or size than ``create`` asks for; what else it says is for a new one only.

        >>> ws = await AsyncWorkspace.connect("demo")
        >>> ws.info.state.value, ws.report.memory.value
        ('running', 'new')
        >>> same = await AsyncWorkspace.connect("demo", create={"image": "base"})
        >>> same.id == ws.id
        True
        """
        client = client or default_async_client()
        if create is not None:
            return await cls._found_or_made(ref, create, wake, client)
        if not wake:
            return cls(await client.fetch(_core.get(_core.workspace_path(ref)), public.WorkspaceInfo), client)
        found = await client.fetch(_core.post(_core.workspace_path(ref, "wake"), repeatable=True), public.AwakeAnswer)
        return cls(found.workspace, client, found.report)

    @classmethod
    async def _found_or_made(cls, name: str, create: CreateOptions, wake: bool, client: AsyncClient) -> Self:
        """Others may make and delete it between any two calls: look again, a few times."""
        wanted = create_fields(create)
        for is_last in (False, False, False, True):
            try:
                found = await cls.connect(name, wake=False, client=client)
                check_same(found.info, wanted)
                if wake:
                    await found.wake()
                return found
            except NotFound:
                pass
            try:
                return await cls.create(name, client=client, **create)
            except AlreadyExists:
                if is_last:
                    raise
        raise AssertionError("the last attempt returns or raises")

    @classmethod
    async def list(cls, *, client: AsyncClient | None = None, **filters: Unpack[ListFilters]) -> builtins.list[Self]:
        """All workspaces that the filters let through, newest last.

        >>> alice = await AsyncWorkspace.create("alice", metadata={"team": "x"})
        >>> [one.name for one in await AsyncWorkspace.list(metadata={"team": "x"}, state="running")]
        ['alice']
        """
        return [one async for one in cls.iterate(client=client, **filters)]

    @classmethod
    async def iterate(
        cls, *, limit: int | None = None, client: AsyncClient | None = None, **filters: Unpack[ListFilters]
    ) -> AsyncIterator[Self]:
        """The same one by one, in pages that are asked for as they are needed; at most ``limit``. Each that is there all the
        time comes once, whatever is made and deleted meanwhile.

        >>> async for one in AsyncWorkspace.iterate(limit=100):
        ...     print(one.name, one.info.state.value)
        demo running
        """
        client = client or default_async_client()
        size = _core.PAGE if limit is None else min(limit, _core.PAGE)
        call = Call("GET", "/v1/workspaces", (*list_query(filters), ("limit", str(max(1, size)))), repeatable=True)
        count = 0
        if limit is not None and limit <= 0:
            return
        async for page in client.pages(call, public.WorkspaceList):
            for info in page.workspaces:
                yield cls(info, client)
                count += 1
                if count == limit:
                    return

    # ---------------------------------------------------------------------------------------------------------- lifecycle

    async def wake(self, *, deadline_s: float | None = None) -> public.ResumeReport:
        """Wake it if it sleeps; the report says what was kept. One that is awake answers with its last report.

        >>> snapshot = await ws.sleep()
        >>> report = await ws.wake(deadline_s=60)
        >>> report.memory.value, report.disk
        ('kept', 'kept')
        """
        body = {} if deadline_s is None else {"deadline_s": deadline_s}
        answer = await self.fetch(_core.post(self._path("wake"), body, repeatable=True), public.AwakeAnswer)
        self.info, self.report = answer.workspace, answer.report
        return answer.report

    async def sleep(self, *, durable: Literal["local", "store"] = "local") -> public.SnapshotInfo:
        """Hibernate it: memory, files and processes are kept, nothing of it runs. The next call of any kind wakes it.

        With ``durable="store"`` it also waits until the object store has the snapshot, as ``push_snapshot`` does.

        >>> snapshot = await ws.sleep()
        >>> ws.info.state.value, snapshot.has_memory
        ('hibernated', True)
        """
        answer = await self.fetch(_core.post(self._path("sleep"), repeatable=True), public.AsleepAnswer)
        self.info = answer.workspace
        return await self._durable(answer.snapshot, durable)

    async def checkpoint(self, name: str | None = None, *, durable: Literal["local", "store"] = "local") -> public.SnapshotInfo:
        """Record it while it runs; it pauses for some milliseconds. ``durable`` as for ``sleep``.

        >>> snapshot = await ws.checkpoint("before-the-upgrade")
        >>> snapshot.name
        'before-the-upgrade'
        """
        call = _core.post(self._path("checkpoint"), {} if name is None else {"name": name})
        return await self._durable(await self.fetch(call, public.SnapshotInfo), durable)

    async def _durable(self, snapshot: public.SnapshotInfo, durable: str) -> public.SnapshotInfo:
        return await self.push_snapshot(snapshot.id) if durable == "store" else snapshot

    async def fork(
        self, count: int = 1, *, snapshot: str | None = None, names: Sequence[str] = ()
    ) -> builtins.list[Self | PerdureError]:
        """Copies of it, awake, each with its own identity, from one checkpoint taken now or from ``snapshot``.

        A copy that failed is an error in the list and does not fail the others.

        >>> one, two = await ws.fork(2, names=["try-one", "try-two"])
        >>> one.name, two.info.parent_id == ws.id
        ('try-one', True)
        """
        body = _core.checked(public.ForkWorkspace, count=count, snapshot=snapshot, names=[*names])
        answer = await self.fetch(_core.post(self._path("fork"), body.model_dump(mode="json")), public.ForkAnswer)
        return [
            type(self)(one.workspace, self.client) if one.workspace else rebuild(one.model_dump(), 500) for one in answer.results
        ]

    async def rewind(self, snapshot: str) -> public.ResumeReport:
        """Go on from an earlier snapshot (id or name), awake. The report's ``kept_branch`` is what it was until now.

        >>> snapshot = await ws.checkpoint("before")
        >>> report = await ws.rewind("before")
        >>> report.kept_branch
        'demo@before-...'
        """
        body = _core.checked(public.RewindWorkspace, snapshot=snapshot)
        answer = await self.fetch(_core.post(self._path("rewind"), body.model_dump(mode="json")), public.AwakeAnswer)
        self.info, self.report = answer.workspace, answer.report
        return answer.report

    async def promote(self) -> Self:
        """Of a branch: the workspace it was forked from goes on with its state, and is returned, awake, with ``report``; this one
        ends. What the workspace was is in the report's ``kept_branch``.

        >>> (branch,) = await ws.fork(names=["attempt"])
        >>> ws = await branch.promote()
        >>> ws.name
        'demo'
        """
        answer = await self.fetch(_core.post(self._path("promote")), public.AwakeAnswer)
        return type(self)(answer.workspace, self.client, answer.report)

    async def discard(self) -> None:
        """Free a branch; what is not one is refused. Discarding a discarded one succeeds.

        >>> (branch,) = await ws.fork(names=["attempt"])
        >>> await branch.discard()
        """
        await self.fetch(_core.post(self._path("discard"), repeatable=True), public.Done)

    async def tree(self) -> builtins.list[public.TreeNode]:
        """What was forked from what, in the tree that it belongs to: parents before their branches.

        >>> (branch,) = await ws.fork(names=["attempt"])
        >>> [(node.workspace.name, node.depth) for node in await ws.tree()]
        [('demo', 0), ('attempt', 1)]
        """
        return (await self.fetch(_core.get(self._path("tree")), public.WorkspaceTree)).nodes

    async def keep_awake(self, seconds: float) -> None:
        """Do not hibernate it for idleness for so many seconds; 0 ends an earlier wish.

        >>> await ws.keep_awake(3600)
        >>> ws.info.keep_awake_until is None
        False
        """
        self.info = await self.fetch(
            _core.post(self._path("keep-awake"), {"seconds": seconds}, repeatable=True), public.WorkspaceInfo
        )

    async def wake_at(self, when: datetime | timedelta | None) -> None:
        """Let it wake by itself, once: at an aware time, or so much later than now on the server's clock. None: not any more.

        Another time takes the place of the one before. ``info.wake_at`` says when; after the wake its report has ``wake_at`` and
        ``late_s``.

        >>> from datetime import timedelta
        >>> await ws.wake_at(timedelta(hours=8))
        >>> ws.info.wake_at is None
        False
        >>> await ws.wake_at(None)
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
        asleep for so many days: ``archive``, ``delete`` or ``keep``. What is left out stays as it is.

        >>> await ws.configure(idle_timeout_s=300, keep_snapshots=5)
        >>> ws.info.idle_timeout_s
        300.0
        >>> await ws.configure(asleep_after_days=30, asleep_action="archive")
        >>> ws.info.asleep_action
        'archive'
        """
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
        """Grow the disk; takes effect at its next disk boot.

        >>> await ws.resize(disk_gib=20)
        >>> ws.info.disk_gib
        20
        """
        call = _core.post(self._path("resize"), {"disk_gib": disk_gib}, repeatable=True)
        self.info = await self.fetch(call, public.WorkspaceInfo)

    async def recover(self, how: str) -> public.ResumeReport:
        """Leave the state ``failed``: ``retry``, ``rewind`` (the snapshot before the head), ``disk-boot`` (without memory) or
        ``damaged-disk`` (the same, though what is on the disk may be wrong).

        >>> report = await ws.recover("disk-boot")
        >>> report.memory.value
        'lost'
        """
        answer = await self.fetch(_core.post(self._path("recover"), {"how": how}), public.AwakeAnswer)
        self.info, self.report = answer.workspace, answer.report
        return answer.report

    async def delete(self) -> None:
        """Free everything it holds, snapshots included. Deleting a deleted one succeeds.

        >>> await ws.delete()
        >>> await AsyncWorkspace.list()
        []
        """
        await self.client.request(Call("DELETE", self._path(), repeatable=True))

    pause = sleep
    resume = wake
    kill = delete

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

        >>> answer = await ws.invoke({"question": "why"})  # doctest: +SKIP
        >>> answer.status, answer.json()  # doctest: +SKIP
        (200, {'answer': 'because'})
        """
        made = AsyncInvocation(self, invocation(self.id, payload, options), options.get("timeout_s"))
        return made if stream else await made.result()

    def forward(self, port: int, *, local_port: int = 0, host: str = "127.0.0.1") -> AsyncForward:
        """A local port that leads to ``port`` inside: ``async with workspace.forward(8000) as tunnel: tunnel.url``.

        >>> async with ws.forward(8000) as tunnel:
        ...     tunnel.url
        'http://127.0.0.1:...'
        """
        from perdure.sdk._forward import AsyncForward  # it brings the WebSockets, which nothing else needs

        return AsyncForward(self.client.target, self.id, port, (host, local_port))

    async def get_host(self, port: int) -> str:
        """The host, with its own port where it has one, at which a port inside is reached over HTTP.

        >>> await ws.get_host(8000)  # doctest: +SKIP
        'demo--8000.ws.localhost:7070'
        """
        return await self.ports.host(port)
