"""What commands say while a workspace takes its time: to be made, or to wake."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from perdure.cli.output import console, markup, note, size
from perdure.core.errors import PerdureError
from perdure.sdk import AsyncClient, AsyncWorkspace
from perdure.wire import public

#: How long something may take before somebody wants to know why, and how often it is looked at then.
PATIENCE_S = 0.5


async def create(name: str, exist_ok: bool, options: dict[str, Any], *, quiet: bool) -> AsyncWorkspace:
    """Create, and when that takes a while although the server has accepted it, say why."""
    async with AsyncClient() as client:
        making = asyncio.create_task(AsyncWorkspace.create(name, exist_ok=exist_ok, client=client, **options))
        try:
            while not await _over(making):
                with suppress(PerdureError):  # not accepted yet, or gone: creating says it
                    if quiet or await _tell_first_boot(client, name):
                        break
            return await making
        finally:  # interrupted: the server goes on
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)


async def _tell_first_boot(client: AsyncClient, name: str) -> bool:
    """A size that was never booted has no golden snapshot yet. False: ask again, it is not begun."""
    info = (await AsyncWorkspace.connect(name, wake=False, client=client)).info
    if info.state is not public.WorkspaceState.CREATING:
        return False
    found = await client.image(info.image_name)
    if f"{info.memory_mib}x{info.vcpus}" not in found.ready:
        cpus = "1 CPU" if info.vcpus == 1 else f"{info.vcpus} CPUs"
        note(f"[dim]Booting {markup(found.name)} with {info.memory_mib} MiB and {cpus} once; it takes about half a minute.[/]")
    return True


async def wake(name: str, deadline_s: float | None, *, quiet: bool) -> tuple[public.WorkspaceInfo, public.ResumeReport]:
    """Wake it, and when that takes a while, say on a terminal how much of it has come from the object store."""
    out = console(stderr=True)
    async with AsyncClient() as client:
        workspace = await AsyncWorkspace.connect(name, wake=False, client=client)
        waking = asyncio.create_task(workspace.wake(deadline_s=deadline_s))
        try:
            if not quiet and out.is_terminal and not await _over(waking):
                with out.status("Waking", spinner="line") as status:
                    while not await _over(waking):
                        with suppress(PerdureError):  # gone, or the server is: waking says it
                            coming = (await AsyncWorkspace.connect(name, wake=False, client=client)).info.fetching
                            status.update("Waking" if coming is None else f"Fetching from the object store: {fetched(coming)}")
            report = await waking
            return workspace.info, report
        finally:  # interrupted: the server goes on
            waking.cancel()
            await asyncio.gather(waking, return_exceptions=True)


async def _over(task: asyncio.Task[Any]) -> bool:
    return bool((await asyncio.wait({task}, timeout=PATIENCE_S))[0])


def fetched(coming: public.FetchInfo) -> str:
    return f"{size(coming.read_bytes)} of at most {size(coming.total_bytes)}"
