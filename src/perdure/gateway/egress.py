"""The node's egress: the only way out of a workspace. Default deny, allow list by host and port, checked after name resolution.

A program in the workspace speaks to the agent's proxy; the agent opens a stream to the node that names host and port; the node
resolves the name once, asks ``rules`` about each address, connects to exactly those it has judged (so a second answer of the
resolver changes nothing) and copies bytes. Every decision goes to the audit callback. This module never reaches the database.

Rules belong to a registered (workspace, generation). ``drop`` ends all its streams and from then on it is stale.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Protocol

from perdure.core.errors import Busy, Forbidden, InvalidRequest, MachineFailed, PerdureError, StaleGeneration, Unavailable
from perdure.core.ids import WorkspaceId
from perdure.gateway.addresses import IPAddress
from perdure.gateway.rules import NOTHING, EgressRules, Policy, not_allowed, parse_entry, parse_host, show
from perdure.gateway.streams import Generations, SocketStream, pump
from perdure.wire.node import ByteStream, Identity

#: Names with more addresses than this are not tried further: each one costs a connection attempt.
MAX_ADDRESSES = 8


class EgressRefused(Forbidden):
    """Policy says no. The proxy answers 403 with this sentence."""

    code = "egress_refused"


class EgressFailed(Unavailable):
    """Allowed, but there is no such host or it does not answer. The proxy answers 502 with this sentence."""

    code = "egress_failed"
    status = 502
    default_hint = "Check the name and that the service is up."


class Resolver(Protocol):
    async def __call__(self, name: str) -> Sequence[IPAddress]:
        """Addresses of a canonical name, best first; empty when there are none. Raises OSError when the lookup fails."""
        ...


async def resolve_by_system(name: str) -> list[IPAddress]:
    """The host's resolver (RFC 6724 order), without duplicates."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ip_address(str(sockaddr[0])) for *_, sockaddr in found))


def own_addresses() -> frozenset[IPAddress]:
    """The addresses of this host's interfaces, read from the kernel's own tables (no netlink, no other process)."""
    found: set[IPAddress] = set()
    with contextlib.suppress(FileNotFoundError):
        last = ""
        for line in Path("/proc/net/fib_trie").read_text().splitlines():
            if line.lstrip().startswith("|--"):
                last = line.split()[-1]
            elif line.strip() == "/32 host LOCAL":
                found.add(IPv4Address(last))
    with contextlib.suppress(FileNotFoundError):  # a host without IPv6
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        found.update(IPv6Address(bytes.fromhex(line.split()[0])) for line in lines)
    return frozenset(found)


class EgressDecision(StrEnum):
    ALLOWED = "allowed"
    REFUSED = "refused"
    FAILED = "failed"  # allowed, but no connection came about
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class EgressEvent:
    """One line of the audit. Byte counts are of this connection, set when it ENDED."""

    identity: Identity
    host: str
    port: int
    decision: EgressDecision
    reason: str = ""
    address: str | None = None
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(slots=True)
class EgressUsage:
    """Totals of one workspace since its registration at this node, over all generations. Sent is out of the workspace."""

    opened: int = 0
    refused: int = 0
    failed: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EgressLimits:
    streams_per_workspace: int = 256
    resolve_deadline_s: float = 5.0
    connect_deadline_s: float = 10.0
    foresight_s: float = 1.0  # what a create waits for names to be looked up
    next_address_after_s: float = 0.25  # RFC 8305: start the next attempt while the last one is still pending


class GuestRequest(Protocol):
    """A stream that a program in the workspace asks for. Exactly one of the two is called."""

    async def accept(self) -> ByteStream:
        """Tell the program that it is connected."""
        ...

    async def refuse(self, status: int, reason: str) -> None:
        """``status`` is the proxy's HTTP status, ``reason`` a sentence for the program."""
        ...


@dataclass(slots=True)
class Outbound:
    """An open connection and the address it was pinned to."""

    stream: SocketStream
    address: IPAddress


async def _dial(address: IPAddress, port: int) -> Outbound:
    # A numeric host: nothing is resolved again.
    reader, writer = await asyncio.open_connection(str(address), port, limit=65536)
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Outbound(SocketStream(reader, writer), address)


def interleave(addresses: Iterable[IPAddress]) -> list[IPAddress]:
    """Alternate families, beginning with the first address's, so that a broken one delays by one attempt only (RFC 8305 §4)."""
    queues: dict[int, deque[IPAddress]] = {}
    for address in addresses:
        queues.setdefault(address.version, deque()).append(address)
    order: list[IPAddress] = []
    while queues:
        for version in list(queues):
            order.append(queues[version].popleft())
            if not queues[version]:
                del queues[version]
    return order


