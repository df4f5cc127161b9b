"""Tenants that are shredded, each with a workspace that has slept into the store, in lives that are killed at each step of it.

Every such tenant is made for it, so that the others of a life go on. Its names and heads are noted before anything of it exists.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from perdure.core.errors import Shredded
from perdure.core.ids import TenantId, mint
from perdure.fleet.objects import StoreCatalogue
from perdure.snapshots.objects.keys import TenantKeyring
from perdure.wire.objects import ItemState, Scope
from perdure.workspaces.model import Context, CreateWorkspace, Workspace
from tests.torture.life import Life
from tests.torture.model import Violation
from tests.torture.registry import Part, Work
from tests.torture.saving import MASTER, clock_ms
from tests.torture.server import CTX, Server


def _noted(server: Server) -> Path:
    return server.home / "shreds.json"


def _tenants(server: Server) -> dict[str, bool]:
    """Tenants that were made here, and whether the end of each was acknowledged."""
    path = _noted(server)
    found: dict[str, bool] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _note(server: Server, tenant: str, *, acknowledged: bool) -> None:
    new = _noted(server).with_suffix(".new")
    new.write_text(json.dumps(_tenants(server) | {tenant: acknowledged}))
    new.rename(_noted(server))


def _as(tenant: str) -> Context:
    return replace(CTX, tenant_id=TenantId(tenant))


async def _shred(life: Life, _one: Workspace) -> None:
    server = life.server
    tenant = mint("ten", now_ms=clock_ms())
    ctx = _as(tenant)
    _note(server, tenant, acknowledged=False)
    await server.service.create(ctx, CreateWorkspace("doomed"))
    await server.service.sleep(ctx, "doomed")
    await server.service.push_snapshot(ctx, "doomed", None, deadline_s=20)
    await server.service.shred_tenant(ctx, ctx.tenant_id, with_workspaces=True)
    _note(server, tenant, acknowledged=True)


async def _clear(server: Server) -> None:
    """What was cut off before it was asked for is deleted; what was asked for comes to its end, as a loop would see to it."""
    await server.service.upkeep.shredding.go_on()
    for tenant in _tenants(server):
        if await server.database.one("shreds.of", tenant_id=tenant) is None:
            for one in await server.service.find(_as(tenant)):
                await server.service.delete(_as(tenant), one.id)
    await server.service.upkeep.clean()


async def _check(server: Server) -> None:
    for tenant, acknowledged in _tenants(server).items():
        row = await server.database.one("shreds.of", tenant_id=tenant)
        if row is None and acknowledged:
            raise Violation(f"{tenant} was shredded, and no row says so")
        if row is not None:
            await _check_gone(server, tenant, str(row["state"]))


async def _check_gone(server: Server, tenant: str, state: str) -> None:
    if state != "done":
        raise Violation(f"{tenant} is to be shredded, and that has not come to its end")
    if living := [one.name for one in await server.service.find(_as(tenant))]:
        raise Violation(f"{tenant} is shredded, and {living} are not deleted")
    try:
        TenantKeyring(server.home / "keys", MASTER).of(Scope(tenant))
    except Shredded:
        pass
    else:
        raise Violation(f"{tenant} is shredded, and has a key")
    for item in await StoreCatalogue(server.database).items(Scope(tenant)):
        if item.state is ItemState.DURABLE:
            raise Violation(f"{item.key} counts as durable, and nobody can read it")


WORKS = (Work("shred", _shred, 0, ("shred.",)),)
PARTS = (Part(_clear, _check, _clear),)
