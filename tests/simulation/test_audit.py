"""A server that is killed at any statement of a call has done nothing of which there is no row, and tells nothing twice."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from perdure.access.audit import Act, Audit
from perdure.access.limits import Quota
from perdure.access.model import OPERATOR
from perdure.access.quotas import Quotas
from perdure.access.service import AccessService
from perdure.api.trail import Record, Trail
from perdure.core.ids import DEFAULT_TENANT
from perdure.db.database import Database
from tests.fakes.access import SIGNING_KEY
from tests.fakes.clock import FakeClock
from tests.simulation.fuse import Fuse, FusedDatabase, Killed, killed_everywhere


async def call(database: Any, name: str) -> None:
    """What a request to make a tenant does, and one to limit it."""
    clock = FakeClock()
    audit, access = Audit(database, clock, "here", keep_days=1), AccessService(database, clock, "pdk_operator", SIGNING_KEY)
    for route in ("create_tenant", "set_quota"):
        trail = Trail(audit, Act(DEFAULT_TENANT, "operator", "", "", f"req_{name}_{route}", "unix", note=f"note_{name}_{route}"))
        trail.asked(route, name)
        await trail.begin(Record.AROUND, of_workspace=False)
        if route == "create_tenant":
            trail.about((await access.create_tenant(OPERATOR, name)).id)
        else:
            tenant = await access.find_tenant(name)
            assert tenant is not None
            await Quotas(database).set(OPERATOR, tenant.id, {Quota.EXECS: 7})
        await trail.over(200)


async def test_nothing_is_done_of_which_there_is_no_row(database: Database) -> None:
    outcomes: set[tuple[str, ...]] = set()

    async def kill(at: int | None) -> Fuse:
        fuse, name = Fuse(at), f"t{at or 0}"
        with suppress(Killed):
            await call(FusedDatabase(fuse, database), name)
        for _ in range(2):
            successor = Audit(database, FakeClock(), "here", keep_days=1)
            await successor.start()
            await successor.close()
        access = AccessService(database, FakeClock(), "pdk_operator", SIGNING_KEY)
        tenant = await access.find_tenant(name)
        rows = [row.act for row in await successor.page(None, None, 0, 1000) if row.act.request_id.startswith(f"req_{name}_")]
        done = set() if tenant is None else {"create_tenant"}
        if tenant is not None and (await Quotas(database).limits(tenant.id)).execs == 7:
            done.add("set_quota")
        assert done <= {act.route for act in rows}, "done, and nobody knows by whom"
        assert len({act.route for act in rows}) == len(rows), "told twice"
        assert all(act.outcome == "interrupted" or act.route in done for act in rows), "told as done, and not done"
        outcomes.add(tuple(act.outcome for act in rows))
        return fuse

    whole, fired = await killed_everywhere(kill)
    assert {"after audit.begin", "after audit.finish", "after tenants.insert", "after quotas.set"} <= set(whole.passed)
    assert fired.total() == whole.count
    assert outcomes == {(), ("interrupted",), ("ok",), ("ok", "interrupted"), ("ok", "ok")}
