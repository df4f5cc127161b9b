"""Watches of a workspace in memory."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import AsyncIterator

from perdure.core.errors import StaleGeneration
from perdure.wire.node import Place, WatchEvent, WatchKind
from perdure.wire.paths import shown


class Watch:
    """What happened below a directory since somebody began to watch it."""

    def __init__(self, watch_id: str, path: str, place: Place, recursive: bool) -> None:
        self.id = watch_id
        self.path = path
        self.shown = shown(place).rstrip("/") or "/"
        self.recursive = recursive
        self.events: list[WatchEvent] = []
        self.changed = asyncio.Event()

    def _covers(self, path: str) -> bool:
        above = posixpath.dirname(path)
        return above == self.path or (self.recursive and f"{above}/".startswith(self.path.rstrip("/") + "/"))

    def tell(self, kind: WatchKind, path: str, is_directory: bool, old: str | None = None) -> None:
        if path == self.path and kind in {WatchKind.REMOVED, WatchKind.RENAMED}:
            self._add(WatchKind.ENDED, path, True, reason="the directory is gone")
            return
        here, before = self._covers(path), old is not None and self._covers(old)
        if here and old is not None:
            self._add(WatchKind.RENAMED if before else WatchKind.CREATED, path, is_directory, old if before else None)
        elif here:
            self._add(kind, path, is_directory)
        elif before and old is not None:
            self._add(WatchKind.REMOVED, old, is_directory)

    def _add(self, kind: WatchKind, path: str, is_directory: bool, old: str | None = None, reason: str = "") -> None:
        told = (self._shown(path), is_directory, None if old is None else self._shown(old), reason)
        self.events.append(WatchEvent(len(self.events) + 1, kind, *told))
        self.changed.set()
        self.changed = asyncio.Event()

    def _shown(self, path: str) -> str:
        rest = path[len(self.path.rstrip("/")) :].lstrip("/")
        return posixpath.join(self.shown, rest) if rest else self.shown


class Handle:
    """An attachment to a watch."""

    def __init__(self, watch: Watch, after: int, broken: asyncio.Event) -> None:
        self.watch_id = watch.id
        self._watch = watch
        self._next = after
        self._broken = broken

    async def events(self) -> AsyncIterator[WatchEvent]:
        watch = self._watch
        while True:
            changed = watch.changed
            while self._next < len(watch.events):
                self._next += 1
                event = watch.events[self._next - 1]
                yield event
                if event.kind is WatchKind.ENDED:
                    return
            if self._broken.is_set():
                raise StaleGeneration("The workspace is no longer at this generation.")
            waits = [asyncio.ensure_future(changed.wait()), asyncio.ensure_future(self._broken.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def close(self) -> None:
        """Nothing is held."""
