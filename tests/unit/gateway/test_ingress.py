"""Connections to a program are used again only where that is safe, and in one generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from perdure.core.errors import Busy, NotFound, PerdureError, PortClosed, PortRefused, PortSilent
from perdure.core.ids import WorkspaceId
from perdure.gateway.ingress import IDLE_MAX, GuestPorts
from perdure.wire.node import ByteStream, Guest, PortLimits, PortPlace, PortRequest
from tests.fakes.pipe import Peer

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
GET = PortRequest("GET", b"/")


class Workspace:
    """A guest whose connections a test plays, in the order in which they were opened."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self.refusal: PerdureError | None = None
        self._opened = asyncio.Event()

    async def open_tcp(self, port: int) -> ByteStream:
        if self.refusal is not None:
            raise self.refusal
        self.peers.append(Peer())
        self._opened.set()
        return self.peers[-1].stream

    async def opened(self, count: int) -> None:
        """Until so many connections were opened."""
        async with asyncio.timeout(20):
            while len(self.peers) < count:
                self._opened.clear()
                await self._opened.wait()

    def place(self, generation: int = 1, port: int = 8080) -> PortPlace:
        return PortPlace(WorkspaceId("ws_a"), generation, cast(Guest, self), port)


@asynccontextmanager
async def ports(**options: Any) -> AsyncIterator[GuestPorts]:
    made = GuestPorts(**options)
    try:
        yield made
    finally:
        await made.close()


async def whole(pool: GuestPorts, place: PortPlace, request: PortRequest = GET, limits: PortLimits | None = None) -> bytes:
    async with asyncio.timeout(20):
        answer = await pool.request(place, request, limits)
        return b"".join([part async for part in answer.body()])


async def exchange(pool: GuestPorts, guest: Workspace, at: int, sent: bytes = OK, **place: int) -> bytes:
    """One GET that connection number ``at`` answers."""
    asking = asyncio.create_task(whole(pool, guest.place(**place)))
    await guest.opened(at + 1)
    await guest.peers[at].head()
    await guest.peers[at].send(sent)
    return await asking


async def test_a_connection_that_was_read_to_its_end_is_used_again() -> None:
    guest = Workspace()
    async with ports(idle_s=60) as pool:
        for _ in range(3):
            assert await exchange(pool, guest, 0) == b"ok"
        assert len(guest.peers) == 1 and pool.kept(WorkspaceId("ws_a")) == 1
    assert guest.peers[0].stream.closed.is_set()


async def test_another_generation_never_sees_it() -> None:
    """A host that reuses a pooled connection to a rewound guest hangs for minutes (peers: row 10)."""
    guest = Workspace()
    async with ports(idle_s=60) as pool:
        await exchange(pool, guest, 0, generation=1)
        await exchange(pool, guest, 1, generation=2)
        await guest.peers[0].left()
        assert pool.kept(WorkspaceId("ws_a")) == 1
        await exchange(pool, guest, 2, generation=1)  # a call that was late: it gets none of the newer ones
        assert len(guest.peers) == 3


async def test_a_generation_that_ends_takes_its_connections_along() -> None:
    """Pools are dropped before a pause, so that none is torn in memory (peers: rows 10 and 11)."""
    guest = Workspace()
    async with ports(idle_s=60) as pool:
        await exchange(pool, guest, 0, generation=1)
        await pool.drop(WorkspaceId("ws_a"), 2)
        assert pool.kept(WorkspaceId("ws_a")) == 1
        await pool.drop(WorkspaceId("ws_a"), 1)
        assert pool.kept(WorkspaceId("ws_a")) == 0 and guest.peers[0].stream.closed.is_set()


async def test_another_port_is_another_connection() -> None:
    guest = Workspace()
    async with ports(idle_s=60) as pool:
        await exchange(pool, guest, 0, port=80)
        await exchange(pool, guest, 1, port=81)
        assert pool.kept(WorkspaceId("ws_a")) == 2


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        OK + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil",
    ],
    ids=["close", "http-1.0", "more-than-was-asked"],
)
async def test_what_must_not_be_used_again(sent: bytes) -> None:
    guest = Workspace()
    async with ports(idle_s=60) as pool:
        assert await exchange(pool, guest, 0, sent) == b"ok"
        await guest.peers[0].left()
        assert await exchange(pool, guest, 1) == b"ok"


