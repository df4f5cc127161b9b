"""What a key may do, and that nobody sees another tenant: every route of the document, over the real service and database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from perdure.access.model import OPERATOR
from perdure.api import policy
from perdure.core.errors import Forbidden
from perdure.core.ids import DEFAULT_TENANT
from perdure.core.scopes import KeyScope, granted
from tests.fakes.workspaces import KEY
from tests.integration.api.stage import ROUTES, Stage, stage

#: What a valid call needs besides its path, so that it is refused for the name in it and for nothing else.
BODIES: dict[str, dict[str, Any]] = {
    "start_exec": {"json": {"argv": ["true"]}},
    "signal_exec": {"json": {"signal": 15}},
    "resize_exec": {"json": {"rows": 24, "cols": 80}},
    "fork_workspace": {"json": {"count": 1}},
    "rewind_workspace": {"json": {"snapshot": "kept"}},
    "resize_workspace": {"json": {"disk_gib": 64}},
    "recover_workspace": {"json": {"how": "retry"}},
    "keep_awake": {"json": {"seconds": 60}},
    "wake_at": {"json": {"in_s": 3600}},
    "name_snapshot": {"json": {"name": "mine"}},
    "configure_workspace": {"json": {"keep_snapshots": 0}},
    "events": {"params": {"follow": "false"}},
    "create_webhook": {"json": {"url": "https://example.org/hook"}},
    "redeliver_webhook": {"json": {}},
    "read_file": {"params": {"path": "/x"}},
    "write_file": {"params": {"path": "/x"}, "content": b"stolen"},
    "stat_file": {"params": {"path": "/x"}},
    "list_dir": {"params": {"path": "/"}},
    "make_dir": {"params": {"path": "/new"}},
    "rename": {"params": {"source": "/x", "destination": "/y"}},
    "remove": {"params": {"path": "/x"}},
    "set_attributes": {"params": {"path": "/x", "mode": "600"}},
    "make_link": {"params": {"path": "/x", "target": "y"}},
    "hash_file": {"params": {"path": "/x"}},
    "append_upload": {"params": {"offset": 0}, "content": b"stolen"},
    "finish_upload": {"params": {"path": "/x", "length": 0}},
    "read_dir": {"params": {"path": "/"}},
    "write_dir": {"params": {"path": "/new"}, "content": bytes(1024)},
    "watch_dir": {"params": {"path": "/"}},
    "share_port": {"json": {"port": 80}},
    "set_program": {"json": {"argv": ["true"]}},
    "invoke": {"json": {}},
    "run_python": {"json": {"code": "1"}},
    "interrupt_python": {"json": {}},
    "restart_python": {"json": {}},
    "start_execution": {"json": {"function": "absent"}},
    "register_worker": {"json": {"functions": [{"name": "f", "digest": "v1"}]}},
    "take_work": {"json": {"wait_s": 0}},
    "beat_worker": {"json": {}},
    "answer_work": {"json": {"Status": "PENDING"}},
    "fail_work": {"json": {"failure": "raised"}},
}
UPLOAD = "upl_0123456789"
#: Images are the node's: all tenants see the same, and only the operator changes them.
SHARED = {"get_image", "remove_image"}


@pytest.fixture
async def staged() -> AsyncIterator[Stage]:
    async with stage() as made:
        yield made


def error_of(response: httpx2.Response) -> dict[str, Any]:
    found: dict[str, Any] = response.json()["error"]
    return found


def filled(path: str, **names: str) -> str:
    for name, value in names.items():
        path = path.replace("{" + name + "}", value)
    assert "{" not in path, "the test knows no value for a part of this path"
    return path


def absent(path: str) -> str:
    names = {
        "ref": "absent",
        "exec_id": "exe_1",
        "snapshot": "absent",
        "tenant": "absent",
        "callback_id": "absent",
        "link_id": "lnk_1",
    }
    return filled(path, **names, port="80", upload_id=UPLOAD, invocation="1")


def test_every_route_says_what_it_needs_and_nothing_else_does() -> None:
    assert set(policy.NEEDS) == {*ROUTES, "tunnel", "proxy_port", "invoke_socket", "exec_socket"}
    with pytest.raises(Forbidden, match="a defect in Perdure"):
        policy.check(OPERATOR, "forgotten")


async def test_no_route_answers_without_a_key(staged: Stage) -> None:
    secret = await staged.key("admin")

    async def refused(name: str, wrong: str) -> None:
        method, path = ROUTES[name]
        headers = {b"authorization": f"Bearer {wrong}".encode("latin-1")}
        response = await staged.http.request(method, absent(path), headers=headers, **BODIES.get(name, {}))
        assert (response.status_code, error_of(response)["code"]) == (401, "unauthenticated"), (name, wrong)
        assert response.headers["www-authenticate"] == "Bearer"

    for name in ROUTES:
        await refused(name, secret + "x")
    for wrong in ("Bearer", secret[:-1], secret.lower(), "pdk_", KEY.upper(), "\xff"):
        await refused("health", wrong)


async def test_a_key_opens_the_routes_of_its_scope_and_no_other(staged: Stage) -> None:
    secrets = {scope: await staged.key(scope) for scope in KeyScope}
    for name, (method, path) in ROUTES.items():
        needed = policy.NEEDS[name].scope
        for scope, secret in secrets.items():
            response = await staged.ask(secret, method, absent(path), **BODIES.get(name, {}))
            if needed in granted([scope]):
                assert response.status_code not in {401, 403}, (name, scope)
                continue
            error = error_of(response)
            assert (response.status_code, error["code"]) == (403, "missing_scope"), (name, scope)
            assert error["details"] == {"needs": needed, "has": scope}
            assert f"perdure key create NAME --scope {needed}" in error["hint"]


async def test_scopes_count_together(staged: Stage) -> None:
    secret = await staged.key("approve", "invoke")
    assert (await staged.ask(secret, "POST", "/v1/workspaces/absent/wake")).status_code == 404
    refused = await staged.ask(secret, "POST", "/v1/workspaces/absent/sleep")
    assert error_of(refused)["details"] == {"needs": "operate", "has": "approve, invoke"}


async def test_a_missing_scope_is_told_before_a_mistake_in_the_body(staged: Stage) -> None:
    secret = await staged.key("read")
    response = await staged.ask(secret, "POST", "/v1/workspaces", json={"colour": "red"})
    assert error_of(response)["code"] == "missing_scope"


async def test_an_admin_of_another_tenant_is_not_the_operator(staged: Stage) -> None:
    await staged.tenant("acme")
    admin = await staged.key("admin", tenant="acme")
    closed = {name for name, need in policy.NEEDS.items() if need.of_server}
    assert closed >= {"build_image", "remove_image", "make_backup", "create_tenant"}
    for name in sorted(closed):
        method, path = ROUTES[name]
        for ref in ("base", "absent"):
            response = await staged.ask(admin, method, filled(path, ref=ref, tenant=ref))
            assert response.status_code == 403, name
            assert error_of(response)["details"] == {"needs": "admin", "tenant": "ten_default"}


@pytest.mark.parametrize("path", ["tcp/80", "execs/exe_1/ws"])
async def test_tunnels_and_commands_ask_for_the_scope_too(staged: Stage, path: str) -> None:
    url = str(staged.http.base_url).replace("http", "ws").rstrip("/") + f"/v1/workspaces/absent/{path}"
    for secret, status in ((await staged.key("read"), 403), (await staged.key("invoke"), 404), ("pdk_x", 401)):
        with pytest.raises(InvalidStatus) as caught:
            await connect(url, additional_headers={"authorization": f"Bearer {secret}"})
        assert caught.value.response.status_code == status


# ------------------------------------------------------------------------------------------------------------------ tenants


async def prepared(staged: Stage) -> tuple[str, str]:
    """The ids of a workspace ``demo`` with a file, which sleeps, and of a snapshot of it named ``kept``."""
    made = (await staged.ask(KEY, "POST", "/v1/workspaces", json={"name": "demo"})).json()
    await staged.ask(KEY, "PUT", "/v1/workspaces/demo/files/content", params={"path": "/x"}, content=b"ours")
    snapshot = (await staged.ask(KEY, "POST", "/v1/workspaces/demo/checkpoint", json={"name": "kept"})).json()
    assert (await staged.ask(KEY, "POST", "/v1/workspaces/demo/sleep")).status_code == 200
    return made["workspace"]["id"], snapshot["id"]


async def told(staged: Stage, secret: str, name: str, ref: str, snapshot: str) -> tuple[int, bytes]:
    """Status and body, the names that were asked for taken out of it."""
    method, path = ROUTES[name]
    path = filled(path, ref=ref, exec_id="exe_1", snapshot=snapshot, port="80", upload_id=UPLOAD, invocation="1", link_id="lnk_1")
    response = await staged.ask(secret, method, path, **BODIES.get(name, {}))
    return response.status_code, response.content.replace(ref.encode(), b"REF").replace(snapshot.encode(), b"SNAPSHOT")


async def all_there_is(staged: Stage) -> list[bytes]:
    """What the owner sees; looking changes nothing of it."""
    paths = ("/v1/workspaces", "/v1/workspaces/demo/log", "/v1/workspaces/demo/snapshots", "/v1/keys")
    return [(await staged.ask(KEY, "GET", path)).content for path in paths]


NO_WORKSPACE, NO_SNAPSHOT, NO_KEY = "ws_" + "0" * 26, "snp_" + "0" * 26, "key_" + "0" * 26


async def test_another_tenant_gets_the_answer_for_absent_byte_for_byte(staged: Stage) -> None:
    workspace_id, snapshot_id = await prepared(staged)
    await staged.key("admin", name="demo")  # as the workspace, for the routes of keys
    (key,) = await staged.access.keys(OPERATOR)
    await staged.tenant("acme")
    stranger = await staged.key("admin", tenant="acme")
    before = await all_there_is(staged)
    walked = [name for name, (_, path) in ROUTES.items() if "{ref}" in path and name not in SHARED]
    assert len(walked) >= 35
    for name in walked:
        for real, never in ((workspace_id, NO_WORKSPACE), ("demo", "nemo"), (key.id, NO_KEY), (DEFAULT_TENANT, "ten_nobody")):
            found = await told(staged, stranger, name, real, snapshot_id)
            assert found[0] == 404, (name, found)
            assert found == await told(staged, stranger, name, never, NO_SNAPSHOT), name
    assert await all_there_is(staged) == before, "nor was it woken"
    for name in ("get_workspace", "read_file", "workspace_log", "list_snapshots"):
        assert (await told(staged, KEY, name, "demo", snapshot_id))[0] == 200, "it is there for its owner"


async def test_another_tenants_names_in_a_body_or_a_query_are_absent_too(staged: Stage) -> None:
    workspace_id, _ = await prepared(staged)
    acme = await staged.tenant("acme")
    stranger = await staged.key("admin", tenant="acme")

    async def answer(method: str, path: str, **options: Any) -> tuple[int, str]:
        response = await staged.ask(stranger, method, path, **options)
        return response.status_code, response.text

    verify = [await answer("POST", "/v1/snapshots/verify", json={"workspace": ref}) for ref in (workspace_id, NO_WORKSPACE)]
    assert verify[0] == (404, verify[1][1].replace(NO_WORKSPACE, workspace_id))
    everybody = await staged.ask(stranger, "POST", "/v1/snapshots/verify", json={})
    assert '"count":0' in everybody.text, "verifying all means all of one's own"
    for tenant in ("default", "ten_default", "nobody"):
        for method, path in (("GET", "/v1/keys"), ("POST", "/v1/keys/demo/revoke")):
            assert (await answer(method, path, params={"tenant": tenant}))[0] == 403
        body = {"name": "mine", "scopes": ["admin"], "tenant": tenant}
        assert (await answer("POST", "/v1/keys", json=body))[0] == 403
    assert (await answer("GET", "/v1/keys", params={"tenant": acme}))[0] == 200, "its own it may name"
    assert (await staged.ask(stranger, "GET", "/v1/workspaces")).json()["workspaces"] == []


async def test_a_snapshot_of_another_tenant_is_no_snapshot_of_ones_own_workspace(staged: Stage) -> None:
    _, snapshot_id = await prepared(staged)
    await staged.tenant("acme")
    stranger = await staged.key("operate", tenant="acme")
    assert (await staged.ask(stranger, "POST", "/v1/workspaces", json={"name": "mine"})).status_code == 201
    for name in ("name_snapshot", "push_snapshot", "remove_snapshot"):
        found = await told(staged, stranger, name, "mine", snapshot_id)
        assert found[0] == 404, (name, found)
        assert found == await told(staged, stranger, name, "mine", NO_SNAPSHOT)
    for path, body in (("rewind", {}), ("fork", {"count": 1})):
        answers = [
            await staged.ask(stranger, "POST", f"/v1/workspaces/mine/{path}", json={**body, "snapshot": one})
            for one in (snapshot_id, NO_SNAPSHOT)
        ]
        assert [one.status_code for one in answers] == [404, 404]
        assert answers[0].text == answers[1].text.replace(NO_SNAPSHOT, snapshot_id)


async def test_two_tenants_may_use_one_name(staged: Stage) -> None:
    await staged.tenant("acme")
    owners = {"ours": KEY, "theirs": await staged.key("operate", tenant="acme")}
    for content, secret in owners.items():
        assert (await staged.ask(secret, "POST", "/v1/workspaces", json={"name": "demo"})).status_code == 201
        await staged.ask(secret, "PUT", "/v1/workspaces/demo/files/content", params={"path": "/x"}, content=content.encode())
    for content, secret in owners.items():
        read = await staged.ask(secret, "GET", "/v1/workspaces/demo/files/content", params={"path": "/x"})
        assert read.text == content
        assert len((await staged.ask(secret, "GET", "/v1/workspaces")).json()["workspaces"]) == 1
    assert (await staged.ask(owners["theirs"], "DELETE", "/v1/workspaces/demo")).status_code == 200
    assert (await staged.ask(KEY, "GET", "/v1/workspaces/demo")).status_code == 200


async def test_the_thread_says_which_key_did_it(staged: Stage) -> None:
    acme = await staged.tenant("acme")
    secret = await staged.key("operate", tenant="acme")
    (key,) = await staged.access.keys(OPERATOR, "acme")
    workspace = (await staged.ask(secret, "POST", "/v1/workspaces", json={"name": "demo"})).json()["workspace"]
    calls: tuple[tuple[str, dict[str, Any]], ...] = (
        ("checkpoint", {"name": "kept"}),
        ("keep-awake", {"seconds": 5}),
        ("resize", {"disk_gib": 64}),
        ("sleep", {}),
        ("wake", {}),
        ("sleep", {}),
        ("recover", {"how": "disk-boot"}),
        ("rewind", {"snapshot": "kept"}),
    )
    for path, body in calls:
        assert (await staged.ask(secret, "POST", f"/v1/workspaces/demo/{path}", json=body)).status_code == 200, path
    assert (await staged.ask(secret, "DELETE", "/v1/workspaces/demo")).status_code == 200
    entries = (await staged.ask(secret, "GET", f"/v1/workspaces/{workspace['id']}/log")).json()["entries"]
    who = f"key:{key.id}"
    named = [entry["kind"] for entry in entries if entry["body"].get("by") == who or who in entry["body"].get("cause", "")]
    asked = ["creating", "checkpoint", "keep-awake", "resized", "hibernating", "waking", "hibernating", "waking", "hibernating"]
    assert named == [*asked, "waking", "deleted"]
    rows = await staged.plane.database.all("journal.links", workspace_id=workspace["id"], after_seq=0, limit=100)
    assert {row["tenant_id"] for row in rows} == {acme}


async def test_the_operator_may_name_a_tenant_that_is_to_be_shredded(staged: Stage) -> None:
    acme = await staged.tenant("acme")
    for ref in (acme, "acme"):
        answer = await staged.ask(KEY, "POST", f"/v1/tenants/{ref}/shred", json={})
        assert (answer.status_code, f"so tenant {acme} has nothing" in error_of(answer)["message"]) == (409, True)
    assert (await staged.ask(KEY, "POST", "/v1/tenants/nobody/shred", json={})).status_code == 404