class Dialer:
    """Opens allowed connections. ``own`` is asked at each dial, because a node's addresses change."""

    def __init__(
        self,
        operator: EgressRules = NOTHING,
        *,
        limits: EgressLimits | None = None,
        resolver: Resolver = resolve_by_system,
        own: Callable[[], frozenset[IPAddress]] = own_addresses,
        setting: str = "PERDURE_EGRESS_PRIVATE_ALLOW",
    ) -> None:
        self._operator, self._resolve, self._own, self._setting = operator, resolver, own, setting
        self.limits = limits or EgressLimits()

    async def open(self, host: str, port: int, rules: EgressRules) -> Outbound:
        """Connect to what ``rules`` and the operator allow. Raises EgressRefused or EgressFailed with a sentence."""
        try:
            target = parse_host(host)
        except InvalidRequest as error:
            raise EgressRefused(error.message, hint=error.hint) from error
        if not 1 <= port <= 65535:
            raise EgressRefused(f"Port {port} is not between 1 and 65535.")
        if not rules.could_allow(target, port):
            raise EgressRefused(not_allowed(target, port))
        addresses = [target] if not isinstance(target, str) else await self._lookup(target)
        policy = Policy(rules, self._operator, self._own(), self._setting)
        verdicts = {address: policy.refuses(target, address, port) for address in addresses}
        allowed = [address for address, refusal in verdicts.items() if refusal is None]
        if not allowed:
            raise EgressRefused(next(refusal for refusal in verdicts.values() if refusal is not None))
        return await self._connect(f"{show(target)}:{port}", interleave(allowed)[:MAX_ADDRESSES], port)

    async def foresee(self, allow: Iterable[str]) -> list[str]:
        """Why entries of an allow list lead nowhere as the operator's list is now, a sentence for each. Names are looked up one
        after the other, so that a resolver that hangs costs one thread; one that is not found in time says nothing."""
        entries = sorted(map(parse_entry, allow), key=lambda entry: entry.name is not None)
        policy = Policy(EgressRules(frozenset(entries)), self._operator, self._own(), self._setting)
        said: list[str | None] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.foresight_s):
                for entry in entries:
                    said.append(policy.refuses_all(entry, await self._found(entry.name)))
        return [sentence for sentence in said if sentence is not None]

    async def _found(self, name: str | None) -> Sequence[IPAddress]:
        try:
            return await self._resolve(name) if name is not None else ()
        except (OSError, UnicodeError):
            return ()

    async def _lookup(self, name: str) -> Sequence[IPAddress]:
        try:
            async with asyncio.timeout(self.limits.resolve_deadline_s):
                addresses = await self._resolve(name)
        except TimeoutError:
            raise EgressFailed(f"Looking up {name} took longer than {self.limits.resolve_deadline_s:g} s.") from None
        except (OSError, UnicodeError) as error:
            raise EgressFailed(f"The node cannot find the host {name}.", internal=repr(error)) from error
        if not addresses:
            raise EgressFailed(f"The host {name} has no address.")
        return addresses

    async def _connect(self, shown: str, addresses: Sequence[IPAddress], port: int) -> Outbound:
        attempts: set[asyncio.Task[Outbound]] = set()
        try:
            async with asyncio.timeout(self.limits.connect_deadline_s):
                return await self._race(shown, list(addresses), port, attempts)
        except TimeoutError:
            raise EgressFailed(f"{shown} did not answer within {self.limits.connect_deadline_s:g} s.") from None
        finally:
            for attempt in attempts:
                attempt.cancel()
            for late in await asyncio.gather(*attempts, return_exceptions=True):
                if isinstance(late, Outbound):
                    late.stream.abort()

    async def _race(self, shown: str, left: list[IPAddress], port: int, attempts: set[asyncio.Task[Outbound]]) -> Outbound:
        """Attempts start one after the other; the first to connect is taken out of ``attempts``, whose rest the caller ends."""
        failure: BaseException | None = None
        while left or attempts:
            if left:
                attempts.add(asyncio.create_task(_dial(left.pop(0), port)))
            delay = self.limits.next_address_after_s if left else None
            done, _ = await asyncio.wait(attempts, timeout=delay, return_when=asyncio.FIRST_COMPLETED)
            for attempt in done:
                failure = attempt.exception()
                if failure is None:
                    attempts.remove(attempt)
                    return attempt.result()
                if not isinstance(failure, OSError):
                    raise failure
                attempts.remove(attempt)
        reason = (failure.strerror if isinstance(failure, OSError) else None) or str(failure)
        raise EgressFailed(f"{shown} cannot be reached: {reason}.", internal=repr(failure))


@dataclass(slots=True)
class _Registered:
    identity: Identity
    rules: EgressRules


