"""What the API needs of the rest: built by ``wiring`` (or by a test out of fakes) and passed to ``create_app``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from perdure.access.audit import Act, AuditRow
from perdure.access.limits import Ask, Limits, Quota, Use
from perdure.access.model import Access, Principal
from perdure.access.shares import Shares
from perdure.core.clock import Clock
from perdure.core.config import Settings
from perdure.core.ids import TenantId
from perdure.core.metrics import Gauges
from perdure.journal.feed import FeedEvent, Reading, Wanted
from perdure.metering.usage import Usage
from perdure.runs.service.histories import Histories
from perdure.runs.service.model import Executions
from perdure.webhooks.model import Webhooks
from perdure.wire import public
from perdure.wire.node import Confinement, Ports
from perdure.workspaces.exec_keys import KeyedExecs
from perdure.workspaces.model import Context, Workspaces


class Images(Protocol):
    """The image commands. ``ref`` is a name or a digest (or an unambiguous beginning of one)."""

    async def find(self, ctx: Context) -> list[public.ImageInfo]: ...

    async def recipes(self, ctx: Context) -> list[public.RecipeInfo]:
        """What can be built by its name alone."""
        ...

    async def get(self, ctx: Context, ref: str) -> public.ImageInfo:
        """Raises NotFound with the names that exist."""
        ...

    async def remove(self, ctx: Context, ref: str) -> None:
        """Raises Conflict naming the workspaces that still use it."""
        ...

    async def prune(self, ctx: Context) -> public.PrunedImages:
        """Remove the images that no name points to and no workspace uses."""
        ...

    def build(self, ctx: Context, spec: public.BuildImage) -> AsyncIterator[public.BuildEvent]:
        """Progress, then one ``done`` event with the image. Closing the iterator cancels the build and leaves nothing."""
        ...


class Backups(Protocol):
    """Backups of the whole server."""

    def make(self, ctx: Context, spec: public.MakeBackup) -> AsyncIterator[public.BackupEvent]:
        """Progress, then one ``done`` event with the backup. Closing the iterator ends it; then there is none."""
        ...


class Events(Protocol):
    """The feed of a tenant's events."""

    async def begin(self, wanted: Wanted) -> Reading:
        """Where a reading begins. Raises NotFound for a workspace that never was."""
        ...

    def read(self, reading: Reading) -> AsyncGenerator[FeedEvent, None]:
        """In order; ends where the feed ends, or never, when it follows."""
        ...


class Metering(Protocol):
    """What workspaces used."""

    async def of(self, tenant_id: TenantId, ref: str | None, since: datetime | None, until: datetime | None) -> list[Usage]:
        """Of all of a tenant's, or of those that have or had an id or a name. Raises NotFound, InvalidRequest."""
        ...


class Quotas(Protocol):
    """What tenants may have, and have."""

    async def limits(self, tenant_id: TenantId) -> Limits: ...

    async def use(self, tenant_id: TenantId) -> Use: ...

    async def set(self, caller: Principal, tenant_id: TenantId, changes: Mapping[Quota, float | None]) -> Limits:
        """Change those that are given; None takes a limit away. Raises InvalidRequest when none is given."""
        ...

    async def check(self, tenant_id: TenantId, ask: Ask) -> None:
        """Raises QuotaExceeded when there is no room for that now. Reserves nothing."""
        ...


class AuditLog(Protocol):
    """Who did what; ``access.audit`` says what is noted when."""

    async def begin(self, act: Act, *, of_workspace: bool) -> None:
        """Raises what keeps it from being noted: then it must not be done."""
        ...

    async def finish(self, act: Act) -> None:
        """An empty target leaves what was noted."""
        ...

    async def append(self, act: Act, repeated: int = 1) -> None: ...

    async def refused(self, act: Act, *, has_begun: bool = False) -> None: ...

    async def page(self, tenant_id: TenantId | None, since: datetime | None, after: int, limit: int) -> list[AuditRow]:
        """Rows behind ``after``, oldest first; of all tenants for None."""
        ...

    async def more(self) -> None:
        """Returns when there may be another row; a moment later at most."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """``foresee_egress`` says which entries of an allow list lead nowhere as things are, and why. ``ports`` speaks HTTP to what
    listens in a workspace. ``confinement`` holds for workspaces on this host; None: none can run here."""

    workspaces: Workspaces
    keyed_execs: KeyedExecs
    images: Images
    backups: Backups
    metering: Metering
    doctor: Callable[[], Awaitable[public.DoctorReport]]
    foresee_egress: Callable[[Iterable[str]], Awaitable[list[str]]]
    access: Access
    settings: Settings
    clock: Clock
    ports: Ports
    shares: Shares
    gauges: Gauges
    quotas: Quotas
    audit: AuditLog
    feed: Events
    webhooks: Webhooks
    executions: Executions
    confinement: Confinement | None
    histories: Histories
