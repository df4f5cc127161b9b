"""A tenant is shredded: its key goes, and with it, for ever, all that the tenant has in the object store.

1. The row that says so, in one transaction with the release of everything that the store has of the tenant. From here on nothing
   of it is uploaded, and nothing of it counts as durable there.
2. The key. Its place is taken by a mark.
3. The tenant's workspaces, as a deletion would.
4. The row says done.

Killed anywhere, the next start goes on. Each node of an installation does the second for itself, so the row stays.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import Conflict, NotFound, PerdureError
from perdure.core.ids import TenantId, WorkspaceId, is_id
from perdure.journal.entries import canonical
from perdure.wire.node import Node, SecondHome
from perdure.wire.objects import IMAGES
from perdure.workspaces.model import Context, ShreddedTenant
from perdure.workspaces.tools import Tools

_log = logging.getLogger(__name__)

SHOWN_MAX = 5


class Shredding:
    """``delete`` frees a workspace, with a cause for its thread."""

    def __init__(self, tools: Tools, node: Node, delete: Callable[[WorkspaceId, str], Awaitable[None]]) -> None:
        self._database = tools.store.database
        self._node = node
        self._delete = delete
        self._keyless: set[TenantId] = set()  # tenants whose key is known to be gone from this node

    async def shred(self, ctx: Context, tenant_id: TenantId, *, with_workspaces: bool) -> ShreddedTenant:
        await self._check_known(tenant_id)
        home = self._sealed_home(tenant_id)
        row = await self._database.one("shreds.of", tenant_id=tenant_id)
        living = [str(one["name"]) for one in await self._database.all("shreds.living", tenant_id=tenant_id)]
        if row is None and living and not with_workspaces:
            raise _alive(tenant_id, living)
        if row is None or (row["state"] == "done" and living and with_workspaces):
            await self._ask(ctx, tenant_id, living)
        await self._finish(home, tenant_id)
        return await self._told(tenant_id, living)

    async def go_on(self) -> None:
        """Bring to its end what was asked for, and throw away this node's copies of keys that other nodes were asked to shred."""
        for row in await self._database.all("shreds.all"):
            tenant_id, home = TenantId(row["tenant_id"]), self._node.second_home
            if home is None or not home.seals:
                if row["state"] == "asked":
                    _log.warning("tenant %s is to be shredded, and this server has no object store that is encrypted", tenant_id)
            elif row["state"] == "asked":
                await self._finish(home, tenant_id)
            elif tenant_id not in self._keyless:
                await self._throw_away(home, tenant_id)

    # ------------------------------------------------------------------------------------------------------------- the steps

    async def _ask(self, ctx: Context, tenant_id: TenantId, living: list[str]) -> None:
        body = canonical({"event": "shred", "by": ctx.principal, "workspaces": len(living)})
        async with self._database.transaction() as tx:
            # Whoever begins an upload of the tenant has come first, and what it begins is released, or sees the row.
            await tx.run("objects.add_scope", scope=tenant_id, tenant_id=tenant_id)
            await tx.one("objects.lock_scope", scope=tenant_id)
            await tx.run("shreds.release", tenant_id=tenant_id)
            await tx.one("shreds.ask", tenant_id=tenant_id, body=body)
        crashpoint(CrashPoint.SHRED_ASKED)

    async def _throw_away(self, home: SecondHome, tenant_id: TenantId) -> None:
        await home.shred(tenant_id)
        self._keyless.add(tenant_id)

    async def _finish(self, home: SecondHome, tenant_id: TenantId) -> None:
        """All that this node can do. One workspace that cannot be freed now does not keep the others."""
        await self._throw_away(home, tenant_id)
        crashpoint(CrashPoint.SHRED_KEYLESS)
        failed: PerdureError | None = None
        for one in await self._database.all("shreds.doomed", tenant_id=tenant_id, node_id=self._node.node_id):
            try:
                await self._delete(WorkspaceId(one["id"]), "its tenant was shredded")
            except PerdureError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        crashpoint(CrashPoint.SHRED_EMPTIED)
        await self._database.one("shreds.done", tenant_id=tenant_id, body=canonical({"event": "shredded"}))

    async def _told(self, tenant_id: TenantId, living: list[str]) -> ShreddedTenant:
        row = await self._database.one("shreds.of", tenant_id=tenant_id)
        assert row is not None, "it was asked for"
        left = [str(one["name"]) for one in await self._database.all("shreds.doomed", tenant_id=tenant_id, node_id=None)]
        now = {str(one["name"]) for one in await self._database.all("shreds.living", tenant_id=tenant_id)}
        gone = tuple(name for name in living if name not in now)
        return ShreddedTenant(tenant_id, row["asked_at"], gone, tuple(left))

    # ------------------------------------------------------------------------------------------------------------- refusals

    async def _check_known(self, tenant_id: TenantId) -> None:
        known = [str(row["tenant_id"]) for row in await self._database.all("shreds.tenants", images=IMAGES)]
        if not is_id(tenant_id, "ten") or tenant_id not in known:
            raise NotFound(f"There is no tenant {tenant_id!r}.", hint=f"Tenants of this server: {', '.join(known)}.")

    def _sealed_home(self, tenant_id: TenantId) -> SecondHome:
        home = self._node.second_home
        if home is not None and home.seals:
            return home
        if home is None:
            raise Conflict(
                f"This server has no object store, so tenant {tenant_id} has nothing that a key seals.",
                hint="Delete its workspaces (perdure rm NAME...): their files go from this machine.",
            )
        raise Conflict(
            f"The object store is not encrypted, so tenant {tenant_id} has no key whose end would make it unreadable.",
            hint="Delete its workspaces (perdure rm NAME...): the next two collections (PERDURE_STORE_COLLECT_S) remove their "
            "objects. Versions and copies that the store's provider keeps, and backups, you must delete yourself.",
        )


def _alive(tenant_id: TenantId, living: list[str]) -> Conflict:
    more = f" and {len(living) - SHOWN_MAX} more" if len(living) > SHOWN_MAX else ""
    return Conflict(
        f"Tenant {tenant_id} has {len(living)} workspaces that are not deleted: {', '.join(living[:SHOWN_MAX])}{more}.",
        hint="Delete them first, or with it (--delete-workspaces): what they have in the object store is lost with the key.",
    )
