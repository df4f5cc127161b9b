"""The guest's API over a real byte stream: identity from the host, limits, errors as plain JSON, half-close, keep-alive."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from perdure.core.ids import TenantId, WorkspaceId
from perdure.gateway.selfservice import HttpLimits, Message, Receive, SelfService, Send
from perdure.gateway.streams import SocketStream
from perdure.wire.node import Identity

DEADLINE_S = 30.0
WHO = Identity(WorkspaceId("ws_a"), TenantId("ten_default"), 3, "a", "0" * 32)
GET = b"GET /v1/workspace?x=1 HTTP/1.1\r\nHost: 127.0.0.1:7071\r\n\r\n"


async def answer(send: Send, body: bytes, status: int = 200) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Any, receive: Receive, send: Send) -> None:
    """Says who asks and what arrived."""
    if scope["path"] == "/boom":
        raise RuntimeError("secret detail")
    if scope["path"] == "/silent":
        return
    if scope["path"] == "/hang":
        await asyncio.Event().wait()
    if scope["path"] == "/stream":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"one", b"two"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return
    size = 0
    if scope["path"] != "/unread":
        more = True
        while more:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message["body"])
            more = message["more_body"]
    seen = {key: scope[key] for key in ("method", "path")} | {
        "query": scope["query_string"].decode(),
        "workspace": scope["state"]["identity"].workspace_id,
        "generation": scope["state"]["identity"].generation,
        "size": size,
    }
    await answer(send, json.dumps(seen).encode())


class Client:
    """A user program's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, request: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
        self.writer.write(request)
        return await self.response()

    async def response(self) -> tuple[int, dict[bytes, bytes], bytes]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head.strip().split(b"\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        body = await self.reader.readexactly(int(headers.get(b"content-length", b"0")))
        return int(first.split()[1]), headers, body

    async def ended(self) -> bool:
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:
            return True


@asynccontextmanager
async def connected(service: SelfService, who: Identity = WHO) -> AsyncIterator[Client]:
    ours, theirs = socket.socketpair()
    task = asyncio.create_task(service.serve(who, SocketStream(*await asyncio.open_connection(sock=theirs))))
    client = Client(*await asyncio.open_connection(sock=ours))
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield client
    finally:
        client.writer.close()
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), DEADLINE_S)
        assert not task.cancelled() or service is None


def make(limits: HttpLimits | None = None, reports: list[BaseException] | None = None) -> SelfService:
    service = SelfService(echo, limits=limits, report=lambda _what, error: (reports if reports is not None else []).append(error))
    service.register(WHO)
    return service


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"code", "message", "hint", "retryable", "ambiguous", "gone"}
    assert error["message"].endswith(".")
    return error


async def test_the_host_says_who_asks_whatever_the_request_says() -> None:
    async with connected(make()) as client:
        status, _, body = await client.ask(
            b"POST /v1/workspace/keep-awake?s=5 HTTP/1.1\r\nHost: localhost:7071\r\nX-Workspace: ws_other\r\n"
            b"Authorization: Bearer stolen\r\nContent-Length: 4\r\n\r\nbody"
        )
    assert status == 200
    assert json.loads(body) == {
        "method": "POST", "path": "/v1/workspace/keep-awake", "query": "s=5", "workspace": "ws_a", "generation": 3, "size": 4,
    }  # fmt: skip


async def test_one_connection_serves_many_requests_pipelined_or_not() -> None:
    async with connected(make()) as client:
        for _ in range(3):
            assert (await client.ask(GET))[0] == 200
        client.writer.write(GET * 3)
        for _ in range(3):
            assert (await client.response())[0] == 200


async def test_a_request_cut_at_every_byte_arrives_whole() -> None:
    request = b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    async with connected(make()) as client:
        for cut in range(1, len(request)):
            client.writer.write(request[:cut])
            await client.writer.drain()
            _, _, body = await client.ask(request[cut:])
            assert json.loads(body)["size"] == 5


async def test_a_client_that_closed_its_writing_side_still_gets_its_answer() -> None:
    async with connected(make()) as client:
        client.writer.write(GET)
        client.writer.write_eof()
        assert (await client.response())[0] == 200
        assert await client.ended()


