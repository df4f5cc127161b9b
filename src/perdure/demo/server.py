"""A server of one's own: in a process of its own, with a temporary home, gone without a trace afterwards.

The server must be the main thread of its process (its VMMs are spawned there), so it cannot live inside the demo's. It dies with
the demo, however that ends: it is told by the kernel (``PR_SET_PDEATHSIG``), hibernates and exits, and its VMMs with it.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from perdure.core.config import Settings
from perdure.core.errors import HostUnfit, PerdureError
from perdure.demo import observe
from perdure.demo.steps import DemoFailed
from perdure.sdk import AsyncClient, ServerUnreachable

START_DEADLINE_S = 120.0
ASK_EVERY_S = 0.1
#: A store with less in it is empty but for what it always has.
EMPTY_BYTES = 1 << 20
EMPTIED_DEADLINE_S = 60.0
_PR_SET_PDEATHSIG = 1


def _serve(settings: Settings, log: Path) -> None:
    """The child's whole life."""
    os.setsid()  # a Ctrl-C in the terminal is the demo's; it ends the server in its own order
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from perdure import wiring

    try:
        status = wiring.serve(settings)
    except PerdureError as error:
        sys.exit(error.message)
    sys.exit(status)


@contextmanager
def temporary_home() -> Iterator[Path]:
    """A directory with a path short enough for Unix sockets, which the embedded database's own user may pass through."""
    home = Path(tempfile.mkdtemp(prefix="perdure-demo-"))
    home.chmod(0o711)
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


async def _ended(process: BaseProcess, deadline_s: float) -> bool:
    """Whether the process ends in time, asked of the kernel through a pidfd."""
    assert process.pid is not None
    if not process.is_alive():
        return True
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    pidfd = os.pidfd_open(process.pid)
    loop.add_reader(pidfd, done.set)
    try:
        async with asyncio.timeout(deadline_s):
            await done.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return True


class Server:
    """A running server: its settings, its process, its log."""

    def __init__(self, settings: Settings, process: BaseProcess, log: Path) -> None:
        self.settings, self._process, self._log = settings, process, log

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:]) if self._log.exists() else ""

    async def ready(self) -> None:
        """Raises HostUnfit with the end of the server's log when it ends or does not answer in time."""
        async with AsyncClient(settings=self.settings) as client:
            for _ in range(int(START_DEADLINE_S / ASK_EVERY_S)):
                # A listening socket is nothing that the kernel tells of: wait for the process's end, and ask in between.
                if await self.ends_within(ASK_EVERY_S):
                    raise HostUnfit(f"The server ended while it started. Its log ends with:\n{self.log_tail()}")
                with suppress(ServerUnreachable):
                    await client.health()
                    return
        raise HostUnfit(f"The server did not answer within {START_DEADLINE_S:g} s. Its log ends with:\n{self.log_tail()}")

    async def ends_within(self, seconds: float) -> bool:
        """Wait that long for the server's end; False when it goes on."""
        return await _ended(self._process, seconds)

    def stored_bytes(self) -> int:
        """Of the snapshot store, on disk."""
        return observe.stored_bytes(self.settings.store)

    async def emptied(self) -> int:
        """Bytes left in the store when all is deleted. A delete is on record when it returns; the files go a moment later, which
        is waited for, a minute at most or until the server ends."""
        for _ in range(int(EMPTIED_DEADLINE_S / ASK_EVERY_S)):
            left = self.stored_bytes()
            if left < EMPTY_BYTES or await self.ends_within(ASK_EVERY_S):
                break
        return left

    async def stop(self) -> bool:
        """SIGTERM, then SIGKILL at its deadline; returns whether it ended in order."""
        self._process.terminate()
        orderly = await _ended(self._process, self.settings.shutdown_deadline_s + 30)
        if not orderly:
            self._process.kill()
        self._process.join()
        return orderly


@asynccontextmanager
async def temporary_server(**overrides: object) -> AsyncIterator[Server]:
    """A server with a home that is removed afterwards."""
    with temporary_home() as home:
        async with server_in(home, **overrides) as server:
            yield server


@asynccontextmanager
async def server_in(home: Path, **overrides: object) -> AsyncIterator[Server]:
    """A server over a home that outlives it. The image cache is the operator's: images are not built again."""
    base = Settings()
    values = {"home": home, "image_dir": base.images, "database_url": None, "listen_port": 0, **overrides}
    settings = Settings.model_validate({**base.model_dump(), **values})
    log = home / "server.log"
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(settings, log), name="perdure-server")
    with _undisturbed():  # inherited: a Ctrl-C before the child has left the terminal's session must not reach it
        process.start()
    server = Server(settings, process, log)
    try:
        await server.ready()
        yield server
    finally:
        with _undisturbed():
            await asyncio.shield(server.stop())


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No Ctrl-C inside: one while things are being put away would leave them behind."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


async def ensure_image(client: AsyncClient) -> str:
    """Make sure that the image ``base`` is there with the current agent; says what there was to do."""
    worked = False
    async for event in client.build_image(if_missing=True):
        worked = worked or event.type == "step"
        if event.image is not None:
            done = "built" if worked else "found"
            return f"{done} {event.image.name} {event.image.digest[:12]}: {event.image.packages} packages"
    raise DemoFailed("The build of the image ended without a result.")
