"""The audit as a list. Every refusal has a row."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from datetime import datetime

from perdure.access.audit import Act, AuditRow
from perdure.core.clock import SystemClock
from perdure.core.ids import TenantId


class FakeAudit:
    """``rows`` are those there are; ``begun`` what has begun and is not over."""

    def __init__(self) -> None:
        self.rows: list[AuditRow] = []
        self.begun: dict[str, Act] = {}
        self._written = asyncio.Event()

    async def begin(self, act: Act, *, of_workspace: bool) -> None:
        self.begun[act.note] = act

    async def finish(self, act: Act) -> None:
        begun = self.begun.pop(act.note)
        await self.append(replace(act, target=act.target or begun.target))

    async def append(self, act: Act, repeated: int = 1) -> None:
        self.rows.append(AuditRow(len(self.rows) + 1, SystemClock().now(), act, repeated))
        self._written.set()

    async def refused(self, act: Act, *, has_begun: bool = False) -> None:
        if has_begun:
            del self.begun[act.note]
        await self.append(act)

    async def page(self, tenant_id: TenantId | None, since: datetime | None, after: int, limit: int) -> list[AuditRow]:
        found = [row for row in self.rows if row.seq > after and tenant_id in {None, row.act.tenant_id}]
        return [row for row in found if since is None or row.at >= since][:limit]

    async def more(self) -> None:
        self._written.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await self._written.wait()
