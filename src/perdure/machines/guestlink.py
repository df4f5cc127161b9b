"""The host's link to one guest at one generation: handshake, repairs, freeze and thaw, and everything a workspace is asked to do.

    NEW ──open──► HELD ──wake──► AWAKE ──retire/close──► GONE
                   ▲ agent started anew: both channels again, the same wake
                   └──────────────┘

``GuestLink`` implements wire.node.Guest. Every wait has a deadline; a silent guest is GuestUnresponsive, a link whose machine
is gone MachineDied, and one whose generation has moved on StaleGeneration. ``closed`` is done when the link is gone for good.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from perdure.core.clock import Clock, SystemClock
from perdure.core.errors import GuestUnresponsive, MachineDied, MachineFailed, PerdureError, StaleGeneration
from perdure.core.ids import ExecId
from perdure.machines import guestlink_hooks
from perdure.machines.driver import ChannelName
from perdure.machines.guestlink_channel import Channel
from perdure.machines.guestlink_exec import integer
from perdure.machines.guestlink_hooks import HookLimits
from perdure.machines.guestlink_program import GuestProgram
from perdure.machines.guestlink_stream import LinkStream, clean
from perdure.wire.guest import PROTOCOL
from perdure.wire.guest.ops import Call, Note, Op
from perdure.wire.node import HookRun, Identity

Connect = Callable[[ChannelName], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
#: A stream that a program in the guest asks for: ("egress", {"host", "port"}) or ("api", {}). The callee answers with
#: ``await stream.accept()`` or ``await stream.refuse(status, reason)``; it is called in the reading task and must not block.
OnGuestStream = Callable[[Literal["egress", "api"], dict[str, Any], LinkStream], None]

#: The guest's clock is stepped until it is this close to the host's.
CLOCK_TOLERANCE_NS = 50_000_000
_CLOCK_TRIES = 5
_ENTROPY_BYTES = 64
#: How long users' processes have to stand still for a capture.
QUIESCE_S = 0.1
#: How often a link that broke is mended when it breaks again while it is.
_RECOVERIES = 3


@dataclass(frozen=True, slots=True)
class Hello:
    """Who answered. ``problems``: sentences about what is wrong with the workspace's disk or ports, for logs and reports."""

    protocol: int
    agent: str
    boot_id: str
    instance: str
    generation: int  # the last one it was told; 0 after a boot
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WakeRequest:
    """What a guest must become. ``new_identity`` writes host name, machine id and hosts file anew and drops ssh host keys."""

    identity: Identity
    new_identity: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    proxy: bool = True  # point HTTP(S)_PROXY of user programs at the agent
    report: Mapping[str, Any] | None = None  # what of the report is known, for resume.json; None: none is written, no hook runs
    hooks: HookLimits = field(default_factory=HookLimits)