Audit = Callable[[EgressEvent], None]


def _no_audit(_event: EgressEvent) -> None:
    return None


@dataclass(slots=True)
class _Flow:
    """Bytes of one connection, added to the workspace's as they pass."""

    usage: EgressUsage
    sent_bytes: int = 0
    received_bytes: int = 0

    def sent(self, count: int) -> None:
        self.sent_bytes += count
        self.usage.sent_bytes += count

    def received(self, count: int) -> None:
        self.received_bytes += count
        self.usage.received_bytes += count


@dataclass(slots=True)
class EgressGateway:
    """Serves the guest-opened streams of every workspace on this node."""

    dialer: Dialer
    audit: Audit = _no_audit
    _registered: dict[tuple[WorkspaceId, int], _Registered] = field(default_factory=dict)
    _usage: dict[WorkspaceId, EgressUsage] = field(default_factory=dict)
    _running: Generations = field(init=False)

    def __post_init__(self) -> None:
        self._running = Generations(self.dialer.limits.streams_per_workspace, "outbound connections")

    def register(self, identity: Identity, rules: EgressRules) -> None:
        """Let this generation out, within ``rules``. Called by the host before the guest can ask."""
        key = (identity.workspace_id, identity.generation)
        self._registered[key] = _Registered(identity, rules)
        self._running.register(*key)

    def open_streams(self, workspace_id: WorkspaceId, generation: int) -> int:
        return self._running.count(workspace_id, generation)

    def usage(self, workspace_id: WorkspaceId) -> EgressUsage:
        return self._usage.setdefault(workspace_id, EgressUsage())

    def forget(self, workspace_id: WorkspaceId) -> EgressUsage:
        """Take a workspace's totals away, for whoever records them."""
        return self._usage.pop(workspace_id, EgressUsage())

    async def drop(self, workspace_id: WorkspaceId, generation: int) -> int:
        """End every stream of a generation and refuse it from now on; returns how many there were. Safe twice."""
        self._registered.pop((workspace_id, generation), None)
        return await self._running.drop(workspace_id, generation)

    async def serve(self, identity: Identity, host: str, port: int, request: GuestRequest) -> None:
        """Decide, connect, accept, copy until both sides have ended. Never raises for what guest or network do."""
        key = (identity.workspace_id, identity.generation)
        try:
            self._running.check(*key)
        except (StaleGeneration, Busy) as error:  # nothing was opened
            self._report(identity, host, port, EgressDecision.REFUSED, error.message)
            await self._refuse(request, error)
            return
        with self._running.hold(*key):
            await self._serve(self._registered[key], host, port, request)

    async def _serve(self, registered: _Registered, host: str, port: int, request: GuestRequest) -> None:
        identity, usage = registered.identity, self.usage(registered.identity.workspace_id)
        try:
            outbound = await self.dialer.open(host, port, registered.rules)
        except EgressRefused as refusal:
            usage.refused += 1
            self._report(identity, host, port, EgressDecision.REFUSED, refusal.message)
            await self._refuse(request, refusal)
            return
        except EgressFailed as failure:
            usage.failed += 1
            self._report(identity, host, port, EgressDecision.FAILED, failure.message)
            await self._refuse(request, failure)
            return
        usage.opened += 1
        self._report(identity, host, port, EgressDecision.ALLOWED, address=outbound.address)
        flow, reason = _Flow(usage), "dropped"
        try:
            reason = await self._copy(request, outbound, flow)
        finally:
            ended = EgressEvent(
                identity, host, port, EgressDecision.ENDED, reason, str(outbound.address), flow.sent_bytes, flow.received_bytes
            )
            self.audit(ended)

    @staticmethod
    async def _refuse(request: GuestRequest, error: PerdureError) -> None:
        with contextlib.suppress(MachineFailed, StaleGeneration):  # the program, or its machine, left before the answer
            await request.refuse(error.status, error.message)

    @staticmethod
    async def _copy(request: GuestRequest, outbound: Outbound, flow: _Flow) -> str:
        guest: ByteStream | None = None
        try:
            guest = await request.accept()
            await pump(guest, outbound.stream, flow.sent, flow.received)
        except (MachineFailed, StaleGeneration) as broken:
            outbound.stream.abort()
            return broken.message
        except asyncio.CancelledError:
            outbound.stream.abort()
            raise
        finally:
            await outbound.stream.close()
            if guest is not None:
                await guest.close()
        return "closed"

    def _report(
        self,
        identity: Identity,
        host: str,
        port: int,
        decision: EgressDecision,
        reason: str = "",
        address: IPAddress | None = None,
    ) -> None:
        self.audit(EgressEvent(identity, host, port, decision, reason, str(address) if address else None))
