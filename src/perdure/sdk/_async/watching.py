"""Watching a directory of a workspace."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from perdure.core.errors import PerdureError
from perdure.sdk import _core
from perdure.sdk._acompat import acall, apause
from perdure.sdk.errors import ConnectionLost
from perdure.wire import public

if TYPE_CHECKING:
    from perdure.sdk._async.workspace import AsyncWorkspace

OnEvent = Callable[[public.WatchEvent], Any] | None


class AsyncWatch:
    """What happens in a directory: iterate it, or ``run`` it if it has a callback.

    ::

        async for event in workspace.files.watch_dir("/root/project", recursive=True):
            print(event.type, event.path)

    A connection that breaks is taken up again without a gap. When the workspace falls asleep, or its generation ends otherwise,
    the last event is ``ended`` with the reason ``generation``, and nothing is woken. Iterating the same object again goes on
    after the last event, which wakes it: the watch is the workspace's own, and sleeps and wakes with its memory. Where events
    were lost (memory was not kept, too many came, nobody read for an hour) there is an ``overflow``: look at the directory again.

    >>> watch = ws.files.watch_dir("/root", recursive=True)
    >>> async for event in watch:  # doctest: +SKIP
    ...     print(event.type, event.path)
    """

    def __init__(self, workspace: AsyncWorkspace, path: str, root: str | None, recursive: bool, on_event: OnEvent) -> None:
        self._workspace = workspace
        self._on_event = on_event
        self._query = {"path": path, "root": root, "recursive": recursive or None}
        self.watch_id: str | None = None
        self.seen = 0
        """The number of the last event."""

    async def __aiter__(self) -> AsyncIterator[public.WatchEvent]:
        breaks = 0
        while True:
            where = _core.workspace_path(self._workspace.id, "files", "watch")
            asked = _core.get(where, **self._query, watch_id=self.watch_id, after=self.seen or None)
            try:
                async for event in self._events(asked):
                    breaks = 0
                    if event.type in {"heartbeat", "started"}:
                        continue
                    yield event
                    if event.type == "ended":
                        return
                return
            except ConnectionLost as error:
                broken: PerdureError = error
            except PerdureError as error:
                if self.watch_id is None or error.code not in {"unavailable", "server_unreachable", "busy"}:
                    raise
                broken = error
            breaks += 1
            if self.watch_id is None or breaks > _core.RECONNECTS:
                raise broken
            await apause(_core.delay_s(breaks))

    async def _events(self, asked: _core.Call) -> AsyncIterator[public.WatchEvent]:
        """Of one connection, those that only tell something of it too."""
        buffer = bytearray()
        async with self._workspace.client.stream(asked) as response:
            self._workspace.note(response.headers)
            async for chunk in response.aiter_raw():
                for line in _core.lines(buffer, chunk):
                    event = _core.watch_event(line)
                    if event.type == "started" and event.watch_id != self.watch_id:
                        self.watch_id, self.seen = event.watch_id, 0
                    self.seen = max(self.seen, event.seq)
                    yield event

    async def run(self) -> None:
        """Call ``on_event`` with every event, until the last.

        >>> await ws.files.watch_dir("/root", print).run()  # doctest: +SKIP
        """
        async for event in self:
            await acall(self._on_event, event)
