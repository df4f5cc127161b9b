"""The real HTTP server over fake services, in a thread with an event loop of its own: for sync, async and CLI clients alike."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Self, TypeVar

from perdure.access.audit import Audit
from perdure.access.model import Access
from perdure.access.quotas import Quotas
from perdure.access.service import AccessService
from perdure.api.server import ApiServer
from perdure.api.services import Services
from perdure.core.clock import SystemClock
from perdure.core.config import Settings
from perdure.db.database import Database
from perdure.runs.service.service import ExecutionService
from tests.fakes.access import SIGNING_KEY, FakeAccess
from tests.fakes.events import FakeWebhooks
from tests.fakes.images import FakeImages
from tests.fakes.memory_executions import MemoryExecutions
from tests.fakes.shares import FakeShares
from tests.fakes.workspaces import KEY, FakeWorkspaces, fake_services

Result = TypeVar("Result")
DEADLINE_S = 60


class FakeServer:
    """``with FakeServer(settings) as server``: serves until the block ends. ``workspaces`` may be looked at and changed.
    With ``database_url`` it has real tenants and keys, limits and audit; with ``has_runs`` the real durable executions too."""

    def __init__(self, settings: Settings, *, database_url: str | None = None, has_runs: bool = False) -> None:
        self.settings = settings
        self._has_runs = has_runs
        self._database = None if database_url is None else Database(database_url)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.services: Services
        self.workspaces: FakeWorkspaces
        self._server: ApiServer | None = None

    @property
    def images(self) -> FakeImages:
        assert isinstance(self.services.images, FakeImages)
        return self.services.images

    @property
    def executions(self) -> MemoryExecutions:
        assert isinstance(self.services.executions, MemoryExecutions)
        return self.services.executions

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.port}"

    def shift_clock(self, seconds: float) -> None:
        """The database's."""
        assert self._database is not None
        self._database.shift_clock(seconds)

    def run(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Run a coroutine function in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(DEADLINE_S)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until something holds inside the server; looked at between its events."""

        async def watch() -> None:
            async with asyncio.timeout(DEADLINE_S):
                while not condition():  # noqa: ASYNC110 - the fakes have no events for everything
                    await asyncio.sleep(0.01)

        self.run(watch)

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def reset(self) -> None:
        """Forget all workspaces, images, executions, webhooks and keys, those of commands too."""

        async def forget() -> None:
            self.workspaces.__init__()  # type: ignore[misc]
            self.images.__init__()  # type: ignore[misc]
            self.executions.__init__()  # type: ignore[misc]
            assert isinstance(self.services.shares, FakeShares)
            self.services.shares.forget()
            self.services.keyed_execs.store.__init__()  # type: ignore[misc]
            assert isinstance(self.services.webhooks, FakeWebhooks)
            self.services.webhooks.__init__()  # type: ignore[misc]
            if isinstance(self.services.access, FakeAccess):
                self.services.access.reset()

        self.run(forget)

    def start(self) -> None:
        """Serve; after ``stop`` again, with the same workspaces."""

        async def begin() -> None:
            if not hasattr(self, "services"):
                self.services, self.workspaces = fake_services(self.settings, await self._access())
                if self._database is not None:
                    audit = Audit(self._database, SystemClock(), "test", keep_days=1)
                    self.services = replace(self.services, quotas=Quotas(self._database), audit=audit)
                    if self._has_runs:
                        self.services = replace(self.services, executions=ExecutionService(self._database, SystemClock()))
            self._server = ApiServer(self.services)
            await self._server.start()

        self.run(begin)

    async def _access(self) -> Access | None:
        """The real one, where there is a database for it."""
        if self._database is None:
            return None
        await self._database.open()
        return AccessService(self._database, SystemClock(), KEY, SIGNING_KEY)

    def stop(self) -> None:
        async def end() -> None:
            assert self._server is not None
            await self._server.stop()
            await self.services.ports.close()

        self.run(end)

    def __exit__(self, *_: object) -> None:
        self.stop()

        async def cancel() -> None:
            if isinstance(self.services.executions, ExecutionService):
                await self.services.executions.close()
            if self._database is not None:
                await self._database.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        self.run(cancel)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()
