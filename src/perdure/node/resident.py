"""One awake workspace on this node: its machine, its channel to the guest, and the run that captures it.

Jobs on it (capture, stop) run one at a time in its inbox. A capture is::

    ready ── quiesce ── pause ── copy ─┬─ resume ── thaw ── commit         checkpoint: the pause ends before the heavy part
                                       └─ commit ── kill                   hibernation: killed only when the snapshot exists

Whatever fails in between, the machine goes on and nothing is lost; the caller gets the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from perdure.core import logs, tracing
from perdure.core.clock import Clock
from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import CorruptSnapshot, GuestUnresponsive, MachineDied, NoSpace, PerdureError
from perdure.core.inbox import Inbox
from perdure.machines.driver import EventKind, Machine, MachineState
from perdure.machines.guestlink import GuestLink
from perdure.node.stillness import standing_still
from perdure.snapshots.capture import CaptureRequest, MachineRun
from perdure.wire.node import (
    Activity,
    CaptureMode,
    CaptureSpec,
    Identity,
    NodeEvent,
    NodeEventKind,
    NodeUsage,
    SnapshotFacts,
)

INBOX_LIMIT = 32
#: Own disk layers of a running machine beyond which they are streamed into the active one (machine-facts: ≤ 16 in all).
LAYERS_MAX = 12
LAYERS_KEPT = 4
#: At so many a checkpoint waits for the merge: captures that come faster than it ends would interrupt it for ever.
LAYERS_FULL = 14
#: How often a machine that stands still for want of disk space is tried again.
ROOM_CHECK_S = 2.0
PING_FRACTION = 4

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a start has made. The resident owns all of it."""

    identity: Identity
    machine: Machine
    link: GuestLink
    run: MachineRun


