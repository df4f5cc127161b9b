"""``perdure key`` and ``perdure tenant`` against a real server with real keys, and a client that has one of them."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from perdure.core.config import Settings
from perdure.core.errors import MissingScope, Unauthenticated
from perdure.sdk import AsyncClient, Client
from perdure.sdk._core import Call
from tests.fakes.api_server import FakeServer
from tests.fakes.database import fresh_url
from tests.fakes.workspaces import KEY
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    home = Path(tempfile.mkdtemp(prefix="perdure-", dir="/tmp"))
    stack, loop = AsyncExitStack(), asyncio.new_event_loop()
    try:
        url = loop.run_until_complete(stack.enter_async_context(fresh_url()))
        with FakeServer(Settings(home=home, listen_port=0, url=None, api_key=None), database_url=url) as running:
            yield running
    finally:
        loop.run_until_complete(stack.aclose())
        loop.close()
        shutil.rmtree(home)


def test_a_key_from_its_making_to_its_end(perdure: Run, server: FakeServer) -> None:
    made = perdure("key create agent --scope invoke --scope approve --expires 30d")
    secret = made.out.strip()
    assert re.fullmatch(r"pdk_[\w-]{43}", secret)
    assert re.fullmatch(
        r"Key agent \(key_\w{26}\) counts until 20\d\d-\d\d-\d\d \d\d:\d\d UTC. Keep the secret: .*\nFor AWS clients: .*\n",
        made.err,
    )
    with Client(url=server.url, api_key=secret) as client:
        assert client.health().status == "ok"
        with pytest.raises(MissingScope, match="needs the scope 'operate'; the API key has 'approve, invoke'") as caught:
            client.request(Call("POST", "/v1/workspaces/demo/sleep"))
    assert caught.value.details == {"needs": "operate", "has": "approve, invoke"}
    listed = perdure("key ls").out.splitlines()
    assert listed[0].split() == ["NAME", "ID", "BEGINS", "SCOPES", "STATE", "MADE", "USED", "EXPIRES"]
    assert re.match(rf"agent  key_\w+  {secret[:12]}  invoke, approve  active  ", listed[1])
    assert secret not in perdure("key ls --all --json").out
    assert re.fullmatch(r"agent \(key_\w+\) is revoked\n", perdure("key revoke agent").out)
    assert perdure("keys ls").out == "No keys. Make one with 'perdure key create NAME --scope SCOPE'.\n"
    assert "revoked" in perdure("key ls --all").out
    with Client(url=server.url, api_key=secret) as client, pytest.raises(Unauthenticated, match="or no longer"):
        client.health()


def test_json(perdure: Run) -> None:
    made = perdure("key create agent --scope read --json").json
    assert set(made) == {"key", "secret", "aws_access_key_id", "aws_secret_access_key"}
    assert made["aws_access_key_id"] == made["key"]["id"] and len(made["aws_secret_access_key"]) == 40
    key = made["key"]
    assert (key["scopes"], key["state"], key["expires_at"], key["created_by"]) == (["read"], "active", None, "local")
    assert perdure("key ls --json").json == {"keys": [key]}
    revoked = perdure(f"key revoke {key['id']} --json").json["keys"]
    assert [(one["id"], one["state"], one["revoked_by"]) for one in revoked] == [(key["id"], "revoked", "local")]
    assert perdure("key ls --json").json == {"keys": []}
    tenant = perdure("tenant create acme --json").json
    assert [one["name"] for one in perdure("tenant ls --json").json["tenants"]] == ["default", "acme"]
    theirs = perdure(f"key create agent --scope admin --tenant {tenant['id']} --json").json["key"]
    assert theirs["tenant_id"] == tenant["id"]
    assert perdure("key ls --tenant acme --json").json == {"keys": [theirs]}


def test_tenants(perdure: Run, server: FakeServer) -> None:
    assert re.fullmatch(r"acme is tenant ten_\w{26}\n", perdure("tenant create acme").out)
    assert [line.split()[0] for line in perdure("tenants ls").out.splitlines()] == ["NAME", "default", "acme"]
    secret = perdure("key create boss --scope admin --tenant acme").out.strip()
    with Client(url=server.url, api_key=secret) as client:
        (boss,) = client.keys()
        made = client.create_key("agent", ["invoke"], expires_s=60)
        assert (boss.name, made.key.created_by) == ("boss", f"key:{boss.id}")
        assert client.revoke_key("agent").state == "revoked"
        with pytest.raises(MissingScope, match="only an admin of the default tenant"):
            client.tenants()
        with pytest.raises(MissingScope, match="Only the operator may name a tenant"):
            client.keys(tenant="default")
    with Client(url=server.url, api_key=KEY) as operator:
        assert [tenant.name for tenant in operator.tenants()] == ["default", "acme"]
        assert operator.create_tenant("other").created_by == "operator"


async def test_the_async_client_does_the_same(server: FakeServer) -> None:
    async with AsyncClient(url=server.url, api_key=KEY) as client:
        made = await client.create_key("agent", ["admin"])
        async with AsyncClient(url=server.url, api_key=made.secret) as other:
            assert [key.id for key in await other.keys()] == [made.key.id]
        assert (await client.revoke_key(made.key.id)).revoked_by == "operator"


MISTAKES = [
    ("key create agent", 2, "Missing option '--scope'"),
    ("key create agent --scope root", 2, "'root' is not one of"),
    ("key create Agent --scope read", 1, "'Agent' is not a key name."),
    ("key create agent --scope read --expires 30", 1, "'30' is not a duration."),
    ("key create agent --scope read --expires 0d", 1, "expires_s: "),
    ("key create agent --scope read --expires 9999w", 1, "expires_s: "),
    ("key create agent --scope read --tenant nobody", 1, "There is no tenant 'nobody'."),
    ("key revoke nobody", 1, "There is no key 'nobody'."),
    ("tenant create default", 1, "There is a tenant named 'default' already."),
    ("tenant create A", 1, "'A' is not a tenant name."),
]


def test_mistakes_are_one_sentence(perdure: Run, subtests: pytest.Subtests) -> None:
    for line, code, says in MISTAKES:
        with subtests.test(line):
            answer = perdure(line)
            assert (answer.code, answer.out) == (code, "")
            assert says in answer.err
            assert perdure(f"{line} --json").error["message"]
            assert perdure("key ls --all --json").json == {"keys": []}


def test_what_aws_clients_are_configured_with(perdure: Run, server: FakeServer) -> None:
    lines = perdure("key aws").out.splitlines()
    told = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    as_json = perdure("key aws --json").json
    assert told["AWS_ACCESS_KEY_ID"] == as_json["aws_access_key_id"] == "key_operator"
    assert told["AWS_SECRET_ACCESS_KEY"] == as_json["aws_secret_access_key"]
    assert told["AWS_ENDPOINT_URL_LAMBDA"] == told["AWS_ENDPOINT_URL_SFN"] == as_json["endpoint_url"] == server.url
    made = perdure("key create agent --scope read --json").json
    with Client(url=server.url, api_key=made["secret"]) as client:
        own = client.aws_access()
    assert (own.aws_access_key_id, own.aws_secret_access_key) == (made["aws_access_key_id"], made["aws_secret_access_key"])
