"""Ports and tenants: over the real service, database and HTTP nobody reaches, or learns of, another tenant's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from perdure.api.ingress.names import id_label
from tests.fakes.workspaces import KEY
from tests.integration.api.stage import REQUEST_ID, Stage, stage

NO_WORKSPACE = "ws_" + "0" * 26


@pytest.fixture
async def staged() -> AsyncIterator[Stage]:
    async with stage(ingress_domain="ws.localhost") as made:
        yield made


async def made(staged: Stage, secret: str, name: str = "demo") -> str:
    answer = await staged.ask(secret, "POST", "/v1/workspaces", json={"name": name})
    return str(answer.json()["workspace"]["id"])


async def at(staged: Stage, label: str, secret: str | None = None, **more: str) -> httpx2.Response:
    """A request to a host below the domain, always under one id, which an error tells."""
    more = {"x-request-id": REQUEST_ID, **more}
    key = {"authorization": f"Bearer {secret}"} if secret is not None else {}
    return await staged.http.get("/", headers={"host": f"{label}.ws.localhost", **key, **more})


def code(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, str(answer.json()["error"]["code"])


def told(answer: httpx2.Response, *names: str) -> tuple[int, Any]:
    """Status, body and headers without what was asked for and what is new each time."""
    text = answer.text
    for name in names:
        text = text.replace(name, "NAME")
    kept = {name: value for name, value in answer.headers.items() if name not in {"date", "content-length"}}
    return answer.status_code, (text, kept)


async def test_a_port_needs_invoke(staged: Stage) -> None:
    await made(staged, KEY)
    for scope, expected in (
        ("read", (403, "missing_scope")),
        ("approve", (403, "missing_scope")),
        ("invoke", (502, "port_refused")),
    ):
        secret = await staged.key(scope)
        assert code(await staged.ask(secret, "GET", "/v1/workspaces/demo/ports/80/")) == expected
        assert code(await at(staged, "demo--80", secret)) == expected


async def test_another_tenants_ports_are_absent_byte_for_byte(staged: Stage) -> None:
    ours = await made(staged, KEY)
    assert (await staged.ask(KEY, "POST", "/v1/workspaces/demo/shares", json={"port": 80})).status_code == 201
    assert (await staged.ask(KEY, "POST", "/v1/workspaces/demo/sleep")).status_code == 200
    await staged.tenant("acme")
    stranger = await staged.key("admin", tenant="acme")
    for real, never in ((ours, NO_WORKSPACE), ("demo", "nemo")):
        answers = [await staged.ask(stranger, "GET", f"/v1/workspaces/{ref}/ports/80/") for ref in (real, never)]
        assert answers[0].status_code == 404 and told(answers[0], real) == told(answers[1], never)
    for real, never in ((id_label(ours), id_label(NO_WORKSPACE)), ("demo", "nemo")):
        for secret in (stranger, None):
            answers = [await at(staged, f"{label}--80", secret) for label in (real, never)]
            assert answers[0].status_code == (404 if secret else 401)
            hidden = (ours, NO_WORKSPACE, "demo", "nemo")
            assert told(answers[0], *hidden) == told(answers[1], *hidden)
    info = (await staged.ask(KEY, "GET", "/v1/workspaces/demo")).json()
    assert info["state"] == "hibernated", "nor was it woken"


async def test_names_in_hosts_are_the_default_tenants(staged: Stage) -> None:
    await staged.tenant("acme")
    secret = await staged.key("operate", tenant="acme")
    theirs = await made(staged, secret)
    assert code(await at(staged, "demo--80", secret)) == (404, "not_found")
    assert code(await at(staged, f"{id_label(theirs)}--80", secret)) == (502, "port_refused")
    link = (await staged.ask(secret, "POST", "/v1/workspaces/demo/shares", json={"port": 80})).json()
    assert link["url"].startswith(f"http://{id_label(theirs)}--80.ws.localhost:")
    await made(staged, KEY)
    token = {"perdure-share": link["token"]}
    assert code(await at(staged, "demo--80", **token)) == (403, "share_elsewhere"), "ours has that name in hosts"
    assert code(await at(staged, f"{id_label(theirs)}--80", **token)) == (502, "port_refused")
    by_path = await staged.http.get("/v1/workspaces/demo/ports/80/", headers=token)
    assert code(by_path) == (502, "port_refused"), "in a path a name is one of the link's own tenant"


async def test_a_visitor_wakes_it_in_its_own_name(staged: Stage) -> None:
    workspace_id = await made(staged, KEY)
    operator = await staged.key("operate", name="boss")
    link = (await staged.ask(operator, "POST", "/v1/workspaces/demo/shares", json={"port": 80})).json()
    await staged.ask(KEY, "POST", "/v1/workspaces/demo/sleep")
    assert code(await at(staged, "demo--80", **{"perdure-share": link["token"]})) == (502, "port_refused")
    entries = (await staged.ask(KEY, "GET", f"/v1/workspaces/{workspace_id}/log")).json()["entries"]
    by = {entry["kind"]: entry["body"].get("by") for entry in entries}
    assert by["waking"] == "share:80" and by["port-shared"].startswith("key:")


async def test_sharing_needs_operate(staged: Stage) -> None:
    await made(staged, KEY)
    secret = await staged.key("invoke")
    assert code(await staged.ask(secret, "POST", "/v1/workspaces/demo/shares", json={"port": 80})) == (403, "missing_scope")
    assert code(await staged.ask(secret, "DELETE", "/v1/workspaces/demo/shares/80")) == (403, "missing_scope")
    assert (await staged.ask(secret, "GET", "/v1/workspaces/demo/shares")).json() == {"shares": []}
