"""The application that a workspace reaches at 127.0.0.1:7071: itself, by an identity that the host binds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from perdure.api.guest import create_guest_app
from perdure.api.handles import Handles
from perdure.core.clock import SystemClock
from perdure.core.ids import DEFAULT_TENANT
from perdure.wire.node import Identity
from perdure.workspaces.model import CreateWorkspace, WorkspaceState
from tests.fakes.workspaces import FakeWorkspaces


class Bridge:
    """What ``gateway.selfservice`` does: puts the identity into the scope."""

    def __init__(self, workspaces: FakeWorkspaces) -> None:
        self.app = create_guest_app(workspaces, SystemClock(), Handles(b"k" * 32))
        self.identity: Identity | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope["state"] = {} if self.identity is None else {"identity": self.identity}
        await self.app(scope, receive, send)


@pytest.fixture
async def workspaces() -> FakeWorkspaces:
    made = FakeWorkspaces()
    for name in ("mine", "other"):
        await made.create(None, CreateWorkspace(name))  # type: ignore[arg-type]
    made.calls.clear()
    return made


@pytest.fixture
def bridge(workspaces: FakeWorkspaces) -> Bridge:
    made = Bridge(workspaces)
    made.identity = Identity(workspaces.find_row("mine").id, DEFAULT_TENANT, 1, "mine", "0" * 32)
    return made


@pytest.fixture
async def http(bridge: Bridge) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(bridge), base_url="http://127.0.0.1:7071") as client:
        yield client


async def test_sees_itself(http: httpx2.AsyncClient) -> None:
    answer = await http.get("/v1/workspace")
    assert (answer.status_code, answer.json()["name"]) == (200, "mine")


async def test_acts_on_itself_only(http: httpx2.AsyncClient, workspaces: FakeWorkspaces) -> None:
    assert (await http.post("/v1/workspace/keep-awake", json={"seconds": 60})).status_code == 200
    assert (await http.post("/v1/workspace/checkpoint", json={"name": "a"})).json()["name"] == "a"
    assert (await http.post("/v1/workspace/sleep")).status_code == 202
    for _ in range(100):
        await asyncio.sleep(0)  # it happens after the answer has left
    assert workspaces.find_row("mine").state is WorkspaceState.HIBERNATED
    assert workspaces.find_row("mine").keep_awake_until is not None
    assert workspaces.find_row("other").state is WorkspaceState.RUNNING
    assert workspaces.find_row("other").keep_awake_until is None


async def test_without_identity_or_with_an_old_one_nothing(
    http: httpx2.AsyncClient, bridge: Bridge, workspaces: FakeWorkspaces
) -> None:
    identity = bridge.identity
    bridge.identity = None
    assert (await http.get("/v1/workspace")).status_code == 401
    bridge.identity = identity
    await workspaces.sleep(None, "mine")  # type: ignore[arg-type]
    await workspaces.wake(None, "mine")  # type: ignore[arg-type]
    for method, path in (("GET", ""), ("POST", "/sleep"), ("POST", "/checkpoint"), ("POST", "/keep-awake")):
        answer = await http.request(method, f"/v1/workspace{path}", json={"seconds": 1} if path == "/keep-awake" else {})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "stale_generation")
    assert workspaces.find_row("mine").state is WorkspaceState.RUNNING


async def test_mistakes(http: httpx2.AsyncClient) -> None:
    for body in ({"seconds": -1}, {"seconds": 1e9}, {}, {"seconds": 1, "name": "x"}):
        answer = await http.post("/v1/workspace/keep-awake", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request"), body
    assert (await http.post("/v1/workspace/keep-awake", content=b"nonsense")).status_code == 422
    for path in ("/v1/workspaces", "/v1/workspace/delete", "/"):
        assert (await http.get(path)).status_code == 404
    assert (await http.delete("/v1/workspace")).status_code == 405


async def test_a_handle_holds_for_its_generation_of_its_workspace_only(
    http: httpx2.AsyncClient, bridge: Bridge, workspaces: FakeWorkspaces
) -> None:
    mine = (await http.get("/v1/workspace/handle")).json()["handle"]
    assert (await http.post("/v1/workspace/handle/check", json={"handle": mine})).status_code == 200

    identity = bridge.identity
    assert identity is not None
    bridge.identity = Identity(workspaces.find_row("other").id, DEFAULT_TENANT, 1, "other", "0" * 32)
    others = (await http.get("/v1/workspace/handle")).json()["handle"]
    stolen = await http.post("/v1/workspace/handle/check", json={"handle": mine})
    assert (stolen.status_code, stolen.json()["error"]["code"]) == (403, "forbidden")
    assert "GET /v1/workspace/handle" in stolen.json()["error"]["hint"]

    await workspaces.sleep(None, "mine")  # type: ignore[arg-type]
    await workspaces.wake(None, "mine")  # type: ignore[arg-type]
    bridge.identity = identity
    assert (await http.get("/v1/workspace/handle")).status_code == 409, "an old connection is given none"
    bridge.identity = Identity(identity.workspace_id, DEFAULT_TENANT, 2, "mine", "0" * 32)
    for old in (mine, others, "nonsense", ""):
        answer = await http.post("/v1/workspace/handle/check", json={"handle": old})
        assert answer.status_code in {403, 422}, old
    fresh = (await http.get("/v1/workspace/handle")).json()["handle"]
    assert (await http.post("/v1/workspace/handle/check", json={"handle": fresh})).status_code == 200
    assert (await http.post("/v1/workspace/handle/check", json={})).status_code == 422
