"""Egress over real sockets: what is refused is never dialled, what is dialled was judged, bytes flow, and drop ends all."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest

from perdure.core.errors import MachineFailed
from perdure.core.ids import TenantId, WorkspaceId
from perdure.gateway.addresses import IPAddress
from perdure.gateway.egress import (
    Dialer,
    EgressDecision,
    EgressEvent,
    EgressFailed,
    EgressGateway,
    EgressLimits,
    EgressRefused,
    interleave,
    own_addresses,
    resolve_by_system,
)
from perdure.gateway.rules import EgressRules
from perdure.gateway.streams import SocketStream
from perdure.wire.node import ByteStream, Identity

DEADLINE_S = 30.0


def identity(generation: int = 1, workspace: str = "ws_a") -> Identity:
    return Identity(WorkspaceId(workspace), TenantId("ten_default"), generation, "a", "0" * 32)


class Server:
    """A TCP server on loopback that counts its connections."""

    def __init__(self) -> None:
        self.port = 0
        self.connections = 0
        self.lost = asyncio.Event()


@asynccontextmanager
async def serving(host: str = "127.0.0.1") -> AsyncIterator[Server]:
    """Echoes until the end of stream, then says how much it got."""
    state = Server()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state.connections += 1
        total = 0
        try:
            while data := await reader.read(65536):
                total += len(data)
                writer.write(data)
                await writer.drain()
            writer.write(b"|%d" % total)
            await writer.drain()
        except OSError:
            pass
        finally:
            state.lost.set()
            writer.close()

    server = await asyncio.start_server(handle, host, 0)
    state.port = server.sockets[0].getsockname()[1]
    async with server:
        yield state


class Program:
    """A program in a workspace and the stream the agent made for it: one end is the test's, the other the gateway's."""

    def __init__(self) -> None:
        self.refused: tuple[int, str] | None = None
        self.accepted = asyncio.Event()
        self._ours, self._theirs = socket.socketpair()
        self.stream: SocketStream

    async def accept(self) -> ByteStream:
        self.stream = SocketStream(*await asyncio.open_connection(sock=self._ours))
        theirs = SocketStream(*await asyncio.open_connection(sock=self._theirs))
        self.accepted.set()
        return theirs

    async def refuse(self, status: int, reason: str) -> None:
        self.refused = (status, reason)
        self._ours.close()
        self._theirs.close()

    async def read_all(self) -> bytes:
        parts = []
        while data := await self.stream.read():
            parts.append(data)
        return b"".join(parts)


class Fixture:
    """A gateway whose operator opens the given destinations, with every event it reported."""

    def __init__(self, *operator: str, limits: EgressLimits | None = None, resolver: Callable[..., object] | None = None) -> None:
        self.events: list[EgressEvent] = []
        dialer = Dialer(
            EgressRules.parse(operator),
            limits=limits,
            resolver=resolver or resolve_by_system,  # type: ignore[arg-type]
        )
        self.gateway = EgressGateway(dialer, self.events.append)

    def decisions(self) -> list[EgressDecision]:
        return [event.decision for event in self.events]

    @asynccontextmanager
    async def connected(self, who: Identity, host: str, port: int) -> AsyncIterator[Program]:
        program = Program()
        task = asyncio.create_task(self.gateway.serve(who, host, port, program))
        accepted = asyncio.create_task(program.accepted.wait())
        try:
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.wait({task, accepted}, return_when=asyncio.FIRST_COMPLETED)
                yield program
        finally:
            accepted.cancel()
            with suppress(AttributeError):
                await program.stream.close()
            await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), DEADLINE_S)


class FakeResolver:
    """Answers from a script, one answer a call; the last one repeats."""

    def __init__(self, *answers: list[str]) -> None:
        self._answers = [list(map(ip_address, answer)) for answer in answers]
        self.calls = 0

    async def __call__(self, _name: str) -> list[IPAddress]:
        self.calls += 1
        return self._answers[min(self.calls, len(self._answers)) - 1]


async def test_bytes_flow_both_ways_and_half_close_is_passed_on() -> None:
    async with serving() as server:
        allow = f"127.0.0.1:{server.port}"
        fixture = Fixture(allow)
        fixture.gateway.register(identity(), EgressRules.parse([allow]))
        payload = bytes(range(256)) * 40_000  # 10 MB, more than all buffers together
        async with fixture.connected(identity(), "127.0.0.1", server.port) as program:

            async def send() -> None:
                await program.stream.write(payload)
                await program.stream.close_write()

            got, _ = await asyncio.gather(program.read_all(), send())
        assert hashlib.sha256(got).digest() == hashlib.sha256(payload + b"|%d" % len(payload)).digest()
    usage = fixture.gateway.usage(identity().workspace_id)
    assert (usage.opened, usage.sent_bytes, usage.received_bytes) == (1, len(payload), len(got))
    assert fixture.decisions() == [EgressDecision.ALLOWED, EgressDecision.ENDED]
    assert (fixture.events[-1].sent_bytes, fixture.events[-1].received_bytes) == (len(payload), len(got))
    assert fixture.gateway.open_streams(identity().workspace_id, 1) == 0


@pytest.mark.parametrize(("workspace", "operator"), [(True, False), (False, True), (False, False)])
async def test_a_server_on_the_node_needs_both_lists(workspace: bool, operator: bool) -> None:
    async with serving() as server:
        entry = f"127.0.0.1:{server.port}"
        fixture = Fixture(*([entry] if operator else []))
        fixture.gateway.register(identity(), EgressRules.parse([entry] if workspace else []))
        async with fixture.connected(identity(), "127.0.0.1", server.port) as program:
            assert program.refused is not None
            assert program.refused[0] == 403
            assert "is refused" in program.refused[1]
        assert server.connections == 0
        assert fixture.decisions() == [EgressDecision.REFUSED]
        assert fixture.gateway.usage(identity().workspace_id).refused == 1


async def test_a_name_that_turns_to_the_node_after_the_check_changes_nothing() -> None:
    """DNS rebinding: the resolver would answer 127.0.0.1 the second time; there is no second time."""
    async with serving("127.0.0.2") as judged:
        resolver = FakeResolver(["127.0.0.2"], ["127.0.0.1"])
        name = f"rebind.example:{judged.port}"
        fixture = Fixture(name, resolver=resolver)
        fixture.gateway.register(identity(), EgressRules.parse([name]))
        async with fixture.connected(identity(), "rebind.example", judged.port) as program:
            await program.stream.write(b"x")
            await program.stream.close_write()
            assert await program.read_all() == b"x|1"
        assert (resolver.calls, judged.connections) == (1, 1)
        assert fixture.events[0].address == "127.0.0.2"


async def test_a_public_name_that_answers_with_a_private_address_is_refused() -> None:
    async with serving() as server:
        fixture = Fixture(resolver=FakeResolver(["127.0.0.1", "::1", "169.254.169.254"]))
        fixture.gateway.register(identity(), EgressRules.parse([f"innocent.example:{server.port}"]))
        async with fixture.connected(identity(), "innocent.example", server.port) as program:
            assert program.refused is not None
            assert "loopback" in program.refused[1]
        assert server.connections == 0


async def test_of_a_mixed_answer_only_the_allowed_part_is_dialled() -> None:
    async with serving("127.0.0.2") as good, serving("127.0.0.1"):
        entry = f"127.0.0.2:{good.port}"
        fixture = Fixture(entry, resolver=FakeResolver(["127.0.0.1", "127.0.0.2"]))
        opened = await fixture.gateway.dialer.open("mixed.example", good.port, EgressRules.parse([entry]))
        assert opened.address == IPv4Address("127.0.0.2")
        await opened.stream.close()


async def test_a_name_on_no_list_is_not_even_looked_up() -> None:
    resolver = FakeResolver(["127.0.0.1"])
    dialer = Dialer(resolver=resolver)
    with pytest.raises(EgressRefused):
        await dialer.open("secret-in-a-label.example", 443, EgressRules.parse(["other.example:443"]))
    assert resolver.calls == 0


async def test_a_dead_family_does_not_hide_the_living_one() -> None:
    async with serving() as server:
        entries = [f"two.example:{server.port}"]
        dialer = Dialer(EgressRules.parse(entries), resolver=FakeResolver(["::1", "127.0.0.1"]))
        opened = await dialer.open("two.example", server.port, EgressRules.parse(entries))
        assert opened.address == IPv4Address("127.0.0.1")
        await opened.stream.close()


async def test_a_silent_address_gives_way_to_the_next_and_everything_to_the_deadline() -> None:
    """A listener whose queue is full neither accepts nor refuses: the second address answers, alone it ends in a sentence."""
    with socket.socket() as silent, socket.socket() as filler:
        silent.bind(("127.0.0.3", 0))
        silent.listen(0)
        port = silent.getsockname()[1]
        filler.setblocking(False)
        held = [filler]
        for _ in range(4):
            extra = socket.socket()
            extra.setblocking(False)
            extra.connect_ex(("127.0.0.3", port))
            held.append(extra)
        server = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", port)
        entries = EgressRules.parse([f"slow.example:{port}"])
        try:
            both = Dialer(entries, resolver=FakeResolver(["127.0.0.3", "127.0.0.1"]))
            opened = await both.open("slow.example", port, entries)
            assert opened.address == IPv4Address("127.0.0.1")
            await opened.stream.close()
            alone = Dialer(entries, limits=EgressLimits(connect_deadline_s=0.3), resolver=FakeResolver(["127.0.0.3"]))
            with pytest.raises(EgressFailed, match=r"did not answer within 0\.3 s"):
                await alone.open("slow.example", port, entries)
        finally:
            server.close()
            for extra in held:
                extra.close()


async def test_failures_to_connect_are_said_plainly_and_are_not_refusals() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fixture = Fixture(f"127.0.0.1:{port}")
    fixture.gateway.register(identity(), EgressRules.parse([f"127.0.0.1:{port}", "no-such-host.invalid:443"]))
    async with fixture.connected(identity(), "127.0.0.1", port) as program:
        assert program.refused is not None
        assert program.refused[0] == 502
        assert f"127.0.0.1:{port} cannot be reached" in program.refused[1]
    async with fixture.connected(identity(), "no-such-host.invalid", 443) as program:
        assert program.refused is not None
        assert program.refused[0] == 502
        assert "no-such-host.invalid" in program.refused[1]
    assert fixture.decisions() == [EgressDecision.FAILED, EgressDecision.FAILED]


async def test_a_resolver_that_hangs_ends_at_its_deadline() -> None:
    async def never(_name: str) -> list[IPAddress]:
        await asyncio.Event().wait()
        return []

    dialer = Dialer(limits=EgressLimits(resolve_deadline_s=0.05), resolver=never)
    with pytest.raises(EgressFailed, match="Looking up"):
        await dialer.open("slow.example", 443, EgressRules.parse(["slow.example:443"]))


async def test_what_will_be_refused_is_foreseen_and_a_resolver_that_hangs_hides_no_address() -> None:
    async def slow(name: str) -> list[IPAddress]:
        if name == "slow.example":
            await asyncio.Event().wait()
        return [ip_address("10.0.0.1")] if name == "in.example" else []

    dialer = Dialer(EgressRules.parse(["10.0.0.3:80"]), limits=EgressLimits(foresight_s=0.05), resolver=slow)
    allow = ["slow.example:80", "in.example:80", "none.example:80", "10.0.0.3:80", "10.0.0.2:80"]
    (only,) = await dialer.foresee(allow)
    assert only.startswith("10.0.0.2:80 is refused")
    assert [one.partition(" ")[0] for one in await dialer.foresee(allow[1:])] == ["10.0.0.2:80", "in.example:80"]


@pytest.mark.parametrize("host", ["", "127.1", "2130706433", "0x7f.1", "a b", "fe80::1%lo", "x" * 300, "\x00", "a:b"])
async def test_a_host_that_is_none_is_refused_before_any_lookup(host: str) -> None:
    resolver = FakeResolver(["127.0.0.1"])
    with pytest.raises(EgressRefused):
        await Dialer(resolver=resolver).open(host, 80, EgressRules.parse(["0.0.0.0/0:80"]))
    assert resolver.calls == 0


@pytest.mark.parametrize("port", [0, -1, 65536])
async def test_a_port_that_is_none_is_refused(port: int) -> None:
    with pytest.raises(EgressRefused, match="not between"):
        await Dialer().open("a.example", port, EgressRules.parse(["a.example:80"]))


async def test_drop_ends_a_generation_at_once_and_leaves_the_others() -> None:
    async with serving() as server, serving() as other:
        entries = [f"127.0.0.1:{server.port}", f"127.0.0.1:{other.port}"]
        fixture = Fixture(*entries)
        old, new = identity(1), identity(2)
        for who in (old, new):
            fixture.gateway.register(who, EgressRules.parse(entries))
        async with (
            fixture.connected(old, "127.0.0.1", server.port) as dropped,
            fixture.connected(new, "127.0.0.1", other.port) as kept,
        ):
            await kept.stream.write(b"still")
            assert await fixture.gateway.drop(old.workspace_id, 1) == 1
            with suppress(MachineFailed):  # reset or end of stream, as the agent sees it
                assert await dropped.stream.read() == b""
            await asyncio.wait_for(server.lost.wait(), DEADLINE_S)
            await kept.stream.close_write()
            assert await kept.read_all() == b"still|5"
        assert await fixture.gateway.drop(old.workspace_id, 1) == 0
        async with fixture.connected(old, "127.0.0.1", server.port) as late:
            assert late.refused is not None
            assert late.refused[0] == 409
        assert fixture.gateway.open_streams(old.workspace_id, 1) == 0


async def test_a_generation_that_was_never_registered_reaches_nothing() -> None:
    fixture = Fixture()
    async with fixture.connected(identity(7), "example.org", 443) as program:
        assert program.refused is not None
        assert "not running here" in program.refused[1]


async def test_streams_of_one_workspace_are_limited_and_another_is_unharmed() -> None:
    async with serving() as server:
        entry = f"127.0.0.1:{server.port}"
        fixture = Fixture(entry, limits=EgressLimits(streams_per_workspace=1))
        for workspace in ("ws_a", "ws_b"):
            fixture.gateway.register(identity(workspace=workspace), EgressRules.parse([entry]))
        async with fixture.connected(identity(), "127.0.0.1", server.port):
            async with fixture.connected(identity(), "127.0.0.1", server.port) as second:
                assert second.refused is not None
                assert second.refused[0] == 503
                assert "1 outbound connections open" in second.refused[1]
            async with fixture.connected(identity(workspace="ws_b"), "127.0.0.1", server.port) as elsewhere:
                assert elsewhere.refused is None
        async with fixture.connected(identity(), "127.0.0.1", server.port) as again:
            assert again.refused is None


async def test_a_slow_reader_holds_the_sender_back() -> None:
    """The program reads nothing: the server's endless data stops once the buffers between them are full."""
    sent = 0
    stalled = asyncio.Event()

    async def flood(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        try:
            while True:
                writer.write(b"\0" * 65536)
                drain = asyncio.ensure_future(writer.drain())
                if not (await asyncio.wait({drain}, timeout=1.0))[0]:
                    stalled.set()
                await drain
                sent += 65536
                if sent > 256 << 20:
                    return
        except OSError:
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(flood, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    fixture = Fixture(f"127.0.0.1:{port}")
    fixture.gateway.register(identity(), EgressRules.parse([f"127.0.0.1:{port}"]))
    async with server, fixture.connected(identity(), "127.0.0.1", port):
        await asyncio.wait_for(stalled.wait(), DEADLINE_S)
        assert sent < 64 << 20
        await fixture.gateway.drop(identity().workspace_id, 1)


def test_families_alternate_beginning_with_the_preferred_one() -> None:
    six = [IPv6Address("::1"), IPv6Address("::2"), IPv6Address("::3")]
    four = [IPv4Address("10.0.0.1")]
    assert interleave([*six, *four]) == [six[0], four[0], six[1], six[2]]
    assert interleave([]) == []


def test_own_addresses_hold_loopback_and_the_address_the_host_routes_with() -> None:
    own = own_addresses()
    assert IPv4Address("127.0.0.1") in own
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; picks the source address
        except OSError:
            return  # a host without a route has no other address to know
        assert ip_address(probe.getsockname()[0]) in own
