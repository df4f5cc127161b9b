"""The end of a tenant over HTTP, by SDK and command line."""

from __future__ import annotations

import json

import httpx2
import pytest

from perdure.core.errors import Conflict, NotFound
from perdure.core.ids import DEFAULT_TENANT
from perdure.sdk import AsyncClient, Client, Workspace
from tests.fakes.api_server import FakeServer
from tests.fakes.workspaces import KEY
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]


def test_by_the_sdk(client: Client, demo: Workspace) -> None:
    with pytest.raises(NotFound, match="There is no tenant 'ten_none'"):
        client.shred_tenant("ten_none")
    with pytest.raises(Conflict, match="has 1 workspaces"):
        client.shred_tenant(DEFAULT_TENANT)
    done = client.shred_tenant(DEFAULT_TENANT, delete_workspaces=True)
    assert (done.tenant, done.deleted, done.left) == (DEFAULT_TENANT, ["demo"], [])
    assert client.shred_tenant(DEFAULT_TENANT).deleted == []


async def test_by_the_async_sdk(server: FakeServer) -> None:
    async with AsyncClient(settings=server.settings) as client:
        assert (await client.shred_tenant(DEFAULT_TENANT)).tenant == DEFAULT_TENANT


def test_by_the_command_line(demo: Workspace, perdure: Run) -> None:
    unasked = perdure(f"tenant shred {DEFAULT_TENANT}")
    assert unasked.code == 1 and "needs a confirmation" in unasked.err and "--yes" in unasked.err
    refused = perdure(f"tenant shred {DEFAULT_TENANT} --yes")
    assert refused.code == 1 and "has 1 workspaces that are not deleted: demo" in refused.err
    done = perdure(f"tenant shred {DEFAULT_TENANT} --delete-workspaces --yes")
    assert done.code == 0
    assert done.out == (
        f"Tenant {DEFAULT_TENANT} is shredded: what it had in the object store can never be read again\nDeleted with it: demo\n"
    )
    assert "Delete backups that were made" in done.err
    again = perdure(f"tenant shred {DEFAULT_TENANT} --yes --json")
    assert json.loads(again.out)["tenant"] == DEFAULT_TENANT
    nobody = perdure("tenant shred ten_none --yes --json")
    assert nobody.code == 1 and json.loads(nobody.err)["error"]["code"] == "not_found"


def test_only_with_the_key_and_only_what_is_known(server: FakeServer) -> None:
    path = f"/v1/tenants/{DEFAULT_TENANT}/shred"
    with httpx2.Client(base_url=server.url) as http:
        assert http.post(path, json={}).status_code == 401
        answer = http.post(path, json={"force": True}, headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 422
