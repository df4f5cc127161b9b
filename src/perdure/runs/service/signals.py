"""Waiting for something that this process learns of: a function has work, an execution has ended. Of another server's news it
may miss some, so whoever waits also looks by itself from time to time."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable


class Signals:
    """``tell`` wakes whoever waits for one of its keys at that moment."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, set[asyncio.Future[None]]] = {}

    def tell(self, key: Hashable) -> None:
        for future in self._waiting.pop(key, ()):
            if not future.done():
                future.set_result(None)

    def tell_all(self) -> None:
        for key in list(self._waiting):
            self.tell(key)

    def listen(self, keys: Iterable[Hashable]) -> Listening:
        """From now on nothing is missed, so look once more before waiting."""
        return Listening(self._waiting, tuple(keys))


class Listening:
    def __init__(self, waiting: dict[Hashable, set[asyncio.Future[None]]], keys: tuple[Hashable, ...]) -> None:
        self._waiting = waiting
        self._keys = keys
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for key in keys:
            waiting.setdefault(key, set()).add(self._future)

    async def wait(self, seconds: float) -> bool:
        """Whether it was told within so long."""
        told, _ = await asyncio.wait([self._future], timeout=max(0.0, seconds))
        return bool(told)

    def __enter__(self) -> Listening:
        return self

    def __exit__(self, *_: object) -> None:
        self._future.cancel()
        for key in self._keys:
            others = self._waiting.get(key)
            if others is not None:
                others.discard(self._future)
                if not others:
                    del self._waiting[key]
