"""Kernels to test: those of the fake, and real ones (ipykernel) as processes of this host."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from perdure.api.kernels.talk import Kernels
from perdure.core.ids import ExecId
from perdure.wire import node, public
from tests.fakes.host_guest import HostGuest
from tests.fakes.memory_guest import MemoryGuest, World

_NUMBERS = itertools.count(10_000_000)


def new_id() -> ExecId:
    return ExecId(f"exe_{next(_NUMBERS)}")


@dataclass
class Said:
    """What a cell said."""

    events: list[public.PythonEvent]

    @property
    def done(self) -> public.PythonEvent:
        return self.events[-1]

    @property
    def started(self) -> public.PythonEvent:
        return next(event for event in self.events if event.type == "started")

    @property
    def error(self) -> public.PythonEvent:
        return next(event for event in self.events if event.type == "error")

    @property
    def stdout(self) -> str:
        return self._text("stdout")

    @property
    def stderr(self) -> str:
        return self._text("stderr")

    @property
    def shown(self) -> list[dict[str, Any]]:
        return [event.data for event in self.events if event.data]

    @property
    def value(self) -> str:
        return str(next(event.data["text/plain"] for event in self.events if event.type == "execute_result"))

    def _text(self, stream: str) -> str:
        return "".join(event.text for event in self.events if event.stream == stream)


@dataclass
class Pythons:
    """A guest's kernels, and how to speak to them."""

    kernels: Kernels
    guest: Any
    kind: str
    directory: Path = field(default_factory=Path)

    async def begin(self, code: str, *, exec_id: ExecId | None = None, **fields: Any) -> node.ExecHandle:
        """Hand a cell over."""
        cell = public.RunPython(code=code, **fields)
        return await self.kernels.run(exec_id or new_id(), cell, lambda: None)

    async def follow(self, handle: node.ExecHandle, context: str = "default", offset: int = 0) -> Said:
        async with aclosing(self.kernels.events(handle, context, offset)) as events:
            said = Said([event async for event in events])
        await handle.close()
        return said

    async def run(self, code: str, **fields: Any) -> Said:
        """Run a cell to its end."""
        return await self.follow(await self.begin(code, **fields), fields.get("context", "default"))


def fake() -> Pythons:
    guest = MemoryGuest(World(), 1)
    return Pythons(Kernels(cast("node.Guest", guest), new_id), guest, "fake")


async def host(**fields: Any) -> AsyncIterator[Pythons]:
    """Short paths: those of sockets may have 107 bytes. Whatever is left of its kernels ends with it."""
    directory = Path(tempfile.mkdtemp(prefix="pk-", dir="/tmp"))
    guest = HostGuest({"HOME": str(directory), "IPYTHONDIR": str(directory / "ipython")})
    kernels = Kernels(cast("node.Guest", guest), new_id, f"{directory}/run", f"{directory}/state", **fields)
    try:
        yield Pythons(kernels, guest, "host", directory)
    finally:
        await guest.close()
        for pid in keepers(directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # its kernel goes with it
        shutil.rmtree(directory, ignore_errors=True)


def keepers(directory: Path) -> list[int]:
    """Keepers that live below a directory. A number that one has left there may be somebody else's by now."""
    found = [int(path.read_text()) for path in directory.glob("run/*/pid")]
    return [pid for pid in found if is_keeper(pid)]


def is_keeper(pid: int) -> bool:
    try:
        return b"perdure python" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real() -> AsyncIterator[Pythons]:
    """One kernel for a file: it takes a second or two to start."""
    async for made in host():
        yield made


@pytest.fixture(params=["fake", "real"])
def pythons(request: pytest.FixtureRequest) -> Pythons:
    return fake() if request.param == "fake" else request.getfixturevalue("real")
