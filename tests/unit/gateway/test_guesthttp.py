"""The HTTP client against programs that are slow, short, rude and wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from perdure.core.errors import InvalidRequest, PerdureError, PortClosed, PortFailed, PortMalformed, PortSilent
from perdure.gateway.guesthttp import INTERIM_MAX, GuestAnswer, GuestConnection
from perdure.wire.node import PortLimits, PortRequest
from tests.fakes.pipe import WINDOW_BYTES, Peer

GET = PortRequest("GET", b"/")
BRIEF = PortLimits(head_bytes=2048, answer_s=0.05, body_silence_s=0.05)
PATIENT = PortLimits(head_bytes=2048)


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def whole(answer: GuestAnswer) -> bytes:
    return b"".join([part async for part in answer.body()])


async def asked(peer: Peer, request: PortRequest = GET, limits: PortLimits = PATIENT) -> GuestAnswer:
    async with asyncio.timeout(20):
        return await GuestConnection(peer.stream, limits).request(request)


class Asking:
    """A request under way, which a test answers piece by piece."""

    def __init__(self, request: PortRequest = GET, limits: PortLimits = PATIENT) -> None:
        self.peer = Peer()
        self.task = asyncio.create_task(asked(self.peer, request, limits))

    async def failed(self) -> PerdureError:
        """What it raised; the connection is closed by then."""
        with pytest.raises(PerdureError) as caught:
            await whole(await self.task)
        assert self.peer.stream.closed.is_set()
        return caught.value


def phase_of(error: PerdureError) -> str:
    assert isinstance(error, PortFailed)
    return error.details["phase"]


# ----------------------------------------------------------------------------------------------------------- what is sent


async def test_a_request_goes_out_as_it_is() -> None:
    target = b"/a//b/%2e%2e/../%2F?x=%00&y=\xc3".replace(b"\xc3", b"%C3")
    call = Asking(PortRequest("DELETE", target, ((b"Host", b"me"), (b"X-Two", b"1"), (b"X-Two", b"2"))))
    assert await call.peer.head() == [b"DELETE " + target + b" HTTP/1.1", b"Host: me", b"X-Two: 1", b"X-Two: 2"]
    await call.peer.send(b"HTTP/1.1 200 Fine\r\nX-Any: \xe9\r\nContent-Length: 2\r\n\r\nok")
    answer = await call.task
    assert (answer.status, answer.reason) == (200, b"Fine")
    assert answer.headers == ((b"x-any", b"\xe9"), (b"content-length", b"2"))
    assert await whole(answer) == b"ok"
    assert call.peer.stream.closed.is_set(), "nobody asked to keep it"


async def test_a_body_of_known_length_and_one_in_chunks() -> None:
    known = Asking(PortRequest("POST", b"/", body=pieces(b"ab", b"", b"c"), length=3))
    assert b"content-length: 3" in await known.peer.head()
    assert await known.peer.read_until(b"abc") == b"abc"
    chunked = Asking(PortRequest("POST", b"/", body=pieces(b"ab", b"", b"c")))
    assert b"transfer-encoding: chunked" in await chunked.peer.head()
    assert await chunked.peer.read_until(b"0\r\n\r\n") == b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    for call in (known, chunked):
        await call.peer.send(b"HTTP/1.1 204 \r\n\r\n")
        assert await whole(await call.task) == b""


async def test_a_method_that_usually_has_a_body_says_that_it_has_none() -> None:
    call = Asking(PortRequest("POST", b"/"))
    assert b"content-length: 0" in await call.peer.head()
    call.peer.end()
    await call.failed()


@pytest.mark.parametrize(
    "request_",
    [
        PortRequest("GET", b"/a b"),
        PortRequest("GET", b"/\r\nX: y"),
        PortRequest("GET", b"/", ((b"x", b"1\r\ny: 2"),)),
        PortRequest("GET", b"/", ((b"x y", b"1"),)),
        PortRequest("GET", b"/", ((b"host", b"a"), (b"host", b"b"))),
        PortRequest("GE T", b"/"),
        PortRequest("CONNECT", b"h:1"),
    ],
    ids=["space", "line", "header-line", "header-name", "two-hosts", "method", "connect"],
)
async def test_what_would_be_another_request_is_refused(request_: PortRequest) -> None:
    peer = Peer()
    with pytest.raises(InvalidRequest):
        await asked(peer, request_)
    assert peer.unread == 0 and peer.stream.closed.is_set()


@pytest.mark.parametrize("name", [b"Content-Length", b"transfer-encoding", b"Connection", b"upgrade"])
async def test_framing_is_nobody_elses_affair(name: bytes) -> None:
    with pytest.raises(AssertionError, match="framing is made here"):
        await asked(Peer(), PortRequest("GET", b"/", ((name, b"5"),)))


@pytest.mark.parametrize("parts", [(b"ab",), (b"abcd",)], ids=["short", "long"])
async def test_a_body_that_is_not_as_long_as_declared(parts: tuple[bytes, ...]) -> None:
    call = Asking(PortRequest("POST", b"/", body=pieces(*parts), length=3))
    assert isinstance(await call.failed(), InvalidRequest)


async def test_what_the_body_raises_is_raised_and_ends_the_connection() -> None:
    async def torn() -> AsyncIterator[bytes]:
        yield b"one"
        raise ConnectionResetError("the client is gone")

    call = Asking(PortRequest("POST", b"/", body=torn()))
    with pytest.raises(ConnectionResetError):
        await call.task
    assert call.peer.stream.closed.is_set()


# --------------------------------------------------------------------------------------------------------- what comes back


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 \r\ncontent-length: 3\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;x=y\r\nab\r\n1\r\nc\r\n0\r\nTrailer: t\r\n\r\n", b"abc"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 9\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"abc"),
        (b"HTTP/1.0 200 OK\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", b""),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            b"",
        ),
    ],
    ids=["length", "chunks", "both", "until-the-end", "not-modified", "interim"],
)
async def test_every_framing_of_an_answer(answer: bytes, body: bytes) -> None:
    for step in (len(answer), 1):  # at once, and byte by byte
        call = Asking()
        for at in range(0, len(answer), step):
            await call.peer.send(answer[at : at + step])
        call.peer.end()
        assert await whole(await call.task) == body


async def test_an_answer_to_head_has_a_length_and_no_body() -> None:
    call = Asking(PortRequest("HEAD", b"/"))
    await call.peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
    answer = await call.task
    assert answer.headers == ((b"content-length", b"1000"),)
    assert await whole(answer) == b""


async def test_pieces_arrive_as_they_are_sent_and_nothing_is_read_ahead() -> None:
    call = Asking()
    await call.peer.send(b"HTTP/1.1 200 OK\r\n\r\n")
    answer = await call.task
    body = answer.body()
    for event in (b"data: 1\n\n", b"data: 2\n\n"):
        await call.peer.send(event)
        assert await anext(body) == event
    flood = asyncio.create_task(call.peer.send(b"x" * (4 * WINDOW_BYTES)))
    await asyncio.wait({flood}, timeout=0.05)
    assert not flood.done(), "what nobody reads stays with the program"
    await answer.aclose()
    await asyncio.gather(flood, return_exceptions=True)
    assert call.peer.stream.closed.is_set()


async def test_an_answer_comes_before_the_body_has_ended() -> None:
    gate = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"one"
        await gate.wait()
        yield b"two"

    call = Asking(PortRequest("POST", b"/", body=slow()))
    await call.peer.read_until(b"one\r\n")
    await call.peer.send(b"HTTP/1.1 200 OK\r\n\r\n")
    answer = await call.task
    body = answer.body()
    await call.peer.send(b"early")
    assert await anext(body) == b"early"
    gate.set()
    assert await call.peer.read_until(b"0\r\n\r\n") == b"3\r\ntwo\r\n0\r\n\r\n"
    call.peer.end()
    assert [part async for part in body] == []


async def test_a_refusal_of_a_large_body_is_an_answer() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536

    call = Asking(PortRequest("PUT", b"/", body=endless()))
    await call.peer.head()
    await call.peer.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
    answer = await call.task
    assert (answer.status, await whole(answer)) == (413, b"no")
    assert call.peer.stream.closed.is_set(), "nobody sends on"


async def test_a_program_that_reads_no_more_may_still_have_answered() -> None:
    call = Asking(PortRequest("PUT", b"/", body=pieces(*[b"x" * 65536] * 8)))
    await call.peer.head()
    await call.peer.send(b"HTTP/1.1 403 No\r\ncontent-length: 2\r\n\r\nno")
    call.peer.end()
    call.peer._to_peer.broken = True
    call.peer._to_peer.tell()
    answer = await call.task
    assert (answer.status, await whole(answer)) == (403, b"no")


async def test_an_upgrade_hands_the_stream_over_with_what_came_behind_the_head() -> None:
    call = Asking(PortRequest("GET", b"/", upgrade="echo"))
    head = await call.peer.head()
    assert head[-2:] == [b"connection: upgrade", b"upgrade: echo"]
    await call.peer.send(b"HTTP/1.1 101 Switching\r\nupgrade: echo\r\nconnection: upgrade\r\n\r\nfirst")
    answer = await call.task
    assert answer.status == 101 and answer.upgraded is not None
    assert await answer.upgraded.read(3) == b"fir"
    assert await answer.upgraded.read() == b"st"
    await answer.upgraded.write(b"ping")
    assert await call.peer.read() == b"ping"
    await call.peer.send(b"pong")
    assert await answer.upgraded.read() == b"pong"
    await answer.upgraded.close()
    assert call.peer.stream.closed.is_set()


async def test_a_program_may_decline_an_upgrade() -> None:
    call = Asking(PortRequest("GET", b"/", upgrade="echo"))
    await call.peer.send(b"HTTP/1.1 426 No\r\ncontent-length: 2\r\n\r\nno")
    answer = await call.task
    assert (answer.status, answer.upgraded, await whole(answer)) == (426, None, b"no")


# ------------------------------------------------------------------------------------------------------------- what fails


@pytest.mark.parametrize(
    ("sent", "phase"),
    [
        (b"", "waiting"),
        (b"HTTP/1.1 200 O", "waiting"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "waiting"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc", "answering"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabc", "answering"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", "answering"),
    ],
)
@pytest.mark.parametrize("how", ["end", "reset"])
async def test_a_connection_that_ends_early(sent: bytes, phase: str, how: str) -> None:
    call = Asking()
    await call.peer.head()
    if sent:
        await call.peer.send(sent)
    getattr(call.peer, how)()
    error = await call.failed()
    assert isinstance(error, PortClosed)
    assert (phase_of(error), error.ambiguous, error.retryable, error.status) == (phase, True, False, 502)


async def test_a_program_that_resets_while_the_request_is_sent() -> None:
    call = Asking(PortRequest("PUT", b"/", body=pieces(*[b"x" * 65536] * 8)))
    await call.peer.head()
    call.peer.reset()
    assert isinstance(await call.failed(), PortClosed)


@pytest.mark.parametrize(
    "sent",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na\x00b: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 799 Odd\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Unasked\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 4096,
        b"HTTP/1.1 100 Go on\r\n\r\n" * (INTERIM_MAX + 1),
    ],
)
async def test_what_is_not_http(sent: bytes) -> None:
    call = Asking()
    await call.peer.head()
    await call.peer.send(sent)
    error = await call.failed()
    assert isinstance(error, PortMalformed) and error.status == 502
    assert error.message.isprintable()


async def test_a_program_that_never_answers() -> None:
    call = Asking(limits=BRIEF)
    error = await call.failed()
    assert isinstance(error, PortSilent)
    assert (phase_of(error), error.status, error.ambiguous) == ("waiting", 504, True)


async def test_interim_answers_do_not_buy_time() -> None:
    call = Asking(limits=BRIEF)
    await call.peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert phase_of(await call.failed()) == "waiting"


async def test_a_program_that_does_not_take_the_request() -> None:
    call = Asking(PortRequest("PUT", b"/", body=pieces(*[b"x" * 65536] * 8)), BRIEF)
    error = await call.failed()
    assert isinstance(error, PortSilent) and phase_of(error) == "sending"


async def test_a_client_that_is_slow_is_not_the_programs_silence() -> None:
    gate = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"one"
        await gate.wait()

    call = Asking(PortRequest("PUT", b"/", body=slow()), BRIEF)
    done, _ = await asyncio.wait({call.task}, timeout=4 * BRIEF.answer_s)
    assert not done, "its turn has not come"
    gate.set()
    assert phase_of(await call.failed()) == "waiting"


async def test_a_program_that_stops_in_the_middle_of_its_answer() -> None:
    call = Asking(limits=BRIEF)
    await call.peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc")
    error = await call.failed()
    assert isinstance(error, PortSilent) and phase_of(error) == "answering"


@pytest.mark.parametrize("when", ["sending", "waiting", "answering"])
async def test_a_cancelled_exchange_closes_its_stream(when: str) -> None:
    parts = [b"x" * 65536] * 8
    call = Asking(PortRequest("PUT", b"/", body=pieces(*parts)) if when == "sending" else GET)

    async def read_on() -> bytes:
        return await whole(await call.task)

    work: Coroutine[Any, Any, bytes] = read_on()
    reading = asyncio.create_task(work)
    await call.peer.head()
    if when == "answering":
        await call.peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc")
        await asyncio.wait({call.task})
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await call.peer.left()
    left = {task for task in asyncio.all_tasks() if task.get_name().startswith("perdure-port")}
    assert not left, "no task outlives it"


async def test_a_last_request_says_so_and_its_connection_is_not_kept() -> None:
    peer = Peer()
    kept: list[GuestConnection] = []

    async def ask() -> GuestAnswer:
        last = PortRequest("POST", b"/", body=pieces(b"x"), length=1, is_last=True)
        return await GuestConnection(peer.stream, PATIENT).request(last, kept.append)

    task = asyncio.create_task(ask())
    assert b"connection: close" in await peer.head()
    await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    assert await whole(await task) == b"ok"
    assert kept == [] and peer.stream.closed.is_set()
