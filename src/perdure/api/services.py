"""What the API needs of the rest: built by ``wiring`` (or by a test out of fakes) and passed to ``create_app``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from perdure.access.model import Access
from perdure.access.shares import Shares
from perdure.core.clock import Clock
from perdure.core.config import Settings
from perdure.core.ids import TenantId
from perdure.core.metrics import Gauges
from perdure.metering.usage import Usage
from perdure.wire import public
from perdure.wire.node import Ports
from perdure.workspaces.model import Context, Workspaces


class Images(Protocol):
    """The image commands. ``ref`` is a name or a digest (or an unambiguous beginning of one)."""

    async def find(self, ctx: Context) -> list[public.ImageInfo]: ...

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


class Metering(Protocol):
    """What workspaces used."""

    async def of(self, tenant_id: TenantId, ref: str | None, since: datetime | None, until: datetime | None) -> list[Usage]:
        """Of all of a tenant's, or of those that have or had an id or a name. Raises NotFound, InvalidRequest."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """``foresee_egress`` says which entries of an allow list lead nowhere as things are, and why. ``ports`` speaks HTTP to what
    listens in a workspace."""

    workspaces: Workspaces
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
