"""The QMP client against a scripted peer on the other end of a socket pair."""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from perdure.core.config import Settings
from perdure.core.errors import MachineDied
from perdure.machines.qmp import COMMAND_DEADLINE_S, LINE_MAX, Event, QmpClient, QmpError

GREETING = {"QMP": {"version": {"qemu": {"major": 7}}}}


class Peer:
    """QEMU's end: reads commands with their descriptors, writes what the test says."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.setblocking(False)
        self._buffer = b""

    async def command(self) -> tuple[dict[str, Any], list[int]]:
        """The next command and the descriptors that came with it."""
        loop = asyncio.get_running_loop()
        fds: list[int] = []
        while b"\n" not in self._buffer:
            ready: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self.sock, ready.set_result, None)
            await ready
            loop.remove_reader(self.sock)
            data, ancillary, _, _ = self.sock.recvmsg(65536, 1024)
            for _, _, content in ancillary:
                numbers = array.array("i")
                numbers.frombytes(content)
                fds += numbers
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line), fds

    def say(self, *messages: dict[str, Any]) -> None:
        self.sock.send(b"".join(json.dumps(message).encode() + b"\r\n" for message in messages))

    async def answer(self, value: Any = None, **more: Any) -> dict[str, Any]:
        command, fds = await self.command()
        for fd in fds:
            os.close(fd)
        self.say({"return": value, "id": command["id"], **more})
        return command


class Pair:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.events: list[Event] = []
        self.lost = 0
        self.client = QmpClient(ours, self.events.append, self.lose)
        self.peer = Peer(theirs)

    def lose(self) -> None:
        self.lost += 1

    async def greet(self) -> None:
        self.peer.say(GREETING)
        starting = asyncio.create_task(self.client.start())
        assert (await self.peer.answer({}))["execute"] == "qmp_capabilities"
        await starting


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    made.client.close()
    made.peer.sock.close()


async def test_a_command_gets_its_answer(pair: Pair) -> None:
    await pair.greet()
    asking = asyncio.create_task(pair.client.execute("query-status", {"a": 1}))
    command = await pair.peer.answer({"status": "paused"})
    assert command["execute"] == "query-status"
    assert command["arguments"] == {"a": 1}
    assert await asking == {"status": "paused"}


async def test_a_refusal_carries_qemus_words(pair: Pair) -> None:
    await pair.greet()
    asking = asyncio.create_task(pair.client.execute("cont"))
    command, _ = await pair.peer.command()
    pair.peer.say({"error": {"class": "GenericError", "desc": "no medium"}, "id": command["id"]})
    with pytest.raises(QmpError, match="refused 'cont': no medium") as caught:
        await asking
    assert caught.value.error_class == "GenericError"


async def test_events_arrive_in_order_and_before_a_later_answer(pair: Pair) -> None:
    await pair.greet()
    asking = asyncio.create_task(pair.client.execute("stop"))
    command, _ = await pair.peer.command()
    pair.peer.say({"event": "STOP"}, {"event": "BLOCK_IO_ERROR"}, {"return": {}, "id": command["id"]})
    await asking
    assert [event["event"] for event in pair.events] == ["STOP", "BLOCK_IO_ERROR"]


async def test_commands_go_one_at_a_time(pair: Pair) -> None:
    await pair.greet()
    first = asyncio.create_task(pair.client.execute("one"))
    second = asyncio.create_task(pair.client.execute("two"))
    assert (await pair.peer.answer(1))["execute"] == "one"
    assert (await pair.peer.answer(2))["execute"] == "two"
    assert (await first, await second) == (1, 2)


async def test_a_descriptor_travels_with_its_command(pair: Pair) -> None:
    await pair.greet()
    read_end, write_end = os.pipe()
    sending = asyncio.create_task(pair.client.execute("add-fd", fd=write_end))
    command, (received,) = await pair.peer.command()
    os.write(received, b"through")
    pair.peer.say({"return": {"fdset-id": 1}, "id": command["id"]})
    await sending
    assert os.read(read_end, 100) == b"through"
    os.fstat(write_end)  # still the caller's
    for fd in (read_end, write_end, received):
        os.close(fd)


async def test_a_cancelled_command_does_not_disturb_the_next(pair: Pair) -> None:
    await pair.greet()
    first = asyncio.create_task(pair.client.execute("slow"))
    command, _ = await pair.peer.command()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(pair.client.execute("next"))
    await asyncio.sleep(0)
    pair.peer.say({"return": "late", "id": command["id"]})
    assert (await pair.peer.answer("right"))["execute"] == "next"
    assert await second == "right"


async def test_an_answer_that_does_not_come(pair: Pair) -> None:
    await pair.greet()
    with pytest.raises(MachineDied, match=r"did not answer 'hang' in 0\.05 seconds"):
        await pair.client.execute("hang", deadline_s=0.05)
    with pytest.raises(MachineDied, match="has ended"):
        await pair.client.execute("any")
    assert pair.lost == 1


async def test_no_greeting(pair: Pair) -> None:
    with pytest.raises(MachineDied, match=r"said nothing for 0\.05 seconds"):
        await pair.client.start(0.05)


@pytest.mark.parametrize("rubbish", [b"not json\n", b"x" * (LINE_MAX + 70_000)])
async def test_rubbish_ends_the_session(pair: Pair, rubbish: bytes) -> None:
    await pair.greet()
    asking = asyncio.create_task(pair.client.execute("query-status"))
    await pair.peer.command()
    loop = asyncio.get_running_loop()
    sending = asyncio.create_task(loop.sock_sendall(pair.peer.sock, rubbish))
    with pytest.raises(MachineDied):
        await asking
    sending.cancel()
    assert not pair.client.is_open
    assert pair.lost == 1


async def test_the_end_of_the_vmm_fails_what_waits(pair: Pair) -> None:
    await pair.greet()
    asking = asyncio.create_task(pair.client.execute("query-status"))
    waiting = asyncio.create_task(pair.client.execute("query-name"))
    await pair.peer.command()
    pair.peer.sock.close()
    for task in (asking, waiting):
        with pytest.raises(MachineDied):
            await task
    assert pair.lost == 0


async def test_closing_twice_is_fine(pair: Pair) -> None:
    await pair.greet()
    pair.client.close()
    pair.client.close()
    with pytest.raises(MachineDied):
        await pair.client.execute("query-status")


def test_a_machine_that_the_watchdog_has_stopped_is_not_taken_for_dead() -> None:
    """A command that is late ends its VMM: a lease that comes back after several of its terms must find it alive."""
    assert 10 * Settings().lease_s <= COMMAND_DEADLINE_S
