"""The link: wake and its repairs, freeze and thaw, an agent that dies, a channel that is cut, a guest that lies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from perdure.core.errors import GuestUnresponsive, MachineDied, MachineFailed, StaleGeneration
from perdure.machines.driver import ChannelName
from perdure.machines.guestlink import GuestLink, WakeRequest
from perdure.machines.guestlink_stream import LinkStream
from perdure.wire.guest import PROTOCOL, EventKind, Mux, Role
from perdure.wire.guest.frames import FrameType, encode
from perdure.wire.node import ExecEnd, ExecOutput, ExecSpec, ExecStarted
from tests.contract.guest.places import DEADLINE_S, Place, collect, host_agent, identity, linked, new_id
from tests.fakes.guest_agent import HostAgent

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECOND_NS = 1_000_000_000


@pytest_asyncio.fixture(loop_scope="session")
async def pair() -> AsyncIterator[tuple[HostAgent, Place]]:
    async with host_agent() as found:
        yield found


# ----------------------------------------------------------------------------------------------------------------- wake


@pytest.mark.parametrize("skew_s", [-7200, 3600, 0])
async def test_a_wake_steps_the_clock_to_the_hosts(skew_s: int) -> None:
    async with host_agent(skew_ns=skew_s * SECOND_NS) as (agent, place):
        await place.link.close()
        link = GuestLink(agent.connect, unresponsive_s=DEADLINE_S)
        await link.open(DEADLINE_S)  # the first wake, in the fixture, has set it right: put it wrong again
        await link._control.call({"op": "clock", "step_ns": skew_s * SECOND_NS}, DEADLINE_S)
        await link.open(DEADLINE_S)
        report = await link.wake(WakeRequest(identity(2)))
        assert abs(report.clock_step_s + skew_s) <= 0.05 + report.clock_uncertainty_s
        assert report.clock_uncertainty_s <= 0.05
        again = await link.wake(WakeRequest(identity(3)))
        assert abs(again.clock_step_s) <= 0.1
        await link.close()


async def test_a_thaw_steps_a_clock_that_lost_time_forward(pair: tuple[HostAgent, Place]) -> None:
    link = pair[1].link
    await link._control.call({"op": "clock", "step_ns": -5 * SECOND_NS}, DEADLINE_S)
    assert abs(await link.thaw() - 5) <= 0.1
    assert abs(await link.thaw()) <= 0.1


async def test_a_new_identity_is_written_and_old_host_keys_go(pair: tuple[HostAgent, Place]) -> None:
    place = pair[1]
    await place.run("touch /etc/ssh/ssh_host_rsa_key /etc/ssh/ssh_host_rsa_key.pub; echo '127.0.1.1 old' >>/etc/hosts")
    report = await place.link.wake(WakeRequest(identity(2, "branch-7"), new_identity=True))
    assert report.problems == ()
    done = await place.run("hostname; cat /etc/hostname /etc/machine-id; grep -c old /etc/hosts; grep 127.0.1.1 /etc/hosts")
    assert done.stdout.decode().split() == ["branch-7", "branch-7", f"{2:032x}", "0", "127.0.1.1", "branch-7"]
    assert (await place.run("stat -c %a /etc/machine-id; ls /etc/ssh/ssh_host_rsa_key")).stdout == b"444\n"


async def test_identity_files_that_cannot_be_written_are_named_and_the_wake_goes_on(pair: tuple[HostAgent, Place]) -> None:
    place = pair[1]
    await place.run("rm /etc/hostname /etc/machine-id; ln -s /none/hostname /etc/hostname; mkdir /etc/machine-id")
    report = await place.link.wake(WakeRequest(identity(2, "branch-8"), new_identity=True))
    assert len(report.problems) == 2 and all("/etc/" in problem for problem in report.problems)
    assert (await place.run("hostname")).stdout == b"branch-8\n"


async def test_without_a_new_identity_the_users_files_stay(pair: tuple[HostAgent, Place]) -> None:
    place = pair[1]
    await place.run("echo mine >/etc/hostname")
    await place.link.wake(WakeRequest(identity(2, "other")))
    assert (await place.run("cat /etc/hostname; hostname")).stdout == b"mine\nother\n"


async def test_a_wake_reports_what_runs_and_drops_what_was_connected(pair: tuple[HostAgent, Place]) -> None:
    agent, place = pair
    running = await place.guest.start_exec(ExecSpec(new_id(), shell="exec sleep 1000"))
    accepted = asyncio.Event()

    def on_stream(_what: str, _info: dict[str, Any], stream: LinkStream) -> None:
        async def accept() -> None:
            await stream.accept()
            accepted.set()

        tasks.append(asyncio.create_task(accept()))

    tasks: list[asyncio.Task[None]] = []
    place.on_stream = on_stream
    program = "import socket;s=socket.create_connection(('127.0.0.1',7071));s.sendall(b'x');print(s.recv(1))"
    # It outlives its connection: it may lose that before the wake asks what runs.
    client = await place.guest.start_exec(ExecSpec(new_id(), shell=f'python3 -c "{program}"; read go', stdin=True))
    await asyncio.wait_for(accepted.wait(), DEADLINE_S)
    await place.link.close()

    link = GuestLink(agent.connect, generation=2, unresponsive_s=DEADLINE_S)
    await link.open(DEADLINE_S)
    report = await link.wake(WakeRequest(identity(2)))
    assert report.connections_dropped == 1
    assert set(report.execs_running) == {running.exec_id, client.exec_id}
    assert report.execs_lost == ()
    again = await link.attach_exec(client.exec_id)
    await again.write_stdin(b"\n")
    done = await collect(again)
    assert b"ConnectionResetError" in done.stderr
    await link.close()


async def test_an_earlier_generation_is_refused(pair: tuple[HostAgent, Place]) -> None:
    link = pair[1].link
    await link.wake(WakeRequest(identity(5)))
    with pytest.raises(MachineFailed, match=r"generation|woken"):
        await link.wake(WakeRequest(identity(4)))


async def test_a_retired_link_raises_stale_generation(pair: tuple[HostAgent, Place]) -> None:
    place = pair[1]
    handle = await place.guest.start_exec(ExecSpec(new_id(), shell="exec sleep 1000"))
    await place.link.retire()
    for call in (place.link.ping(), place.link.stat("/"), place.link.list_execs(), place.link.thaw()):
        with pytest.raises(StaleGeneration):
            await call
    with pytest.raises((StaleGeneration, MachineDied)):
        await collect(handle)
    assert place.link.closed.is_set()


# ------------------------------------------------------------------------------------------------------ freeze and thaw


async def test_quiesce_stops_user_processes_and_thaw_lets_them_go(pair: tuple[HostAgent, Place]) -> None:
    place = pair[1]
    handle = await place.guest.start_exec(ExecSpec(new_id(), shell="while :; do echo; done"))
    events = handle.events()
    assert isinstance(await anext(events), ExecStarted)
    still = await place.link.stand_still(deadline_s=10)
    place.link.release()
    if not still:
        pytest.skip("this host has no cgroup2 to freeze processes with")
    before = await place.link.cpu_s()
    await place.link.sync()
    assert await place.link.cpu_s() == before, "a frozen process uses no time"
    blocked = asyncio.create_task(place.run("echo after"))
    await place.link.ping()
    assert not blocked.done()
    await place.link.thaw()
    assert (await blocked).stdout == b"after\n"
    await place.guest.kill_exec(handle.exec_id)
    assert [event async for event in events][-1].end is ExecEnd.KILLED


async def test_a_hold_in_the_middle_of_an_upload_loses_nothing(pair: tuple[HostAgent, Place]) -> None:
    place, blocks = pair[1], [os.urandom(65536) for _ in range(8)]
    begun = asyncio.Event()

    async def source() -> AsyncIterator[bytes]:
        for number in range(200):
            if number == 20:
                begun.set()
            yield blocks[number % 8]

    writing = asyncio.create_task(place.guest.write_file("/tmp/up", source()))
    await begun.wait()
    for _ in range(20):
        await place.link.stand_still()
        place.link.release()
    await place.link.thaw()
    assert (await writing).length == 200 * 65536


async def test_warm_up_commands_run_and_a_failing_one_is_named(pair: tuple[HostAgent, Place]) -> None:
    place = pair[1]
    await place.link.settle(["true", "echo x >/tmp/warm"], deadline_s=1.0)
    assert (await place.run("cat /tmp/warm")).stdout == b"x\n"
    with pytest.raises(MachineFailed, match=r"exit 7: ended with 7"):
        await place.link.settle(["exit 7"], deadline_s=1.0)


# ------------------------------------------------------------------------------------------------- an agent that dies


async def test_when_the_agent_dies_its_commands_are_lost_and_the_users_world_goes_on(pair: tuple[HostAgent, Place]) -> None:
    agent, place = pair
    handle = await place.guest.start_exec(ExecSpec(new_id(), shell="echo $$; exec sleep 1000"))
    events = handle.events()
    pid = [await anext(events), await anext(events)][1].data.decode().strip()
    os.kill(await agent.agent_pid(), signal.SIGKILL)
    assert [event async for event in events][-1].end is ExecEnd.LOST
    assert (await place.run(f"kill -0 {pid} && cat /proc/1/comm")).stdout == b"perdure-init\n"
    assert (await place.run("hostname")).stdout == b"box\n", "the wake is told again to the new agent"
    lost = await collect(await place.guest.attach_exec(handle.exec_id))
    assert lost.exited.end is ExecEnd.LOST and "unknown" in lost.exited.detail
    report = await place.link.wake(WakeRequest(identity(2)))
    assert report.execs_lost == (handle.exec_id,)
    await place.guest.kill_exec(handle.exec_id)
    assert (await place.run(f"while kill -0 {pid}; do sleep 0.1; done", run_limit_s=DEADLINE_S)).exited.end is ExecEnd.EXITED


@pytest.mark.parametrize("second", list(ChannelName))
async def test_a_link_that_breaks_while_it_is_mended_comes_back(
    pair: tuple[HostAgent, Place], monkeypatch: pytest.MonkeyPatch, second: ChannelName
) -> None:
    agent, place = pair
    link, wake, woken = place.link, place.link._wake, 0

    async def cut_once(*arguments: Any, **fields: Any) -> Any:
        nonlocal woken
        woken += 1
        if woken == 1:
            agent.ports[second]._close_host()
        return await wake(*arguments, **fields)

    monkeypatch.setattr(link, "_wake", cut_once)
    agent.ports[ChannelName.CONTROL]._close_host()
    while woken < 2:
        assert not link.closed.is_set(), link.closed_because
        with contextlib.suppress(MachineDied):  # what was under way at a cut
            await link.ping()
    assert (await place.run("hostname")).stdout == b"box\n"
    assert not link.closed.is_set()


async def test_a_machine_that_is_gone_ends_the_link_for_good(pair: tuple[HostAgent, Place]) -> None:
    agent, place = pair
    waiting = asyncio.create_task(place.run("exec sleep 1000"))
    await place.link.ping()

    async def refuse(_channel: ChannelName) -> Any:
        raise ConnectionRefusedError("no machine")

    agent.connect = refuse  # type: ignore[method-assign]
    place.link._control._connect = lambda: refuse(ChannelName.CONTROL)
    for port in agent.ports.values():
        await port.close()
    await asyncio.wait_for(place.link.closed.wait(), DEADLINE_S)
    for call in (waiting, place.link.ping()):
        with pytest.raises(MachineDied):
            await call


# ------------------------------------------------------------------------------------------------ a channel that is cut


def _request_bytes() -> int:
    """Length of a ping's frame."""
    mux = Mux(Role.HOST)
    mux.call({"op": "ping"})
    return len(mux.pull())


