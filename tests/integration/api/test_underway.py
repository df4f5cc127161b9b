"""What is under way when its key or its link is taken back: over the real service, database and HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from perdure.access.model import OPERATOR
from perdure.access.service import AccessService
from perdure.api import underway
from perdure.core.errors import Unauthenticated
from perdure.sdk import AsyncClient
from tests.fakes.access import SIGNING_KEY
from tests.fakes.pipe import Peer
from tests.fakes.workspaces import KEY
from tests.integration.api.stage import Stage, stage

DEADLINE_S = 30


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comes before the server, which looks for the first time when it has been there for so long."""
    monkeypatch.setattr(underway, "LOOK_S", 0.05)


@pytest.fixture
async def staged() -> AsyncIterator[Stage]:
    async with stage(ingress_domain="ws.localhost") as made:
        await made.ask(KEY, "POST", "/v1/workspaces", json={"name": "demo"})
        yield made


async def revoke(staged: Stage, name: str) -> None:
    assert (await staged.ask(KEY, "POST", f"/v1/keys/{name}/revoke")).status_code == 200


@asynccontextmanager
async def streamed(staged: Stage, secret: str, method: str, path: str, **options: Any) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of an answer that lasts, once it has begun."""
    headers = {"authorization": f"Bearer {secret}"}
    async with asyncio.timeout(DEADLINE_S), staged.http.stream(method, path, headers=headers, **options) as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        await anext(lines)
        yield lines


async def last_of(lines: AsyncIterator[str]) -> Any:
    found = [line async for line in lines if line]
    return json.loads(found[-1].removeprefix("data: "))


def socket(staged: Stage, path: str, secret: str | None = None, **headers: str) -> Any:
    url = str(staged.http.base_url).replace("http", "ws", 1).rstrip("/") + path
    key = {} if secret is None else {"authorization": f"Bearer {secret}"}
    return connect(url, additional_headers={**key, **headers})


async def closed(websocket: ClientConnection) -> int | None:
    """The code with which the server closed it."""
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ConnectionClosed):
            while True:
                await websocket.recv()
    return websocket.close_code


def played(staged: Stage, port: int) -> asyncio.Queue[Peer]:
    """The program that listens on a port of ``demo`` is the test: its ends of connections, as they are made."""
    peers: asyncio.Queue[Peer] = asyncio.Queue()
    (machine,) = staged.plane.node.machines.values()

    def connected() -> Any:
        peer = Peer()
        peers.put_nowait(peer)
        return peer.stream

    machine.world.programs[port] = connected
    return peers


async def test_streams_of_a_revoked_key_end_and_say_why(staged: Stage) -> None:
    secret, other = await staged.key("invoke", name="leaked"), await staged.key("invoke", name="good")
    command = {"json": {"shell": "echo begun; hang", "exec_id": "exe_0000000001"}}
    async with (
        streamed(staged, secret, "POST", "/v1/workspaces/demo/execs", **command) as output,
        streamed(staged, secret, "GET", "/v1/events", params={"after": 0}) as feed,
        streamed(staged, other, "GET", "/v1/events", params={"after": 0}) as kept,
    ):
        await revoke(staged, "leaked")
        told = await last_of(output)
        assert (told["type"], told["error"]["code"], told["error"]["retryable"]) == ("error", "unauthenticated", False)
        assert (await last_of(feed))["error"]["code"] == "unauthenticated"
        await staged.ask(KEY, "POST", "/v1/workspaces/demo/checkpoint")
        assert "checkpoint" in [line async for line in _until(kept, "checkpoint")][-1], "another key's goes on"
    running = (await staged.ask(other, "GET", "/v1/workspaces/demo/execs")).json()["execs"]
    assert [one["exec_id"] for one in running if one["outcome"] is None] == ["exe_0000000001"], "the command goes on"


async def _until(lines: AsyncIterator[str], word: str) -> AsyncIterator[str]:
    async for line in lines:
        yield line
        if word in line:
            return


async def test_websockets_and_tunnels_of_a_revoked_key_are_closed(staged: Stage) -> None:
    secret = await staged.key("invoke", name="leaked")
    peers = played(staged, 80)
    await staged.ask(
        KEY, "POST", "/v1/workspaces/demo/execs", json={"shell": "hang", "exec_id": "exe_0000000001", "background": True}
    )
    async with (
        socket(staged, "/v1/workspaces/demo/execs/exe_0000000001/ws", secret) as command,
        socket(staged, "/v1/workspaces/demo/tcp/80", secret) as tunnel,
    ):
        peer = await peers.get()
        await revoke(staged, "leaked")
        assert [await closed(one) for one in (command, tunnel)] == [1008, 1008]
        async with asyncio.timeout(DEADLINE_S):
            await peer.left()


async def test_an_upload_of_a_revoked_key_ends_and_leaves_the_old_content(staged: Stage) -> None:
    secret = await staged.key("invoke", name="leaked")
    path = "/v1/workspaces/demo/files/content"
    await staged.ask(KEY, "PUT", path, params={"path": "/x"}, content=b"old")
    begun, more = asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"n" * 100_000
        begun.set()
        await more.wait()
        yield b"n" * 100_000

    headers = {"authorization": f"Bearer {secret}"}
    upload = asyncio.ensure_future(staged.http.put(path, params={"path": "/x"}, content=body(), headers=headers))
    async with asyncio.timeout(DEADLINE_S):
        await begun.wait()
        await revoke(staged, "leaked")
        more.set()
        answer = await upload
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthenticated")
    assert (await staged.ask(KEY, "GET", path, params={"path": "/x"})).content == b"old"


async def test_a_follower_is_told_and_does_not_try_again(staged: Stage) -> None:
    secret = await staged.key("read", name="leaked")
    async with AsyncClient(url=str(staged.http.base_url), api_key=secret) as client, asyncio.timeout(DEADLINE_S):
        found = client.events(after=0)
        await anext(found)
        await revoke(staged, "leaked")
        with pytest.raises(Unauthenticated, match="revoked, or has expired"):
            async for _ in found:
                pass


@pytest.mark.usefixtures("looks_often")
async def test_another_servers_revocation_and_a_keys_own_end_are_seen_soon(staged: Stage) -> None:
    """Nobody tells this server; it asks from time to time."""
    other = AccessService(staged.plane.database, staged.plane.clock, KEY, SIGNING_KEY)
    secret = await staged.key("read", name="leaked")
    async with streamed(staged, secret, "GET", "/v1/events", params={"after": 0}) as feed:
        await other.revoke(OPERATOR, "leaked")
        assert (await last_of(feed))["error"]["code"] == "unauthenticated"
    brief = (await staged.ask(KEY, "POST", "/v1/keys", json={"name": "brief", "scopes": ["read"], "expires_s": 600})).json()
    async with streamed(staged, brief["secret"], "GET", "/v1/events", params={"after": 0}) as feed:
        staged.plane.database.shift_clock(601)
        assert (await last_of(feed))["error"]["code"] == "unauthenticated"


# ----------------------------------------------------------------------------------------------------------------- visitors


async def shared(staged: Stage, **body: Any) -> Any:
    return (await staged.ask(KEY, "POST", "/v1/workspaces/demo/shares", json={"port": 80, **body})).json()


@asynccontextmanager
async def visiting(
    staged: Stage, peers: asyncio.Queue[Peer], headers: dict[str, str]
) -> AsyncIterator[tuple[httpx2.Response, Peer]]:
    """An answer of the program that has begun and goes on, and the program's end of it."""
    base = {"host": "demo--80.ws.localhost"}
    request = staged.http.build_request("GET", "/", headers={**base, **headers})
    sending = asyncio.ensure_future(staged.http.send(request, stream=True))
    async with asyncio.timeout(DEADLINE_S):
        peer = await peers.get()
        await peer.head()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n12345")
        answer = await sending
        yield answer, peer
        await answer.aclose()


