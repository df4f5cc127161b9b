"""The workspace service over a fake node, fake images, a clock that tests move, and a real database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, LiteralString

import psycopg

from perdure.core.clock import epoch_ms
from perdure.core.config import Settings
from perdure.core.ids import RequestId, TenantId, mint
from perdure.db.database import Database
from perdure.fleet.nodes import NodeRegistry
from perdure.fleet.placement import LocalPlacement
from perdure.gateway.rules import EgressRules
from perdure.workspaces.model import Context, CreateWorkspace, ResumeReport, Workspace, WorkspaceState
from perdure.workspaces.service import WorkspaceService
from perdure.workspaces.store import WorkspaceStore
from perdure.workspaces.tools import Tools
from tests.fakes.clock import FakeClock
from tests.fakes.database import fresh_database
from tests.fakes.node import FakeImages, FakeNode

CTX = Context(principal="test", request_id=RequestId("req_test"))
OTHER = Context(principal="stranger", request_id=RequestId("req_other"), tenant_id=TenantId("ten_other"))


async def bytes_of(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


@dataclass
class ControlPlane:
    """``service`` can be thrown away and made anew over the same database and node, as a restart would."""

    database: Database
    clock: FakeClock = field(default_factory=FakeClock)
    settings: Settings = field(default_factory=lambda: Settings(home=Path("/nonexistent"), parallel_starts=2, wake_deadline_s=20))
    images: FakeImages = field(default_factory=FakeImages)
    node: FakeNode = field(init=False)
    service: WorkspaceService = field(init=False)

    def __post_init__(self) -> None:
        self.node = FakeNode(clock=self.clock)

    def build(self, database: Any = None, node: Any = None) -> WorkspaceService:
        tools = Tools(
            *(WorkspaceStore(database or self.database), LocalPlacement(node or self.node), self.images),
            *(self.settings, self.clock, EgressRules.parse),
        )
        self.service = WorkspaceService(tools)
        return self.service

    async def begin(self) -> None:
        await NodeRegistry(self.database, lease_s=20).register(self.node.node_id)
        await self.restart()

    async def restart(self) -> WorkspaceService:
        """A new server process: nothing but the database and the node is left of the old one."""
        self.build()
        await self.service.upkeep.start(timers=False)
        return self.service

    async def crash(self, *, node_too: bool = True) -> None:
        """SIGKILL of the server, with its machines (they die with it) or without."""
        self.service.upkeep.stop()
        await asyncio.sleep(0)
        if node_too:
            self.node.crash()

    async def create(self, name: str = "demo", **fields: Any) -> tuple[Workspace, ResumeReport]:
        return await self.service.create(CTX, CreateWorkspace(name, **fields))

    async def write(self, name: str, path: str, content: bytes) -> None:
        async with self.service.awake(CTX, name) as awake:
            await awake.guest.write_file(path, bytes_of(content))

    async def read(self, name: str, path: str) -> bytes:
        async with self.service.awake(CTX, name) as awake:
            return b"".join([chunk async for chunk in awake.guest.read_file(path)])

    async def state(self, name: str) -> WorkspaceState:
        return (await self.service.get(CTX, name)).state

    async def until(self, name: str, condition: Callable[[Workspace], bool]) -> Workspace:
        """Wait for what happens by itself, by letting everything queued run."""
        for _ in range(2000):
            workspace = await self.service.get(CTX, name)
            if condition(workspace):
                return workspace
        raise AssertionError(f"{name} stays {workspace.state} ({workspace.state_detail!r})")

    async def execute(self, statement: LiteralString, *values: object) -> None:
        """SQL that the product does not have."""
        async with await psycopg.AsyncConnection.connect(self.database.url, autocommit=True) as connection:
            await connection.execute(statement, values)

    def minted(self, prefix: str) -> str:
        return mint(prefix, now_ms=epoch_ms(self.clock))


@asynccontextmanager
async def control_plane(**fields: Any) -> AsyncIterator[ControlPlane]:
    async with fresh_database() as database:
        plane = ControlPlane(database, **fields)
        await plane.begin()
        try:
            yield plane
        finally:
            plane.service.upkeep.stop()
            await asyncio.sleep(0)