async def _cut(agent: HostAgent, channel: ChannelName, request: bytes, *, to_guest: int | None, to_host: int | None) -> None:
    """Connect, resynchronise, send a request, and cut after so many of its bytes (or of its answer's)."""
    port, mux = agent.ports[channel], Mux(Role.HOST)
    reader, writer = await port.connect()
    mux.begin(os.urandom(16))
    writer.write(mux.pull(1 << 20))
    while not mux.synced:
        mux.receive(await reader.read(4096))
    writer.write(request if to_guest is None else request[:to_guest])
    await writer.drain()
    if to_host:
        await reader.readexactly(to_host)
    writer.close()
    await port.disconnect()


async def test_a_cut_at_every_byte_in_both_directions_leaves_a_channel_that_works(pair: tuple[HostAgent, Place]) -> None:
    agent, place = pair
    await place.link.close()
    mux = Mux(Role.HOST)
    call = mux.call({"op": "ping"})
    request = mux.pull()
    answer = len(encode(FrameType.REPLY, call, b'{"ok":true}'))
    for channel in ChannelName:
        cuts = [(cut, None) for cut in range(len(request))] + [(None, cut) for cut in range(answer)]
        for to_guest, to_host in cuts:
            await _cut(agent, channel, request, to_guest=to_guest, to_host=to_host)
    async with linked(agent.connect, "agent") as again:
        assert (await again.run("echo fine")).stdout == b"fine\n"


