"""The audit over real HTTP: every change and every refusal has a row, nothing is done without one, and a flood is small."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from perdure.access.audit import EACH, NAMES_MAX, OVERALL, Act, Audit
from perdure.access.model import OPERATOR
from perdure.api import policy
from perdure.api.trail import Record
from perdure.core.errors import MissingScope, Unavailable
from perdure.core.ids import DEFAULT_TENANT
from perdure.sdk import AsyncClient
from tests.fakes.workspaces import KEY
from tests.integration.api.stage import ROUTES, Stage, stage
from tests.integration.api.test_keys import BODIES, absent


@pytest.fixture
async def staged() -> AsyncIterator[Stage]:
    async with stage() as made:
        yield made


async def rows(staged: Stage) -> list[Any]:
    return [row.act for row in await staged.audit.page(None, None, 0, 1000)]


def brief(act: Act) -> tuple[str, str, str]:
    return act.route, act.target, act.outcome


async def test_a_change_is_told_with_who_what_and_how_it_ended(staged: Stage) -> None:
    await staged.tenant("acme")
    secret = await staged.key("operate", tenant="acme")
    (key,) = await staged.access.keys(OPERATOR, "acme")
    answer = await staged.ask(secret, "POST", "/v1/workspaces", json={"name": "demo"})
    workspace_id = answer.json()["workspace"]["id"]
    await staged.ask(secret, "POST", "/v1/workspaces/demo/checkpoint", json={"name": "kept"})
    await staged.ask(secret, "DELETE", "/v1/workspaces/demo/snapshots/kept")
    await staged.ask(secret, "POST", "/v1/workspaces/demo/execs", json={"argv": ["echo", "hush"], "background": True})
    await staged.ask(secret, "PUT", "/v1/workspaces/demo/files/content", params={"path": "/x"}, content=b"hush")
    await staged.ask(secret, "GET", "/v1/workspaces/demo")
    await staged.ask(secret, "POST", "/v1/workspaces", json={"name": "demo"})
    await staged.ask(secret, "DELETE", "/v1/workspaces/demo")
    found = await rows(staged)
    assert [brief(act) for act in found] == [
        ("create_workspace", workspace_id, "ok"),
        ("checkpoint_workspace", workspace_id, "ok"),
        ("remove_snapshot", f"{workspace_id}/kept", "conflict"),
        ("start_exec", workspace_id, "ok"),
        ("write_file", workspace_id, "ok"),
        ("create_workspace", "", "already_exists"),
        ("delete_workspace", workspace_id, "ok"),
    ]
    assert {(act.principal, act.tenant_id, act.peer) for act in found} == {(f"key:{key.id}", key.tenant_id, "127.0.0.1")}
    assert [act.status for act in found] == [201, 200, 409, 201, 200, 409, 200]
    assert found[0].request_id == answer.headers["perdure-request-id"]
    assert "hush" not in repr(found) and secret not in repr(found)


async def test_every_route_that_changes_something_has_a_row_and_no_other(staged: Stage) -> None:
    asked = Counter[str]()
    for name, (method, path) in ROUTES.items():
        response = await staged.ask(KEY, method, absent(path), **BODIES.get(name, {}))
        is_recorded = policy.recorded(name, method) is not Record.NEVER or response.status_code in {401, 403, 404, 429}
        asked[name] += is_recorded
    await staged.audit.write_counted()
    found = Counter[str]()
    for row in await staged.audit.page(None, None, 0, 1000):
        found[row.act.route] += 1
    told = sum(row.repeated for row in await staged.audit.page(None, None, 0, 1000))
    assert told == sum(asked.values())
    assert {name for name in found if not asked[name]} == set()
    changing = {name for name, (method, _) in ROUTES.items() if method != "GET"}
    assert {name for name in changing if policy.recorded(name, ROUTES[name][0]) is Record.NEVER} == policy.WORK_IN_A_HISTORY
    assert await staged.plane.database.all("audit.interrupted", server="test") == [], "what had begun is over"


async def test_what_is_refused_is_told(staged: Stage) -> None:
    await staged.tenant("acme")
    reader = await staged.key("read", tenant="acme")
    (key,) = await staged.access.keys(OPERATOR, "acme")
    await staged.ask(KEY, "POST", "/v1/workspaces", json={"name": "demo"})
    await staged.ask(reader, "DELETE", "/v1/workspaces/demo")
    await staged.ask(reader, "GET", "/v1/workspaces/demo")
    await staged.ask("pdk_wrong", "GET", "/v1/workspaces/demo")
    await staged.http.get("/v1/health", headers={"authorization": f"Bearer {KEY}", "host": "evil.example"})
    url = str(staged.http.base_url).replace("http", "ws").rstrip("/") + "/v1/workspaces/demo/tcp/80"
    with pytest.raises(InvalidStatus):
        await connect(url, additional_headers={"authorization": f"Bearer {reader}"})
    _, *found = await rows(staged)
    who = f"key:{key.id}"
    assert [(*brief(act), act.status, act.principal) for act in found] == [
        ("delete_workspace", "demo", "missing_scope", 403, who),
        ("get_workspace", "demo", "not_found", 404, who),
        ("", "/v1/workspaces/demo", "unauthenticated", 401, ""),
        ("", "/v1/health", "forbidden", 403, ""),
        ("tunnel", "demo/80", "missing_scope", 403, who),
    ]
    assert found[2].tenant_id == DEFAULT_TENANT, "who has no key is the operator's affair"


async def test_a_quota_and_a_rate_that_refuse_are_told() -> None:
    async with stage(rate_limit_per_s=0.001, rate_limit_burst=2) as staged:
        await staged.ask(KEY, "PATCH", "/v1/tenants/default/quota", json={"workspaces": 0})
        secret = await staged.key("operate")
        await staged.ask(secret, "POST", "/v1/workspaces", json={"name": "demo"})
        await staged.ask(secret, "GET", "/v1/health")
        await staged.ask(secret, "GET", "/v1/health")
        assert [(act.route, act.target, act.outcome, act.status) for act in await rows(staged)] == [
            ("set_quota", DEFAULT_TENANT, "ok", 200),
            ("create_workspace", "", "quota_exceeded", 429),
            ("", "/v1/health", "rate_limited", 429),
        ]


async def test_a_server_that_ends_in_the_middle_leaves_no_change_without_a_row(staged: Stage) -> None:
    gate = staged.plane.node.gate = asyncio.Event()
    call = asyncio.create_task(staged.ask(KEY, "POST", "/v1/workspaces", json={"name": "demo"}))
    await staged.plane.node.entered.wait()
    assert await rows(staged) == [], "it is not over"
    another = Audit(staged.plane.database, staged.plane.clock, "another", keep_days=1)
    await another.start()
    assert await rows(staged) == [], "and it is this server's"
    await another.close()
    successor = Audit(staged.plane.database, staged.plane.clock, "test", keep_days=1)
    await successor.start()  # as after SIGKILL
    (act,) = await rows(staged)
    assert (act.route, act.outcome, act.status, act.principal) == ("create_workspace", "interrupted", 0, "operator")
    await successor.close()
    gate.set()
    assert (await call).status_code == 201
    assert len(await rows(staged)) == 1, "what was found interrupted is not told twice"


async def test_what_cannot_be_noted_is_not_done(staged: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object, **__: object) -> None:
        raise Unavailable("The database does not answer.")

    monkeypatch.setattr(staged.audit, "begin", away)
    assert (await staged.ask(KEY, "POST", "/v1/workspaces", json={"name": "demo"})).status_code == 503
    assert (await staged.ask(KEY, "GET", "/v1/workspaces")).json() == {"workspaces": [], "next_cursor": None}


async def test_an_answer_is_not_lost_with_the_audit(staged: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        run = staged.plane.database.run

        async def all(self, *_: object, **__: object) -> None:
            raise Unavailable("The database does not answer.")

    monkeypatch.setattr(staged.audit, "_database", Failing())
    answer = await staged.ask(KEY, "POST", "/v1/workspaces", json={"name": "demo"})
    assert answer.status_code == 201, "it is done, and its note is still there"
    assert (await staged.ask(KEY, "GET", "/v1/workspaces/demo")).status_code == 200


async def test_names_that_a_database_would_refuse_are_put_on_record(staged: Stage) -> None:
    for name in ("%00", "%1b%5b31m", "%ff%fe", "a" * 5000):
        await staged.ask(KEY, "POST", f"/v1/workspaces/{name}/wake")
    targets = [act.target for act in await rows(staged)]
    assert targets[:3] == ["?", "?[31m", "\ufffd\ufffd"]
    assert targets[3] == "a" * 300


# -------------------------------------------------------------------------------------------------------------- floods


async def test_a_flood_of_wrong_keys_is_a_few_rows_that_say_how_many_there_were(staged: Stage) -> None:
    for _ in range(200):
        await staged.ask("pdk_wrong", "GET", "/v1/health")
    assert len(await rows(staged)) == EACH.burst
    await staged.audit.write_counted()
    found = await staged.audit.page(None, None, 0, 1000)
    assert len(found) == EACH.burst + 1
    assert sum(row.repeated for row in found) == 200
    assert (found[-1].act.outcome, found[-1].act.peer) == ("unauthenticated", "127.0.0.1")


async def test_a_flood_from_everywhere_is_bounded_too(staged: Stage) -> None:
    act = Act(DEFAULT_TENANT, "", "", "/v1/health", "req_1", "", "unauthenticated", 401)
    for number in range(2000):
        await staged.audit.refused(Act(*(act.tenant_id, "", "", "", "req_1", f"192.0.2.{number}", "unauthenticated", 401)))
    written = len(await rows(staged))
    assert written <= OVERALL.burst
    await staged.audit.write_counted()
    found = await staged.audit.page(None, None, 0, 1000)
    assert len(found) - written <= NAMES_MAX + 1
    assert sum(row.repeated for row in found) == 2000


# -------------------------------------------------------------------------------------------------------------- reading


async def test_a_tenant_sees_its_own_and_the_operator_all(staged: Stage) -> None:
    acme = await staged.tenant("acme")
    boss, worker = await staged.key("admin", tenant="acme"), await staged.key("operate", tenant="acme")
    for secret in (KEY, boss):
        await staged.ask(secret, "POST", "/v1/workspaces", json={"name": "demo"})
    url = str(staged.http.base_url).rstrip("/")
    async with AsyncClient(url=url, api_key=boss) as tenant, AsyncClient(url=url, api_key=KEY) as operator:
        assert {row.tenant_id for row in (await tenant.audit()).rows} == {acme}
        assert {row.tenant_id for row in (await tenant.audit(tenant=acme)).rows} == {acme}
        assert {row.tenant_id for row in (await operator.audit()).rows} == {acme, DEFAULT_TENANT}
        assert {row.tenant_id for row in (await operator.audit(tenant="acme")).rows} == {acme}
        with pytest.raises(MissingScope, match="Only the operator may name a tenant"):
            await tenant.audit(tenant="default")
    assert (await staged.ask(worker, "GET", "/v1/audit")).status_code == 403


async def test_pages_and_following_miss_nothing_while_others_write(staged: Stage) -> None:
    url = str(staged.http.base_url).rstrip("/")

    async def write(number: int) -> None:
        await staged.audit.append(Act(DEFAULT_TENANT, "operator", "route", f"t{number}", "req_1", "unix", "ok", 200))

    async with AsyncClient(url=url, api_key=KEY) as client:
        seen: list[str] = []
        after = 0
        writing = asyncio.gather(*(write(number) for number in range(60)))
        while len(seen) < 60:
            page = await client.audit(after=after, limit=7, wait_s=5)
            assert len(page.rows) <= 7
            seen += [row.target for row in page.rows]
            after = page.next
        await writing
        assert sorted(seen) == sorted(f"t{number}" for number in range(60))
        waiting = asyncio.create_task(client.audit(after=after, wait_s=20))
        await write(60)
        assert [row.target for row in (await waiting).rows] == ["t60"]
        nothing = await client.audit(after=after + 1000)
        assert (nothing.rows, nothing.next) == ([], after + 1000)


async def test_nonsense_is_refused(staged: Stage) -> None:
    for query in ({"after": -1}, {"limit": 0}, {"limit": 1001}, {"from": "2026-03-01T00:00:00"}, {"wait_s": 31}, {"after": "x"}):
        assert (await staged.ask(KEY, "GET", "/v1/audit", params=query)).status_code == 422, query
    assert (await staged.ask(KEY, "GET", "/v1/audit", params={"tenant": "nobody"})).status_code == 404


async def test_rows_stay_as_they_are_until_they_are_old(staged: Stage) -> None:
    await staged.ask(KEY, "POST", "/v1/workspaces", json={"name": "demo"})
    database = staged.plane.database
    for statement in ("update audit set outcome = 'ok'", "delete from audit", "truncate audit"):
        with pytest.raises(Exception, match="append-only"):
            await staged.plane.execute(statement)
    await staged.audit.tend()
    assert len(await rows(staged)) == 1
    database.shift_clock(timedelta(days=91).total_seconds())
    await staged.audit.tend()
    assert await rows(staged) == []


async def test_since_is_an_instant(staged: Stage) -> None:
    await staged.ask(KEY, "POST", "/v1/workspaces", json={"name": "demo"})
    (row,) = await staged.audit.page(None, None, 0, 10)
    assert len(await staged.audit.page(None, row.at, 0, 10)) == 1
    assert await staged.audit.page(None, row.at + timedelta(microseconds=1), 0, 10) == []