class Resident:
    """Owns a running machine until ``end``. ``emit`` gets what happens by itself."""

    def __init__(
        self,
        parts: Parts,
        clock: Clock,
        unresponsive_s: float,
        emit: Callable[[NodeEvent], None],
        cache_max_bytes: int | None = None,
    ) -> None:
        self.identity = parts.identity
        self.machine = parts.machine
        self.link = parts.link
        self.run = parts.run
        self._clock = clock
        self._unresponsive_s = unresponsive_s
        self._emit = emit
        self._cache_max_bytes = cache_max_bytes  # of a guest's page cache at sleep; a larger one is dropped; None: never
        self._inbox = Inbox(parts.identity.workspace_id, INBOX_LIMIT, self._on_defect)
        self._tasks: list[asyncio.Task[None]] = []
        self._collapse: asyncio.Task[None] | None = None
        self._cpu_s: float | None = None  # of the users' processes, as last heard
        self._mark_at_capture: tuple[float | None, int] | None = None
        self._owes_thaw = False  # a thaw went unanswered: the pulse asks again
        self._standing_still = 0  # captures and freezes under way: silence is no sign of anything then
        self.is_ended = False

    def watch(self) -> None:
        """Begin to look after the machine; what happens from here on is told, and is no part of the request that woke it."""
        with logs.exactly(logs.of_machine(workspace=self.identity.workspace_id, generation=self.generation)):
            self._tasks = [
                asyncio.create_task(self._follow_events(), name=f"events-{self.identity.workspace_id}"),
                asyncio.create_task(self._follow_pulse(), name=f"pulse-{self.identity.workspace_id}"),
            ]
        self._collapse_if_deep()  # each sleep and wake adds a layer

    @property
    def generation(self) -> int:
        return self.identity.generation

    # ------------------------------------------------------------------------------------------------------------ capture

    async def capture(self, spec: CaptureSpec) -> SnapshotFacts:
        """Take a snapshot; for HIBERNATE the machine is dead when this returns. On an error the machine goes on."""
        with tracing.span("node.capture", perdure__mode=spec.mode.value, perdure__generation=self.generation):
            return await self._inbox.run(lambda: self._capture(spec))

    async def _capture(self, spec: CaptureSpec) -> SnapshotFacts:
        goes_on = spec.mode is CaptureMode.CHECKPOINT
        if goes_on:
            await self._await_room_for_layer()
        with tracing.span("node.ready"):
            await self.run.ready(self.machine, spec.snapshot_id, goes_on=goes_on)
        crashpoint(CrashPoint.CAPTURE_READY, self.machine.pid)
        self._standing_still += 1
        try:
            return await (self._checkpoint(spec) if goes_on else self._hibernate(spec))
        except BaseException:
            self._owes_thaw = True  # wherever it failed: the guest must not be left frozen
            self.run.discard(spec.snapshot_id)
            raise
        finally:
            self._standing_still -= 1

    async def _checkpoint(self, spec: CaptureSpec) -> SnapshotFacts:
        begun = time.perf_counter()
        async with standing_still(self.link) as still:
            mark = self._mark()
            await self._pause()
            crashpoint(CrashPoint.CAPTURE_PAUSED, self.machine.pid)
            try:
                captured = await self.run.capture(self.machine, self._request(spec, still.frozen, goes_on=True))
                crashpoint(CrashPoint.CAPTURE_COPIED, self.machine.pid)
            finally:
                await self._resume()
        pause_s = time.perf_counter() - begun
        self._owes_thaw = still.owes_thaw
        with tracing.span("node.commit"):
            facts = await asyncio.to_thread(self.run.commit, captured, pause_s)
        crashpoint(CrashPoint.CAPTURE_PUBLISHED, self.machine.pid)
        self._mark_at_capture = mark
        self._collapse_if_deep()
        return facts

    async def _hibernate(self, spec: CaptureSpec) -> SnapshotFacts:
        await self._flush_guest()
        begun = time.perf_counter()
        async with standing_still(self.link) as still:
            await self._pause()
            crashpoint(CrashPoint.CAPTURE_PAUSED, self.machine.pid)
            try:
                captured = await self.run.capture(self.machine, self._request(spec, still.frozen, goes_on=False))
                crashpoint(CrashPoint.CAPTURE_COPIED, self.machine.pid)
                with tracing.span("node.commit"):
                    facts = await asyncio.to_thread(self.run.commit, captured, time.perf_counter() - begun)
            except BaseException:
                await self._resume()
                raise
            crashpoint(CrashPoint.CAPTURE_PUBLISHED, self.machine.pid)
            still.is_over = True
        with tracing.span("node.end"):
            await self.end(keep_layers=False)
        crashpoint(CrashPoint.CAPTURE_ENDED)
        return facts

    async def _flush_guest(self) -> None:
        """So that the disk is whole for somebody who boots it without the memory. A guest that is too slow for that, or whose
        programs sit on a file system that does not answer, sleeps all the same: what is not flushed is in its memory."""
        try:
            with tracing.span("guest.sync"):
                dropped = await self.link.sync(drop_caches_over=self._cache_max_bytes)
            if dropped:
                log.info("a guest dropped its page cache", workspace=self.identity.workspace_id, mib=dropped >> 20)
        except GuestUnresponsive:
            log.warning("a guest did not flush its disk before it sleeps", workspace=self.identity.workspace_id)

    def _request(self, spec: CaptureSpec, frozen: bool, *, goes_on: bool) -> CaptureRequest:
        return CaptureRequest(spec.snapshot_id, self._clock.now(), quiesced=frozen, goes_on=goes_on)

    async def _pause(self) -> None:
        with tracing.span("node.pause"):
            await self.machine.pause()

    async def _resume(self) -> None:
        with contextlib.suppress(MachineDied), tracing.span("node.resume"):  # its death is told by its event
            await self.machine.resume()

    def _collapse_if_deep(self) -> None:
        if self.run.layer_count > LAYERS_MAX and (self._collapse is None or self._collapse.done()):
            self._collapse = asyncio.create_task(self._do_collapse(), name=f"collapse-{self.identity.workspace_id}")

    async def _await_room_for_layer(self) -> None:
        """No capture can interrupt the second merge, since captures wait behind this one; if it fails too, the disk has a defect
        of its own and the snapshot matters more than the depth."""
        for _ in range(2):
            if self.run.layer_count < LAYERS_FULL:
                return
            self._collapse_if_deep()
            if self._collapse is not None:
                await asyncio.wait({self._collapse})

    async def _do_collapse(self) -> None:
        try:
            await self.run.collapse(self.machine, LAYERS_KEPT)
        except CorruptSnapshot as error:
            # The guest runs on it already. What it sleeps on names the layer as it was, so the next wake finds it, too.
            log.error("a disk layer under a running machine is damaged", workspace=self.identity.workspace_id, file=error.file)
        except PerdureError as error:
            # A capture came between, or the machine ended: the next checkpoint asks again.
            log.info("the disk's layers were not merged", workspace=self.identity.workspace_id, reason=error.message)

    # -------------------------------------------------------------------------------------------------------------- state

    async def usage(self) -> NodeUsage:
        return await self.machine.usage()

    def activity(self, open_outbound: int) -> Activity:
        counts = self.link.activity()
        return Activity(
            open_execs=counts.running_execs,
            open_streams=counts.open_streams,
            open_outbound=open_outbound,
            idle_for_s=counts.idle_for_s,
            changed=counts.running_execs > 0 or counts.idle_for_s == 0.0 or self._mark() != self._mark_at_capture,
        )

    def _mark(self) -> tuple[float | None, int]:
        """Differs between two instants if anything was asked of the guest, or its processes were seen to run, between them."""
        return (self._cpu_s, self.link.activity().operations)

    # ---------------------------------------------------------------------------------------------------------------- end

    async def stop(self, *, keep_layers: bool) -> None:
        """Kill the machine whatever it does; jobs in its inbox fail with MachineDied."""
        await self.machine.kill()
        await self._inbox.run(lambda: self.end(keep_layers=keep_layers), urgent=True)

    async def end(self, *, keep_layers: bool) -> None:
        """The machine is killed, its channel closed, its run ended. Safe twice."""
        if self.is_ended:
            return
        self.is_ended = True
        for task in [*self._tasks, *([self._collapse] if self._collapse else [])]:
            if task is not asyncio.current_task():
                task.cancel()
        await self.link.retire()
        await self.machine.kill()
        if self._collapse is not None and self._collapse is not asyncio.current_task():
            await asyncio.wait([self._collapse])  # it may be writing the live record, which ends with the run
        await asyncio.to_thread(lambda: self.run.end(keep_layers=keep_layers))

    # -------------------------------------------------------------------------------------------------------- by itself

    def _tell(self, kind: NodeEventKind, detail: str = "") -> None:
        if not self.is_ended:
            self._emit(NodeEvent(kind, self.identity.workspace_id, self.generation, detail))

    async def _follow_events(self) -> None:
        ended_as: NodeEventKind | None = None
        async for event in self.machine.events():
            if event.kind in _ENDINGS:
                ended_as = _ENDINGS[event.kind]
            elif event.kind is EventKind.NO_SPACE:
                self._tell(NodeEventKind.NO_SPACE, event.detail)
                self._tasks.append(asyncio.create_task(self._await_room(), name=f"room-{self.identity.workspace_id}"))
            elif event.kind is EventKind.IO_ERROR:
                # The machine stands still and will not go on by itself: to its users that is silence, and it has the same exits.
                log.error("a disk of a machine failed", workspace=self.identity.workspace_id, detail=event.detail)
                self._tell(NodeEventKind.UNRESPONSIVE, f"Its disk failed: {event.detail}")
            else:
                self._tell(ended_as or NodeEventKind.DIED, event.detail)

    async def _await_room(self) -> None:
        """A machine that was stopped because the host's disk is full is tried until it stays up."""
        while self.machine.state is MachineState.NO_SPACE:
            await asyncio.sleep(ROOM_CHECK_S)
            with contextlib.suppress(NoSpace):
                await self.machine.resume()
        if self.machine.state is MachineState.RUNNING:
            self._tell(NodeEventKind.ROOM_AGAIN)

    async def _follow_pulse(self) -> None:
        heard_at = self._clock.monotonic()
        while True:
            await asyncio.sleep(self._unresponsive_s / PING_FRACTION)
            if self._standing_still or self.machine.state is not MachineState.RUNNING:
                heard_at = self._clock.monotonic()
                continue
            try:
                if self._owes_thaw:
                    await self.link.thaw()
                    self._owes_thaw = False
                self._cpu_s = await self.link.cpu_s()
            except PerdureError:  # no answer, or none that an agent in order would give
                if self._standing_still or self._clock.monotonic() - heard_at < self._unresponsive_s:
                    continue
                if not await self._answers_now() and not self._standing_still:
                    self._tell(NodeEventKind.UNRESPONSIVE, f"The agent has not answered for {self._unresponsive_s:g} s.")
                    return
            heard_at = self._clock.monotonic()

    async def _answers_now(self) -> bool:
        """Asked before a guest is failed: when it was this process that stood still (a starved or suspended host), its deadlines
        have passed although the answers are there."""
        try:
            async with asyncio.timeout(self._unresponsive_s / PING_FRACTION):
                self._cpu_s = await self.link.cpu_s()
        except (PerdureError, TimeoutError):
            return False
        return True

    def freeze(self) -> None:
        """The watchdog stopped the process: silence means nothing until ``thaw``."""
        self._standing_still += 1

    def thaw(self) -> None:
        self._standing_still = max(0, self._standing_still - 1)

    def _on_defect(self, error: Exception) -> None:
        log.error("a job of a machine failed in a way nobody foresaw", workspace=self.identity.workspace_id, exc_info=error)


_ENDINGS = {
    EventKind.RESET: NodeEventKind.GUEST_REBOOT,
    EventKind.PANIC: NodeEventKind.GUEST_PANIC,
    EventKind.POWEROFF: NodeEventKind.GUEST_POWEROFF,
}