@pytest.mark.parametrize("direction", ["to_guest", "to_host"])
@pytest.mark.parametrize("size", [3_000, 70_000, 200_000, 900_000])
async def test_a_link_whose_channel_is_cut_in_a_stream_comes_back_and_commands_go_on(
    pair: tuple[HostAgent, Place], direction: str, size: int
) -> None:
    agent, place = pair
    port = agent.ports[ChannelName.DATA]
    await place.link.close()
    port.cut(direction, size + (65536 if direction == "to_guest" else 0))
    async with linked(agent.connect, "agent") as again:
        cut, complete, total = port.was_cut, asyncio.Event(), 2_000_000
        shell = f"head -c {total} /dev/zero | tr '\\0' y; cat >/dev/null"
        handle = await again.guest.start_exec(ExecSpec(new_id(), shell=shell, stdin=True))
        received = 0

        async def feed_then_kill() -> None:
            while not cut.is_set():
                try:
                    await handle.write_stdin(bytes(50_000))
                except MachineDied:
                    break
            await cut.wait()
            await complete.wait()
            await again.guest.kill_exec(handle.exec_id)

        feeding = asyncio.create_task(feed_then_kill())
        async for event in handle.events():
            if isinstance(event, ExecOutput):
                assert (event.offset, event.gap) == (received, 0)
                received += len(event.data)
                if received == total:
                    complete.set()
        await feeding
        assert received == total


