"""Lists of workspaces, snapshots, keys and tenants in pages, over the real database."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest

from perdure.access.model import OPERATOR, NewKey
from perdure.access.service import AccessService
from perdure.core.paging import Page, Place, cut
from perdure.core.scopes import KeyScope
from perdure.db import queries
from perdure.workspaces.model import Wanted, Workspace, WorkspaceState
from tests.fakes.access import SIGNING_KEY
from tests.fakes.control_plane import CTX, OTHER, ControlPlane
from tests.fakes.workspaces import KEY


def place_of(one: Any) -> Place:
    return Place(one.created_at, one.id)


async def paged(find: Callable[[Page], Awaitable[list[Any]]], limit: int, place: Callable[[Any], Place] = place_of) -> list[Any]:
    """A list read to its end."""
    seen, page = [], Page(limit)
    while True:
        shown = cut(await find(page), page, place)
        assert 0 < len(shown.items) <= limit
        seen += shown.items
        if shown.next_cursor is None:
            return seen
        page = Page(limit, Place.of(shown.next_cursor))


async def names(plane: ControlPlane, wanted: Wanted, limit: int = 2) -> list[str]:
    return [one.name for one in await paged(lambda page: plane.service.find(CTX, wanted, page), limit)]


async def test_each_filter_and_all_of_them_together(plane: ControlPlane) -> None:
    for number in range(5):
        await plane.create(f"agent-{number}", metadata={"user": str(number % 2), "team": "x"})
    await plane.create("other", metadata={"user": "1"})
    await plane.service.sleep(CTX, "agent-3")
    everybody = [f"agent-{number}" for number in range(5)] + ["other"]
    assert await names(plane, Wanted()) == everybody
    assert await names(plane, Wanted(metadata={"user": "1"})) == ["agent-1", "agent-3", "other"]
    assert await names(plane, Wanted(metadata={"user": "1", "team": "x"})) == ["agent-1", "agent-3"]
    assert await names(plane, Wanted(name_prefix="agent-")) == everybody[:5]
    assert await names(plane, Wanted((WorkspaceState.HIBERNATED,))) == ["agent-3"]
    digest = (await plane.service.get(CTX, "other")).image
    assert await names(plane, Wanted(image="base")) == await names(plane, Wanted(image=digest)) == everybody
    assert await names(plane, Wanted((WorkspaceState.RUNNING,), {"user": "1"}, "base", "a")) == ["agent-1"]
    assert await plane.service.find(CTX, Wanted(image="dev")) == []
    for wildcard in ("%", "_gent", "agent-%"):
        assert await plane.service.find(CTX, Wanted(name_prefix=wildcard)) == [], "a prefix is text, not a pattern"
    assert await plane.service.find(OTHER, Wanted(metadata={"team": "x"})) == []


async def test_pages_are_stable_while_workspaces_come_and_go(plane: ControlPlane) -> None:
    """(peers §4a: metadata filters and paginators that neither repeat nor skip)"""
    for number in range(6):
        await plane.create(f"ws-{number}")

    async def find(page: Page) -> list[Workspace]:
        found = await plane.service.find(CTX, Wanted(), page)
        shown = [one.name for one in found[: page.limit]]
        if shown[-1] == "ws-1":  # the place where the next page begins goes, and so does one before and one behind it
            for name in ("ws-0", "ws-1", "ws-4"):
                await plane.service.delete(CTX, name)
            await plane.create("late")
        return found

    seen = [one.name for one in await paged(find, 2)]
    assert seen == ["ws-0", "ws-1", "ws-2", "ws-3", "ws-5", "late"]


async def test_workspaces_of_one_instant_are_told_apart_by_their_ids(plane: ControlPlane) -> None:
    for number in range(5):
        await plane.create(f"ws-{number}")
    await plane.execute("update workspaces set created_at = '2026-01-01 00:00:00.000001+00'")
    assert sorted(await names(plane, Wanted(), 1)) == [f"ws-{number}" for number in range(5)]


async def test_snapshots_keys_and_tenants_come_in_pages_too(plane: ControlPlane) -> None:
    await plane.create()
    taken = [(await plane.service.checkpoint(CTX, "demo")).id for _ in range(5)]
    found = await paged(lambda page: plane.service.lineage(CTX, "demo", page), 2, lambda one: place_of(one.snapshot))
    assert [one.snapshot.id for one in found] == taken
    assert found == await plane.service.lineage(CTX, "demo"), "a page knows the tree beyond it"
    access = AccessService(plane.database, plane.clock, KEY, SIGNING_KEY)
    for name in "abc":
        await access.create_tenant(OPERATOR, name)
        await access.create_key(OPERATOR, NewKey(name, frozenset({KeyScope.READ})))
    assert [one.name for one in await paged(access.tenants, 2)] == ["default", "a", "b", "c"]
    assert [one.name for one in await paged(lambda page: access.keys(OPERATOR, None, page), 2)] == ["a", "b", "c"]


#: Five thousand like the one that is there, each of a user of its own.
CROWD = """
insert into workspaces (id, tenant_id, name, kind, state, generation, node_id, image, image_name, memory_mib, vcpus, disk_gib,
                        hostname, machine_id, idle_timeout_s, checkpoint_interval_s, metadata)
select 'ws_' || n, tenant_id, 'crowd-' || n, kind, state, generation, node_id, image, image_name, memory_mib, vcpus, disk_gib,
       hostname, machine_id, idle_timeout_s, checkpoint_interval_s, jsonb_build_object('user', n::text)
from workspaces, generate_series(1, 5000) n
"""


@pytest.mark.parametrize(
    ("index", "narrowed"),
    [("workspaces_metadata", {"metadata": json.dumps({"user": "7"})}), ("workspaces_page", {"limit": 10})],
)
async def test_a_list_does_not_read_every_workspace(plane: ControlPlane, index: str, narrowed: dict[str, Any]) -> None:
    await plane.create()
    none = dict.fromkeys(("image", "name_prefix", "after_at", "after_id", "limit"))
    values = {"tenant_id": CTX.tenant_id, "states": [], "metadata": "{}", **none, **narrowed}
    async with await psycopg.AsyncConnection.connect(plane.database.url, autocommit=True) as connection:
        await connection.execute(CROWD)
        await connection.execute("analyze workspaces")
        cursor = await connection.execute("explain " + queries.load()["workspaces.find"], values)
        plan = "\n".join(str(row[0]) for row in await cursor.fetchall())
    assert index in plan