async def test_what_comes_unasked_ends_a_kept_connection() -> None:
    guest = Workspace()
    async with ports(idle_s=60) as pool:
        await exchange(pool, guest, 0)
        await guest.peers[0].send(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")
        assert await exchange(pool, guest, 1) == b"ok"
        await guest.peers[0].left()


async def test_a_kept_connection_goes_when_the_program_closes_it_or_its_time_is_over() -> None:
    guest = Workspace()
    async with ports(idle_s=60) as pool:
        await exchange(pool, guest, 0)
        guest.peers[0].end()
        await guest.peers[0].left()
        assert pool.kept(WorkspaceId("ws_a")) == 0
    async with ports(idle_s=0.01) as pool:
        await exchange(pool, guest, 1)
        await guest.peers[1].left()
        assert pool.kept(WorkspaceId("ws_a")) == 0


async def test_a_get_that_meets_a_closing_connection_is_asked_again() -> None:
    guest = Workspace()
    async with ports(idle_s=60) as pool:
        await exchange(pool, guest, 0)
        asking = asyncio.create_task(whole(pool, guest.place()))
        await guest.peers[0].head()
        guest.peers[0].end()
        await guest.opened(2)
        await guest.peers[1].send(OK)
        assert await asking == b"ok"


async def test_one_that_had_begun_to_answer_is_not() -> None:
    guest = Workspace()
    async with ports(idle_s=60) as pool:
        await exchange(pool, guest, 0)
        with pytest.raises(PortClosed):
            asking = asyncio.create_task(whole(pool, guest.place()))
            await guest.peers[0].head()
            await guest.peers[0].send(b"HTTP/1.1 2")
            guest.peers[0].end()
            await asking
        assert len(guest.peers) == 1


async def test_what_may_not_be_done_twice_gets_a_connection_of_its_own() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"x"

    guest = Workspace()
    async with ports(idle_s=60) as pool:
        for at, request in enumerate((PortRequest("POST", b"/"), PortRequest("GET", b"/", body=body(), length=1))):
            await exchange(pool, guest, 2 * at)
            asking = asyncio.create_task(whole(pool, guest.place(), request))
            await guest.opened(2 * at + 2)
            guest.peers[-1].end()
            with pytest.raises(PortClosed):
                await asking
            guest.peers[2 * at].end()
            await guest.peers[2 * at].left()


async def test_two_at_once_have_two_connections_and_few_are_kept() -> None:
    guest = Workspace()
    count = IDLE_MAX + 3
    async with ports(idle_s=60) as pool:
        asking = [asyncio.create_task(whole(pool, guest.place())) for _ in range(count)]
        await guest.opened(count)
        for peer in guest.peers:
            await peer.send(OK)
        assert await asyncio.gather(*asking) == [b"ok"] * count
        assert pool.kept(WorkspaceId("ws_a")) == IDLE_MAX


async def test_limits_belong_to_a_call() -> None:
    guest = Workspace()
    async with ports(idle_s=60) as pool:
        await exchange(pool, guest, 0)
        with pytest.raises(PortSilent):
            await whole(pool, guest.place(), limits=PortLimits(answer_s=0.01))
        assert len(guest.peers) == 2


async def test_a_request_without_a_host_is_addressed_to_the_port() -> None:
    guest = Workspace()
    async with ports() as pool:
        for request, host in ((GET, b"host: localhost:8080"), (replace(GET, headers=((b"Host", b"me"),)), b"Host: me")):
            asking = asyncio.create_task(whole(pool, guest.place(), request))
            await guest.opened(1)
            peer = guest.peers.pop()
            assert host in await peer.head()
            peer.end()
            with pytest.raises(PortClosed):
                await asking


async def test_nothing_listens() -> None:
    guest = Workspace()
    guest.refusal = NotFound("Connection refused")
    async with ports() as pool:
        with pytest.raises(PortRefused, match="Nothing listens on port 8080") as caught:
            await whole(pool, guest.place())
        assert (caught.value.status, caught.value.retryable, caught.value.details["phase"]) == (502, True, "connecting")
        guest.refusal = Busy("Too many connections.")
        with pytest.raises(Busy):
            await whole(pool, guest.place())