async def test_a_streamed_answer_is_chunked() -> None:
    async with connected(make()) as client:
        client.writer.write(b"GET /stream HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        text = await client.reader.read()
    assert b"transfer-encoding: chunked" in text.lower()
    assert b"3\r\none\r\n3\r\ntwo\r\n0\r\n" in text


async def test_head_has_no_body_and_the_connection_goes_on() -> None:
    async with connected(make()) as client:
        client.writer.write(b"HEAD /x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert (await client.ask(GET))[0] == 200


async def test_continue_is_sent_when_the_client_waits_for_it() -> None:
    async with connected(make()) as client:
        client.writer.write(b"POST /x HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert (await client.response())[0] == 100
        status, _, body = await client.ask(b"ok")
        assert (status, json.loads(body)["size"]) == (200, 2)


async def test_an_unread_body_does_not_become_the_next_request() -> None:
    async with connected(make()) as client:
        smuggled = GET
        head = b"POST /unread HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(smuggled)
        assert json.loads((await client.ask(head + smuggled))[2])["path"] == "/unread"
        assert json.loads((await client.ask(GET))[2])["path"] == "/v1/workspace"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000,
    ],
)
async def test_what_is_not_a_request_gets_a_plain_400_and_the_end(request_bytes: bytes) -> None:
    async with connected(make()) as client:
        status, headers, body = await client.ask(request_bytes)
        assert (status, headers[b"connection"]) == (400, b"close")
        assert error_of(body)["code"] == "bad_http"
        assert await client.ended()


@pytest.mark.parametrize(
    "headers",
    [b"Host: evil.example\r\n", b"Host: evil.example:7071\r\n", b"Host: localhost\r\nOrigin: http://evil.example:7071\r\n"],
)
async def test_a_web_page_with_a_rebound_name_is_refused(headers: bytes) -> None:
    async with connected(make()) as client:
        status, _, body = await client.ask(b"POST /v1/workspace/sleep HTTP/1.1\r\n" + headers + b"\r\n")
        assert (status, error_of(body)["code"]) == (403, "forbidden")


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_gets_413(declared: bool) -> None:
    async with connected(make(HttpLimits(body_bytes=1000))) as client:
        if declared:
            client.writer.write(b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1001\r\n\r\n")
        else:
            client.writer.write(b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            client.writer.write(b"1f4\r\n" + b"x" * 500 + b"\r\n" + b"1f5\r\n" + b"x" * 501 + b"\r\n")
        status, _, body = await client.response()
        assert (status, error_of(body)["code"]) == (413, "body_too_large")


async def test_exactly_the_limit_is_served() -> None:
    async with connected(make(HttpLimits(body_bytes=1000))) as client:
        status, _, body = await client.ask(b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000)
        assert (status, json.loads(body)["size"]) == (200, 1000)


async def test_an_app_that_raises_gives_500_without_its_secrets_and_is_reported() -> None:
    reports: list[BaseException] = []
    async with connected(make(reports=reports)) as client:
        status, _, body = await client.ask(b"GET /boom HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status == 500
    assert error_of(body)["code"] == "internal"
    assert b"secret" not in body
    assert [str(error) for error in reports] == ["secret detail"]


async def test_an_app_that_says_nothing_gives_500() -> None:
    async with connected(make()) as client:
        assert (await client.ask(b"GET /silent HTTP/1.1\r\nHost: localhost\r\n\r\n"))[0] == 500


async def test_an_app_that_hangs_ends_at_the_deadline_and_says_so() -> None:
    async with connected(make(HttpLimits(answer_deadline_s=0.1))) as client:
        status, _, body = await client.ask(b"GET /hang HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status == 504
        assert error_of(body)["ambiguous"] is True


async def test_a_request_that_drips_ends_at_its_deadline_and_an_idle_connection_without_a_word() -> None:
    async with connected(make(HttpLimits(request_deadline_s=0.1))) as client:
        assert (await client.ask(b"GET / HT"))[0] == 504
    async with connected(make(HttpLimits(idle_deadline_s=0.1))) as client:
        assert (await client.ask(GET))[0] == 200
        assert await client.ended()


async def test_too_many_connections_get_503() -> None:
    service = make(HttpLimits(connections_per_workspace=1))
    async with connected(service) as first:
        assert (await first.ask(GET))[0] == 200
        async with connected(service) as second:
            status, _, body = await second.ask(GET)
            assert (status, error_of(body)["retryable"]) == (503, True)


async def test_a_dropped_generation_ends_and_a_stale_one_is_refused() -> None:
    service = make()
    ours, theirs = socket.socketpair()
    task = asyncio.create_task(service.serve(WHO, SocketStream(*await asyncio.open_connection(sock=theirs))))
    client = Client(*await asyncio.open_connection(sock=ours))
    assert (await client.ask(GET))[0] == 200
    assert await service.drop(WHO.workspace_id, WHO.generation) == 1
    assert await asyncio.wait_for(client.ended(), DEADLINE_S)
    assert task.cancelled()
    client.writer.close()
    async with connected(service) as late:
        assert (await late.ask(GET))[0] == 503