# ------------------------------------------------------------------------------------------------- a guest that lies


class Liar:
    """A guest that answers the handshake and then whatever a test wants."""

    def __init__(self) -> None:
        self.muxes: dict[ChannelName, Mux] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.hello: dict[str, Any] = {"ok": True, "protocol": PROTOCOL, "wall_ns": 0, "instance": "x", "boot_id": "b"}
        self.answer: dict[str, Any] = {"ok": True}  # to all other calls
        self.silent = False
        self.writers: dict[ChannelName, asyncio.StreamWriter] = {}
        self.heard: dict[str, asyncio.Queue[int]] = {EventKind.OPEN: asyncio.Queue(), EventKind.RESET: asyncio.Queue()}
        self.opened = self.heard[EventKind.OPEN]

    async def connect(self, channel: ChannelName) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        near, far = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=far)
        if channel in self.writers:
            self.writers[channel].close()
        self.writers[channel] = writer
        self._tasks.append(asyncio.create_task(self._serve(channel, reader, writer)))
        return await asyncio.open_connection(sock=near)

    async def _serve(self, channel: ChannelName, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mux = self.muxes[channel] = Mux(Role.GUEST)
        while data := await reader.read(65536):
            for event in mux.receive(data):
                if event.kind == EventKind.CALL and not self.silent:
                    mux.reply(event.stream, self.hello if event.value.get("op") == "hello" else self.answer)
                elif event.kind in (EventKind.OPEN, EventKind.RESET):
                    self.heard[event.kind].put_nowait(event.stream)
            self.flush(channel)

    def flush(self, channel: ChannelName = ChannelName.DATA) -> None:
        while self.muxes[channel].has_output:
            self.writers[channel].write(self.muxes[channel].pull())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for writer in self.writers.values():
            writer.close()


@asynccontextmanager
async def lying(unresponsive_s: float = DEADLINE_S) -> AsyncIterator[tuple[Liar, GuestLink]]:
    liar = Liar()
    link = GuestLink(liar.connect, unresponsive_s=unresponsive_s)
    await link.open(DEADLINE_S)
    try:
        yield liar, link
    finally:
        await link.close()
        liar.close()


async def test_a_guest_that_answers_nothing_is_unresponsive() -> None:
    async with lying(unresponsive_s=0.2) as (liar, link):
        liar.silent = True
        with pytest.raises(GuestUnresponsive):
            await link.ping()
        with pytest.raises(GuestUnresponsive):
            await link.stat("/")
        with pytest.raises(GuestUnresponsive):
            await link.open(0.2)


async def test_another_protocol_is_refused_with_what_to_do() -> None:
    liar = Liar()
    liar.hello["protocol"] = 99
    link = GuestLink(liar.connect, unresponsive_s=DEADLINE_S)
    with pytest.raises(MachineFailed, match="speaks protocol 99") as caught:
        await link.open(DEADLINE_S)
    assert "disk" in caught.value.hint
    await link.close()
    liar.close()


async def test_hello_fields_of_any_kind_do_no_harm() -> None:
    liar = Liar()
    liar.hello |= {
        "wall_ns": "soon",
        "instance": ["x"],
        "boot_id": "\x1b[2J\nevil",
        "generation": 1e300,
        "problems": [1, "\x07"] * 50,
    }
    link = GuestLink(liar.connect, unresponsive_s=DEADLINE_S)
    hello = await link.open(DEADLINE_S)
    assert hello.boot_id.isprintable() and hello.generation == 0 and len(hello.problems) == 20
    await link.close()
    liar.close()


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"info": None},
        {"info": {"path": 1, "name": "x"}},
        {"info": "x"},
    ],
)
async def test_a_description_that_is_none_is_an_error(answer: dict[str, Any]) -> None:
    async with lying() as (liar, link):
        asking = asyncio.create_task(link.stat("/x"))
        liar.muxes[ChannelName.DATA].accept(await liar.opened.get(), answer)
        liar.flush()
        with pytest.raises(MachineFailed, match="no file"):
            await asking


