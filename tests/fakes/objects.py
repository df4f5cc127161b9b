"""Object stores for tests: one in memory that shows whatever a network can do, one in a directory that syncs nothing, and a gate
that decides who goes next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from enum import Enum
from random import Random
from typing import Any, TypeVar

from perdure.core import files
from perdure.core.errors import NotFound, Unavailable
from perdure.snapshots.objects.client import DirectoryObjects
from tests.fakes.disk import RecordingDisk

T = TypeVar("T")


class Fault(Enum):
    REFUSED = "refused"  # 500, nothing was done
    LOST = "lost"  # a time-out: it was done, the answer is lost
    LATE = "late"  # a time-out: it is done some time later (writes only)
    SHORT = "short"  # fewer bytes than asked for (reads), or a torn object that was acknowledged (PUT)
    FLIPPED = "flipped"  # a bit is wrong (reads)


class FakeObjects:
    """Implements Objects. ``faults`` is asked for each call (operation, name) and may name a fault."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.faults: Callable[[str, str], Fault | None] = lambda operation, name: None
        self.late: list[Callable[[], None]] = []
        self.puts: list[str] = []

    async def put(self, name: str, data: bytes) -> None:
        fault = self.faults("put", name)
        self.puts.append(name)
        if fault is Fault.REFUSED:
            raise Unavailable(f"500 for {name}", ambiguous=True)
        if fault is Fault.LATE:
            self.late.append(lambda: self.data.__setitem__(name, bytes(data)))
            raise Unavailable(f"timeout for {name}", ambiguous=True)
        self.data[name] = bytes(data[: len(data) // 2] if fault is Fault.SHORT else data)
        if fault is Fault.LOST:
            raise Unavailable(f"timeout for {name}", ambiguous=True)

    async def read(self, name: str, start: int, length: int) -> bytes:
        data = self._get("read", name)
        if start + length > len(data):
            raise NotFound(f"{name} ends before")
        return self._answer("read", name, data[start : start + length])

    async def get(self, name: str) -> bytes:
        return self._answer("get", name, self._get("get", name))

    def _get(self, operation: str, name: str) -> bytes:
        if name not in self.data:
            raise NotFound(f"no {name}")
        return self.data[name]

    def _answer(self, operation: str, name: str, data: bytes) -> bytes:
        fault = self.faults(operation, name)
        if fault is Fault.FLIPPED and data:
            middle = len(data) // 2
            return data[:middle] + bytes((data[middle] ^ 4,)) + data[middle + 1 :]
        if fault is not None:
            raise Unavailable(f"{fault.value} for {name}")
        return data

    async def size(self, name: str) -> int | None:
        if self.faults("size", name) is not None:
            raise Unavailable(f"500 for {name}")
        return len(self.data[name]) if name in self.data else None

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        if self.faults("list", prefix) is not None:
            raise Unavailable(f"500 for {prefix}")
        for name in sorted(self.data):
            if name.startswith(prefix):
                yield name, len(self.data[name])

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            fault = self.faults("delete", name)
            if fault is Fault.LATE:
                self.late.append(lambda name=name: self.data.pop(name, None))  # type: ignore[misc]
            elif fault is not Fault.REFUSED:
                self.data.pop(name, None)
            if fault is not None:
                raise Unavailable(f"{fault.value} for {name}", ambiguous=True)

    async def sweep(self, before_ms: int) -> int:
        return 0

    async def settle(self, name: str) -> None:
        self._get("settle", name)

    def deliver(self, random: Random) -> None:
        """Some of what the network still had arrives."""
        random.shuffle(self.late)
        while self.late and random.random() < 0.7:
            self.late.pop()()


class Killed(BaseException):
    """A process dies: nothing of it runs on, not even what would clean up."""


class UnsyncedObjects(DirectoryObjects):
    """A store in a directory of a process that was killed before anything that it put was synced: each object has its name."""

    async def put(self, name: str, data: bytes) -> None:
        assert isinstance(self._disk, RecordingDisk)
        path = self._directory / name
        files.make_dir(path.parent, disk=self._disk)
        path.write_bytes(data)
        self._disk.wrote(path)


class Turns:
    """Lets one of several processes take its next step: at every call of a wrapped object, a process waits for its turn."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.steps = 0
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    def wrap(self, thing: Any, process: str) -> Any:
        return _Stepped(self, thing, process)

    async def turn(self, process: str) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((process, future))
        await future

    async def run(self, processes: dict[str, Awaitable[Any]], *, kill_if: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Run them to their ends, one step at a time; ``kill_if`` is asked at each step. Returns results or errors."""
        tasks = {name: asyncio.ensure_future(work) for name, work in processes.items()}
        while any(not task.done() for task in tasks.values()):
            alive = {name for name, task in tasks.items() if not task.done()}
            self._waiting = [entry for entry in self._waiting if entry[0] in alive]
            if {name for name, _ in self._waiting} != alive:
                await asyncio.sleep(0)  # somebody is on the way to its next call, perhaps in a thread
                continue
            _, future = self._waiting.pop(self.random.randrange(len(self._waiting)))
            self.steps += 1
            if kill_if():
                future.set_exception(Killed())
            else:
                future.set_result(None)
            await asyncio.sleep(0)
        return dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))


class _Stepped:
    """Waits for a turn before every call, and for another before the answer is seen: one may die in between."""

    def __init__(self, turns: Turns, thing: Any, process: str) -> None:
        self._turns = turns
        self._thing = thing
        self._process = process

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._thing, name)
        if name in ("list", "settle", "sweep"):  # the last two change nothing in a store that is no directory
            return method

        async def call(*args: Any, **named: Any) -> Any:
            await self._turns.turn(self._process)
            result = await method(*args, **named)
            await self._turns.turn(self._process)
            return result

        return call
