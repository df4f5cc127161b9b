"""What commands say while a workspace takes its time: to be made, to wake, or to reach the object store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from perdure.cli.output import markup, note, size
from perdure.cli.progress import Bar
from perdure.core.errors import PerdureError
from perdure.sdk import AsyncClient, AsyncWorkspace
from perdure.wire import public

#: How long something may take before somebody wants to know why, and how often it is looked at then.
PATIENCE_S = 0.5
Result = TypeVar("Result")


async def create(name: str, exist_ok: bool, options: dict[str, Any], *, quiet: bool) -> AsyncWorkspace:
    """Create, and when that takes a while although the server has accepted it, say why."""
    async with AsyncClient() as client:
        with Bar(quiet=quiet) as bar:

            async def look() -> bool:
                bar.show(f"Making {markup(name)}")
                return quiet or await _tell_first_boot(client, name, bar)

            making = asyncio.create_task(AsyncWorkspace.create(name, exist_ok=exist_ok, client=client, **options))
            return await _watched(making, look)


async def _tell_first_boot(client: AsyncClient, name: str, bar: Bar) -> bool:
    """A size that was never booted has no golden snapshot yet. False: ask again, it is not begun."""
    info = (await AsyncWorkspace.connect(name, wake=False, client=client)).info
    if info.state is not public.WorkspaceState.CREATING:
        return False
    found = await client.image(info.image_name)
    if f"{info.memory_mib}x{info.vcpus}" not in found.ready:
        cpus = "1 CPU" if info.vcpus == 1 else f"{info.vcpus} CPUs"
        words = f"Booting {markup(found.name)} with {info.memory_mib} MiB and {cpus} once; it takes about half a minute"
        if bar.is_shown:
            bar.show(words)
        else:
            note(f"[dim]{words}.[/]")
    return True


async def wake(name: str, deadline_s: float | None, *, quiet: bool) -> tuple[public.WorkspaceInfo, public.ResumeReport]:
    """Wake it, and when that takes a while, say on a terminal how much of it has come from the object store."""
    async with AsyncClient() as client:
        workspace = await AsyncWorkspace.connect(name, wake=False, client=client)
        with Bar(quiet=quiet) as bar:

            async def look() -> bool:
                if not bar.is_shown:
                    return True
                bar.show(f"Waking {markup(name)}")
                coming = (await AsyncWorkspace.connect(name, wake=False, client=client)).info.fetching
                if coming is not None:
                    words = f"Fetching {markup(name)} from the object store: {fetched(coming)}"
                    bar.show(words, coming.read_bytes, coming.total_bytes)
                return False

            report = await _watched(asyncio.create_task(workspace.wake(deadline_s=deadline_s)), look)
            return workspace.info, report


async def push(name: str, snapshot: str | None, deadline_s: float | None = None, *, quiet: bool) -> public.SnapshotInfo:
    """Wait until the object store has a snapshot, and say on a terminal how much of it has been read."""
    async with AsyncClient() as client:
        workspace = await AsyncWorkspace.connect(name, wake=False, client=client)
        wanted = snapshot or workspace.info.head_snapshot_id
        with Bar(quiet=quiet) as bar:

            async def look() -> bool:
                if not bar.is_shown:
                    return True
                bar.show("Uploading")
                found = await workspace.snapshots()
                upload = next((one.upload for one in found if wanted in {one.id, one.name}), None)
                if upload is not None:
                    bar.show(f"Uploading, {size(upload.sent_bytes)} sent", upload.read_bytes, upload.total_bytes)
                return False

            return await _watched(asyncio.create_task(workspace.push_snapshot(snapshot, deadline_s=deadline_s)), look)


async def _watched(task: asyncio.Task[Result], look: Callable[[], Awaitable[bool]]) -> Result:
    """Wait for it, and look now and then until a look says that there is nothing more to see."""
    try:
        while not (await asyncio.wait({task}, timeout=PATIENCE_S))[0]:
            with suppress(PerdureError):  # not begun yet, or gone: the task itself says it
                if await look():
                    break
        return await task
    finally:  # interrupted: the server goes on
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def fetched(coming: public.FetchInfo) -> str:
    return f"{size(coming.read_bytes)} of at most {size(coming.total_bytes)}"