async def cut(answer: httpx2.Response) -> bool:
    """Whether the rest of an answer never comes."""
    async with asyncio.timeout(DEADLINE_S):
        try:
            await answer.aread()
        except httpx2.RemoteProtocolError:
            return True
    return False


async def test_visitors_by_a_link_that_is_taken_back(staged: Stage) -> None:
    peers, first, second = played(staged, 80), await shared(staged), await shared(staged)
    async with (
        visiting(staged, peers, {"perdure-share": first["token"]}) as (gone, gone_peer),
        visiting(staged, peers, {"perdure-share": second["token"]}) as (kept, kept_peer),
    ):
        done = await staged.ask(KEY, "DELETE", f"/v1/workspaces/demo/links/{first['link_id']}")
        assert done.status_code == 200 and await cut(gone)
        await gone_peer.left()
        await kept_peer.send(b"67890")
        assert await kept.aread() == b"1234567890", "another link's visitor stays"


async def test_visitors_of_a_port_that_is_unshared(staged: Stage) -> None:
    peers, link = played(staged, 80), await shared(staged)
    async with visiting(staged, peers, {"perdure-share": link["token"]}) as (answer, peer):
        assert (await staged.ask(KEY, "DELETE", "/v1/workspaces/demo/shares/80")).status_code == 200
        assert await cut(answer)
        await peer.left()


async def test_visitors_of_a_port_that_was_public(staged: Stage) -> None:
    peers = played(staged, 80)
    await shared(staged, public=True)
    async with visiting(staged, peers, {}) as (answer, _):
        await staged.ask(KEY, "DELETE", "/v1/workspaces/demo/shares/80")
        assert await cut(answer)


@pytest.mark.usefixtures("looks_often")
async def test_a_visitors_time_is_over_for_what_is_under_way_too(staged: Stage) -> None:
    peers, link = played(staged, 80), await shared(staged, expires_s=60)
    async with visiting(staged, peers, {"perdure-share": link["token"]}) as (answer, _):
        staged.plane.database.shift_clock(62)
        assert await cut(answer)


async def test_a_keys_requests_to_ports_end_with_it(staged: Stage) -> None:
    secret, peers = await staged.key("invoke", name="leaked"), played(staged, 80)
    async with visiting(staged, peers, {"authorization": f"Bearer {secret}"}) as (answer, _):
        await revoke(staged, "leaked")
        assert await cut(answer)