async def test_a_flood_of_messages_ends_the_stream_and_not_the_host() -> None:
    async with lying() as (liar, link):
        starting = asyncio.create_task(link.start_exec(ExecSpec(new_id(), shell="x")))
        stream = await liar.opened.get()
        mux = liar.muxes[ChannelName.DATA]
        mux.accept(stream)
        for _ in range(1000):
            mux.message(stream, {"ev": "gap", "sub": 1, "lost": -5})
        liar.flush()
        handle = await starting
        await link.ping()
        with pytest.raises(MachineFailed, match="more messages"):
            async for _ in handle.events():
                pass


async def test_an_error_of_a_guest_is_cleaned_before_anybody_sees_it() -> None:
    async with lying() as (liar, link):
        asking = asyncio.create_task(link.stat("/x"))
        liar.muxes[ChannelName.DATA].reset(await liar.opened.get(), "\x1b", "\x1b]0;title\x07" + "x" * 1900)
        liar.flush()
        with pytest.raises(MachineFailed) as caught:
            await asking
        assert caught.value.message.isprintable() and len(caught.value.message) <= 500


async def test_a_guest_cannot_ask_for_what_is_no_host_and_port() -> None:
    async with lying() as (liar, link):
        asked: list[Any] = []
        link._on_guest_stream = lambda *arguments: asked.append(arguments)
        mux = liar.muxes[ChannelName.DATA]
        for info in (
            {"op": "egress"},
            {"op": "egress", "host": "h", "port": "1"},
            {"op": "egress", "host": "h", "port": 0},
            {"op": "?"},
        ):
            stream = mux.open(info)
            liar.flush()
            assert await asyncio.wait_for(liar.heard[EventKind.RESET].get(), DEADLINE_S) == stream
        assert asked == []