@dataclass(frozen=True, slots=True)
class WakeReport:
    """What the guest repaired. Seconds; a positive step went forward."""

    clock_step_s: float
    clock_uncertainty_s: float
    connections_dropped: int
    execs_running: tuple[ExecId, ...]
    execs_lost: tuple[ExecId, ...]
    problems: tuple[str, ...]  # repairs that failed, one sentence each
    hooks: tuple[HookRun, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkActivity:
    """What of a guest is in use. ``open_execs`` counts attached commands, ``running_execs`` all that run, watched or not, but for
    shells on terminals where nobody is and nothing runs (ADR 27)."""

    open_execs: int
    running_execs: int
    open_streams: int
    open_outbound: int
    idle_for_s: float
    operations: int  # grows with every request that may have changed something


class GuestLink(GuestProgram):
    """One guest, one generation. Construct, ``open``, ``wake``; then use it as wire.node.Guest."""

    def __init__(
        self,
        connect: Connect,
        *,
        generation: int = 0,
        on_guest_stream: OnGuestStream | None = None,
        clock: Clock | None = None,
        unresponsive_s: float = 20.0,
    ) -> None:
        super().__init__(unresponsive_s, clock or SystemClock())
        self.generation = generation
        self.hello: Hello | None = None
        self.closed: asyncio.Event = asyncio.Event()
        self.closed_because = ""
        self._on_guest_stream = on_guest_stream
        self._control = Channel(
            "control",
            lambda: connect(ChannelName.CONTROL),
            on_open=self._refuse_stream,
            on_note=self._on_note,
            on_broken=self._on_broken,
        )
        self._data = Channel(
            "data",
            lambda: connect(ChannelName.DATA),
            on_open=self._on_open,
            on_note=lambda _note: None,
            on_broken=self._on_broken,
        )
        self._wake_request: WakeRequest | None = None
        self._clock_bounds: tuple[int, int] | None = None
        self._running: set[ExecId] = set()
        self._at_prompt: set[ExecId] = set()  # of these, shells that waited for somebody to come, at the last ping
        self._recovery: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._retired = False

    # ------------------------------------------------------------------------------------------------------- life

    async def open(self, deadline_s: float) -> Hello:
        """Connect both channels, resynchronise, and shake hands. Raises GuestUnresponsive, MachineFailed for another protocol."""
        hello = await self._connect(deadline_s)
        self._ready.set()
        return hello

    async def _connect(self, deadline_s: float) -> Hello:
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.gather(self._control.open(), self._data.open())
                hello = await self._say_hello(deadline_s)
        except TimeoutError as error:
            await self._hang_up("no answer to the handshake")
            raise GuestUnresponsive(
                f"The workspace's agent did not answer within {deadline_s:g} s.",
                hint="Retry, rewind to an earlier snapshot, or boot from its disk.",
            ) from error
        except OSError as error:
            raise MachineDied("The machine does not accept a connection.", internal=str(error)) from error
        self._check_whole()
        return hello

    def _check_whole(self) -> None:
        """Raises MachineDied when a channel broke after it was opened: nobody hears of it before the link is ready."""
        if self._control.is_broken or self._data.is_broken:
            raise MachineDied("The connection to the workspace broke again.", ambiguous=True)

    async def _say_hello(self, deadline_s: float) -> Hello:
        sent = self._wall_ns()
        reply = await self._control.call({"op": Call.HELLO, "protocol": PROTOCOL, "generation": self.generation}, deadline_s)
        guest, received = integer(reply.get("wall_ns")), self._wall_ns()
        self._clock_bounds = (sent - guest, received - guest)
        if reply.get("protocol") != PROTOCOL:
            raise MachineFailed(
                f"The workspace's agent speaks protocol {clean(str(reply.get('protocol')))}, this node {PROTOCOL}.",
                hint="Boot it from its disk with the current agent: its memory holds an agent that this node cannot talk to.",
            )
        self.hello = Hello(
            protocol=PROTOCOL,
            agent=clean(reply.get("agent")),
            boot_id=clean(reply.get("boot_id")),
            instance=clean(reply.get("instance")),
            generation=integer(reply.get("generation")),
            problems=_sentences(reply.get("problems")),
        )
        return self.hello

    async def close(self, why: str = "closed by the node") -> None:
        """Drop both connections; everything in flight fails. Safe twice."""
        recovery, self._recovery = self._recovery, None
        if recovery is not None and recovery is not asyncio.current_task():
            recovery.cancel()
            await asyncio.gather(recovery, return_exceptions=True)
        self._end(why)
        await self._hang_up(why)

    async def retire(self) -> None:
        """The generation has moved on: everything asked of this link from now on raises StaleGeneration."""
        self._retired = True
        await self.close("a newer generation exists")

    def _end(self, why: str) -> None:
        if not self.closed.is_set():
            self.closed_because = why
            self.closed.set()
        self._ready.set()  # nobody waits for what will not come

    async def _hang_up(self, why: str) -> None:
        await self._control.close(why)
        await self._data.close(why)

    def check(self) -> None:
        """Raise when the link cannot be used any more."""
        if self._retired:
            raise StaleGeneration(f"Generation {self.generation} of this workspace is over.")
        if self.closed.is_set():
            raise MachineDied(
                "The connection to the workspace is gone: its machine ended, or starts anew.",
                hint="Try again: that wakes it. Whether a command had begun, 'perdure log' and its own traces tell.",
                internal=self.closed_because,
            )

    # --------------------------------------------------------------------------------------------------- recovery

    def _on_broken(self, why: str) -> None:
        """A channel broke: the agent started anew, or bytes were lost, or the machine is gone."""
        if self.closed.is_set() or not self._ready.is_set():
            return  # it is over, or whoever opens the link sees it
        self._ready.clear()
        self._recovery = asyncio.create_task(self._recover(why), name="guest link recovery")

    async def _recover(self, why: str) -> None:
        for left in reversed(range(_RECOVERIES)):
            try:
                await self._reconnect()
            except PerdureError as error:
                if left and isinstance(error, MachineDied):
                    continue  # it broke once more; a machine that is dead says so each time at once
                self._end(f"{why}; {error.message}")
                await self._hang_up(why)
            return

    async def _reconnect(self) -> None:
        """Both channels and the same wake once more; nobody is let in before it is told."""
        before = self.hello
        await self._connect(self._unresponsive_s)
        if before is None or self.hello is None or before.instance != self.hello.instance:
            self._running.clear()
        if self._wake_request is not None:
            await self._wake(self._wake_request, first=False, deadline_s=self._unresponsive_s)
        self._check_whole()
        self._ready.set()

    async def _await_ready(self) -> None:
        self.check()
        if not self._ready.is_set():
            try:
                async with asyncio.timeout(self._unresponsive_s):
                    await self._ready.wait()
            except TimeoutError as error:
                raise GuestUnresponsive("The connection to the workspace has not come back.") from error
        self.check()

    # ---------------------------------------------------------------------------------------------------- control

    async def _call(self, request: dict[str, Any], deadline_s: float | None = None) -> dict[str, Any]:
        await self._await_ready()
        return await self._control.call(request, deadline_s or self._unresponsive_s)

    def _wall_ns(self) -> int:
        return int(self._clock.now().timestamp() * 1_000_000) * 1000

    async def wake(self, request: WakeRequest, deadline_s: float | None = None) -> WakeReport:
        """Repair clock, randomness, identity and environment, drop stale connections, write the report and run hooks where the
        request has one, thaw the users' processes."""
        self.generation = request.identity.generation
        await self._await_ready()
        return await self._wake(request, first=True, deadline_s=deadline_s or self._unresponsive_s)

    async def _wake(self, request: WakeRequest, *, first: bool, deadline_s: float) -> WakeReport:
        """``first``: of this generation; what is done once in it is not done again."""
        low, high = self._clock_bounds or (None, None)
        telling = guestlink_hooks.telling(request.report, request.hooks) if first else {}
        sent = self._wall_ns()
        reply = await self._control.call(
            {
                "op": Call.WAKE,
                "generation": request.identity.generation,
                "hostname": request.identity.hostname,
                "machine_id": request.identity.machine_id,
                "new_identity": request.new_identity and first,
                "entropy": os.urandom(_ENTROPY_BYTES).hex(),
                "environment": dict(request.environment),
                "proxy": request.proxy,
                "clock": {"host_ns": sent, "lo_ns": low, "hi_ns": high},
                **telling,
            },
            deadline_s + (request.hooks.all_s + guestlink_hooks.KILLING_S if telling else 0),
        )
        self._wake_request = request
        self._running = {ExecId(item) for item in reply.get("running") or () if isinstance(item, str)}
        step, uncertainty = await self._settle_clock(sent, reply, deadline_s)
        self._touch()
        return WakeReport(
            clock_step_s=(integer(reply.get("clock_step_ns")) + step) / 1e9,
            clock_uncertainty_s=uncertainty / 1e9,
            connections_dropped=integer(reply.get("dropped")),
            execs_running=tuple(sorted(self._running)),
            execs_lost=tuple(ExecId(clean(item)) for item in reply.get("lost") or () if isinstance(item, str)),
            problems=(*_sentences(reply.get("failed")), *guestlink_hooks.silence(telling, reply)),
            hooks=guestlink_hooks.runs(reply.get("hooks")),
        )

    async def _settle_clock(self, sent: int, reply: dict[str, Any], deadline_s: float) -> tuple[int, int]:
        """Step the guest's clock until an exchange shows it within tolerance. Returns (steps made here, last uncertainty)."""
        stepped = 0
        for _ in range(_CLOCK_TRIES):
            guest, received = integer(reply.get("wall_ns")), self._wall_ns()
            low, high = sent - guest, received - guest
            if max(-low, high) <= CLOCK_TOLERANCE_NS:
                return stepped, (high - low) // 2
            # A slow exchange proves little: step only by what it proves, and look again.
            surely = low if low > 0 else min(high, 0)
            step = (low + high) // 2 if high - low <= CLOCK_TOLERANCE_NS else surely
            stepped += step
            sent = self._wall_ns()
            reply = await self._control.call({"op": Call.CLOCK, "step_ns": step}, deadline_s)
        return stepped, (high - low) // 2

    async def quiesce(self, deadline_s: float = QUIESCE_S) -> bool:
        """Freeze every user process. False when some did not stand still in time: the capture is then unquiesced."""
        reply = await self._call(_quiesce(deadline_s), deadline_s + self._unresponsive_s)
        return reply.get("frozen") is True

    async def stand_still(self, deadline_s: float = QUIESCE_S) -> bool:
        """``quiesce``, and let nothing pass on either channel until ``release``: for the time in which guest memory is copied.

        Both at once, for users' processes already stand still while the second channel is asked. When it raises, the channels
        are released, and the processes may be frozen: ``thaw``.
        """
        await self._await_ready()
        freezing = asyncio.create_task(self._control.hold(_quiesce(deadline_s), deadline_s + self._unresponsive_s))
        try:
            await self._data.hold({"op": Call.PING}, self._unresponsive_s)
            reply = await freezing
        except BaseException:
            freezing.cancel()
            await asyncio.gather(freezing, return_exceptions=True)
            self.release()
            raise
        return reply.get("frozen") is True

    def release(self) -> None:
        """Let the channels go on after ``stand_still``. Safe without one."""
        self._data.release()
        self._control.release()

    async def thaw(self) -> float:
        """After a checkpoint (or a capture that was given up): repair the clock, then thaw. Returns its step in seconds."""
        await self._await_ready()
        sent = self._wall_ns()
        reply = await self._control.call({"op": Call.THAW, "host_ns": sent}, self._unresponsive_s)
        step, _ = await self._settle_clock(sent, reply, self._unresponsive_s)
        return (integer(reply.get("clock_step_ns")) + step) / 1e9

    async def ping(self) -> float:
        started = time.perf_counter()
        await self._call({"op": Call.PING})
        return time.perf_counter() - started

    async def cpu_s(self) -> float:
        """CPU seconds that users' processes have used, of the commands of which something is left: whether anything can have
        changed by itself. A guest that is merely frozen and thawed again answers the same."""
        reply = await self._call({"op": Call.PING})
        waiting = reply.get("at_prompt")
        self._at_prompt = {ExecId(item) for item in waiting if isinstance(item, str)} if isinstance(waiting, list) else set()
        return integer(reply.get("cpu_us")) / 1e6

    async def sync(self, deadline_s: float = 60.0, *, drop_caches_over: int | None = None) -> int:
        """Flush every file system of the guest to its disks, then drop its page cache if that is larger than so many bytes.
        Returns the bytes dropped."""
        request: dict[str, Any] = {"op": Call.SYNC}
        if drop_caches_over is not None:
            request["drop_caches_over"] = drop_caches_over
        return integer((await self._call(request, deadline_s)).get("dropped"))

    async def settle(self, commands: Sequence[str] = (), *, deadline_s: float = 60.0, drop_caches: bool = False) -> bool:
        """Run warm-up commands, flush, and wait for quiet. False when it was not quiet by the deadline.

        Raises MachineFailed naming a command that failed.
        """
        request = {"op": Call.SETTLE, "commands": list(commands), "deadline_s": deadline_s, "drop_caches": drop_caches}
        reply = await self._call(request, deadline_s + self._unresponsive_s)
        failed = _sentences(reply.get("failed"))
        if failed:
            raise MachineFailed(f"A warm-up command failed: {failed[0]}.")
        return reply.get("idle") is True

    async def grow_disk(self, deadline_s: float = 120.0) -> int:
        """Let the user's file system fill its disk; returns its size in bytes."""
        return integer((await self._call({"op": Call.GROW_DISK}, deadline_s)).get("bytes"))

    async def power_off(self) -> None:
        """Flush and switch off; the machine's own event says when it has."""
        await self._call({"op": Call.POWEROFF})

    # ----------------------------------------------------------------------------------------------------- events

    def _on_note(self, note: dict[str, Any]) -> None:
        if note.get("ev") == Note.EXEC_ENDED:
            self._running.discard(ExecId(str(note.get("exec_id"))))
            self._touch()

    @staticmethod
    def _refuse_stream(stream: LinkStream, _info: dict[str, Any]) -> None:
        stream.abort("the control channel carries no streams")

    def _on_open(self, stream: LinkStream, info: dict[str, Any]) -> None:
        op = info.get("op")
        if self._on_guest_stream is None or self._retired or op not in (Op.EGRESS, Op.API):
            stream.abort("this node serves no such stream")
            return
        host, port = info.get("host"), info.get("port")
        named = isinstance(host, str) and len(host) <= 255 and isinstance(port, int) and 1 <= port <= 65535
        if op == Op.EGRESS and not named:
            stream.abort("that is no host and port")
            return
        self._count(stream, "outbound")
        if op == Op.EGRESS:
            self._on_guest_stream("egress", {"host": host, "port": port}, stream)
        else:
            self._on_guest_stream("api", {}, stream)

    # ------------------------------------------------------------------------------------------------- activity

    def activity(self) -> LinkActivity:
        """What is open now, and how long nothing has been."""
        busy = sum(self._open.values())
        return LinkActivity(
            open_execs=self._open["exec"],
            running_execs=len(self._running - self._at_prompt),
            open_streams=self._open["stream"],
            open_outbound=self._open["outbound"],
            idle_for_s=0.0 if busy else self._clock.monotonic() - self._last_activity,
            operations=self._operations,
        )

    async def _open_stream(self, request: dict[str, Any]) -> LinkStream:
        await self._await_ready()
        return self._data.open_stream(request)

    def _note_started(self, exec_id: ExecId) -> bool:
        is_new = exec_id not in self._running
        self._running.add(exec_id)
        return is_new

    def _note_ended(self, exec_id: ExecId) -> None:
        self._running.discard(exec_id)

    def _note_watched(self, exec_id: ExecId) -> None:
        self._at_prompt.discard(exec_id)


def _sentences(value: object) -> tuple[str, ...]:
    return tuple(clean(item) for item in value[:20]) if isinstance(value, list) else ()


def _quiesce(deadline_s: float) -> dict[str, Any]:
    return {"op": Call.QUIESCE, "deadline_ms": deadline_s * 1000}
