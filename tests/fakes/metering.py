"""Usage without anybody who used anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

from perdure.core.errors import NotFound
from perdure.core.ids import TenantId, WorkspaceId
from perdure.core.metrics import Gauge
from perdure.metering.usage import Amounts, Usage
from perdure.workspaces.model import Workspace


async def no_gauges() -> list[Gauge]:
    """Those of a server with one workspace."""
    return [Gauge("perdure_workspaces", "Workspaces by state.", {("running",): 1.0}, ("state",))]


AMOUNTS = Amounts(
    awake=timedelta(hours=1.5),
    paused=timedelta(minutes=3),
    asleep=timedelta(hours=100),
    losses=1,
    cpu_s=12.25,
    memory_byte_s=3e12,
    local_byte_s=3.6e14,
    store_byte_s=3.6e12,
    sent_bytes=1_000_000,
    received_bytes=2_000_000,
    uploaded_bytes=30_000_000,
    fetched_bytes=400_000,
    request_bytes=5_000_000,
    answer_bytes=6_600_000,
)


class FakeMetering:
    """Each workspace has used ``AMOUNTS``. ``asked`` are the last question's bounds."""

    def __init__(self, rows: Callable[[], Mapping[WorkspaceId, Workspace]]) -> None:
        self._rows = rows
        self.asked: tuple[datetime | None, datetime | None] = (None, None)

    async def of(self, tenant_id: TenantId, ref: str | None, since: datetime | None, until: datetime | None) -> list[Usage]:
        self.asked = (since, until)
        found = [
            Usage(one.id, one.name, one.state.value, AMOUNTS) for one in self._rows().values() if ref in {None, one.id, one.name}
        ]
        if ref is not None and not found:
            raise NotFound(f"There is and was no workspace {ref!r}.", hint="'perdure usage' shows all there were.")
        return found
