"""How a machine becomes a workspace: the one procedure behind create, wake, fork, disk boot and supervised reboot.

Intent first: ``begin`` (or ``take_over``) writes the live record before anything runs. The machine is then restored into a warm
VMM, or booted; it counts as awake when the agent has answered this generation's handshake. Whatever fails kills the machine and
ends the run, so that nothing of a failed start remains.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import structlog

from perdure.core import tracing
from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import GuestUnresponsive, MachineDied, MachineFailed
from perdure.machines.driver import LaunchSpec, Machine
from perdure.machines.guestlink import GuestLink, OnGuestStream, WakeRequest
from perdure.machines.guestlink_hooks import HookLimits
from perdure.node.goldens import Goldens, Origin
from perdure.node.pool import WarmPool
from perdure.node.resident import Parts
from perdure.node.shared import SharedFile, SharedFiles, private_base
from perdure.node.warming import Warming
from perdure.snapshots.capture import Base, MachineRun, RunSpec
from perdure.snapshots.manifest import Manifest, explain_mismatch
from perdure.snapshots.start import begin, take_over
from perdure.snapshots.store import SnapshotStore
from perdure.wire.node import FromDisk, FromSnapshot, HookOutcome, MemoryFate, StartReport, StartSpec

#: A restored guest answers in a fraction of a second; a cold boot under emulation on a busy host takes half a minute.
RESTORED_HELLO_S = 60.0
BOOTED_HELLO_S = 240.0
PoolKey = tuple[str, str]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a start will do, decided before it does anything."""

    origin: Origin
    manifest: Manifest | None
    with_memory: bool
    memory: MemoryFate
    reason: str
    checked: bool = True  # that the disk's layers are what was written


class Timeline:
    """Milliseconds since a start began, by name of the step that was done then."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self.ms: dict[str, float] = {}

    def mark(self, step: str) -> None:
        self.ms[step] = round((time.perf_counter() - self._begun) * 1000, 3)

    def add(self, timings: Mapping[str, float]) -> None:
        self.ms.update({f"restore_{name}": round(ms, 3) for name, ms in timings.items()})


class Starter:
    """Makes running machines out of start specs."""

    def __init__(
        self,
        goldens: Goldens,
        store: SnapshotStore,
        pool: WarmPool[PoolKey],
        shared: SharedFiles,
        unresponsive_s: float,
        hooks: HookLimits,
    ) -> None:
        self._goldens = goldens
        self._store = store
        self._pool = pool
        self._shared = shared
        self._unresponsive_s = unresponsive_s
        self._hooks = hooks
        self.warming = Warming(store)

    async def start(
        self, spec: StartSpec, on_stream: OnGuestStream, before_run: Callable[[Machine], None]
    ) -> tuple[Parts, StartReport]:
        """Returns after the handshake. ``before_run`` comes before the guest can ask for anything, ``on_stream`` when it asks.

        Raises what the parts raise; then nothing of this start remains (a take-over keeps the earlier generation's layers).
        """
        times = Timeline()
        plan = await self.plan(spec)
        await self._shared.before_start(self._below(plan))
        run = await asyncio.to_thread(self.begin, spec, plan)
        times.mark("recorded")
        source = plan.manifest.snapshot_id if plan.manifest is not None and plan.with_memory else None
        asked = None if source is None else self.warming.ask(run, source)
        crashpoint(CrashPoint.START_RECORDED)
        keep = spec.take_over_generation is not None
        async with self._machine(plan, run, keep=keep) as (machine, pooled):
            times.mark("claimed")
            crashpoint(CrashPoint.START_CLAIMED, machine.pid)
            if plan.with_memory:
                noted = asyncio.create_task(run.started(machine.pid))
                try:
                    with tracing.span("node.restore"):
                        times.add(await run.restore(machine))
                finally:  # else a failed start could be put on record after its end
                    await noted
                times.mark("restored")
            else:
                await run.started(machine.pid)
            crashpoint(CrashPoint.START_RESTORED, machine.pid)
            before_run(machine)
            if plan.with_memory:
                await machine.resume()
            times.mark("running")
            crashpoint(CrashPoint.START_RUNNING, machine.pid)
            request = WakeRequest(
                spec.identity,
                new_identity=spec.new_identity,
                environment=spec.environment,
                report=_told(spec, plan, machine, pooled=pooled),
                hooks=self._hooks,
            )
            link, report = await self._handshake(request, plan, machine, on_stream, times)
            crashpoint(CrashPoint.START_AWAKE, machine.pid)
        if source is not None and asked is not None:
            self.warming.watch(run, machine.memory, source, asked)
        parts = Parts(spec.identity, machine, link, run)
        return parts, StartReport(**report, confinement=machine.confinement, pooled=pooled, timings_ms=times.ms)

    # ---------------------------------------------------------------------------------------------------------- planning

    async def plan(self, spec: StartSpec) -> Plan:
        """Decide, and do nothing but make a golden where this host has none yet."""
        origin = await self._goldens.origin(spec.image, spec.size)
        source = spec.source
        if isinstance(source, FromSnapshot):
            return self._plan_snapshot(origin, self._store.manifest(source.snapshot_id))
        if isinstance(source, FromDisk):
            manifest = None if source.snapshot_id is None else self._store.manifest(source.snapshot_id)
            new = manifest is None and spec.new_identity
            fate, reason = (MemoryFate.NEW, "") if new else (MemoryFate.LOST, source.reason)
            return Plan(origin, manifest, False, fate, reason, source.checked)
        if spec.disk_gib != origin.image.disk_gib:
            return Plan(origin, None, False, MemoryFate.NEW, "")
        return Plan(origin, None, True, MemoryFate.NEW, "")

    def _plan_snapshot(self, origin: Origin, manifest: Manifest) -> Plan:
        """Memory if the fingerprint holds and its base is there; the same snapshot's disk otherwise, and why."""
        memory = manifest.memory
        if memory is None:
            return Plan(origin, manifest, False, MemoryFate.LOST, "no-memory-in-snapshot")
        if memory.fingerprint != origin.fingerprint:
            reason = explain_mismatch(manifest, origin.fingerprint_parts)
            return Plan(origin, manifest, False, MemoryFate.LOST, f"fingerprint: {reason}")
        golden = memory.base.golden
        if golden is not None:
            origin = self._goldens.at(origin, golden)
        return Plan(origin, manifest, True, MemoryFate.KEPT, "")

    def look_ahead(self, origin: Origin) -> None:
        """A workspace will probably be made of it: what that reads is read."""
        self._shared.soon(self._below(Plan(origin, None, True, MemoryFate.NEW, "")))

    def _below(self, plan: Plan) -> list[SharedFile]:
        """What this start reads and other workspaces do, too."""
        origin, manifest = plan.origin, plan.manifest
        shape = origin.image.shape(origin.size)
        disks = self._goldens.base(origin, manifest).disks.layers
        paths = [shape.kernel, shape.initrd, shape.agent_disk, *(layer.path for layer in disks)]
        own = manifest.private_base if manifest is not None and plan.with_memory else None
        if plan.with_memory and manifest is None:
            paths.append(origin.golden.devices)
        if plan.with_memory and own is None:
            paths.append(origin.golden.ram)
        return [*self._shared.of(paths), *(() if own is None else (private_base(self._store, own),))]

    def begin(self, spec: StartSpec, plan: Plan) -> MachineRun:
        """The intent on record and a layer to write. Heavy: call it in a thread."""
        with self._store.guard:  # a snapshot may have been given another base since it was planned, but not from here on
            return self._begin(spec, plan)

    def _begin(self, spec: StartSpec, plan: Plan) -> MachineRun:
        identity, origin = spec.identity, plan.origin
        run_spec = RunSpec(
            workspace_id=identity.workspace_id,
            tenant_id=identity.tenant_id,
            generation=identity.generation,
            image=origin.image.digest,
            size=spec.size,
            disk_gib=spec.disk_gib,
            base=self._base(plan),
            fingerprint=origin.fingerprint,
            fingerprint_parts=origin.fingerprint_parts,
        )
        if spec.take_over_generation is not None:
            return take_over(self._store, run_spec, spec.take_over_generation)
        source = None if plan.manifest is None else plan.manifest.snapshot_id
        return begin(self._store, run_spec, source, memory=plan.with_memory, devices=origin.golden.devices)

    def _base(self, plan: Plan) -> Base:
        """Of a golden, or the private one that the snapshot's memory lies on now."""
        base = self._goldens.base(plan.origin, plan.manifest)
        if plan.manifest is None or not plan.with_memory:
            return base
        manifest = self._store.manifest(plan.manifest.snapshot_id)
        ram = self._store.own_base(manifest)
        return base if manifest.memory is None or ram is None else replace(base, ram=ram, ram_ref=manifest.memory.base)

    # ---------------------------------------------------------------------------------------------------------- machines

    def launch(self, plan: Plan, run: MachineRun, prefix: str) -> LaunchSpec:
        """Of a machine that is not from the pool."""
        own = plan.with_memory and run.spec.base.ram_ref.private is not None
        return self._goldens.launch(plan.origin, prefix, *((run.spec.base.ram.path,) if own else ()))

    @asynccontextmanager
    async def _machine(self, plan: Plan, run: MachineRun, *, keep: bool) -> AsyncIterator[tuple[Machine, bool]]:
        """A machine for the body, which on any failure is killed and its run ended. A warm one gets a successor later."""
        machine: Machine | None = None
        pooled = False
        from_pool = plan.with_memory and run.spec.base.ram_ref.private is None
        try:
            with tracing.span("node.claim" if from_pool else "node.prepare" if plan.with_memory else "node.boot"):
                if from_pool:
                    machine, pooled = await self._pool.claim(plan.origin.key)
                elif plan.with_memory:  # those that wait in the pool have mapped a golden
                    machine = await self._goldens.driver.prepare(self.launch(plan, run, "own"))
                else:
                    chain = await run.checked_chain() if plan.checked else run.chain()
                    machine = await self._goldens.driver.boot(self.launch(plan, run, "boot"), chain)
            yield machine, pooled
        except BaseException:
            if machine is not None:
                await machine.kill()
            await asyncio.to_thread(lambda: run.end(keep_layers=keep))
            raise
        finally:
            if from_pool:
                self._pool.refill_soon(plan.origin.key)

    async def _handshake(
        self, request: WakeRequest, plan: Plan, machine: Machine, on_stream: OnGuestStream, times: Timeline
    ) -> tuple[GuestLink, dict[str, Any]]:
        identity = request.identity
        link = GuestLink(
            machine.connect, generation=identity.generation, on_guest_stream=on_stream, unresponsive_s=self._unresponsive_s
        )
        try:
            with tracing.span("guest.handshake"):
                hello = await link.open(RESTORED_HELLO_S if plan.with_memory else BOOTED_HELLO_S)
            times.mark("hello")
            with tracing.span("guest.wake"):  # its repairs, and the workspace's own hooks
                woken = await link.wake(replace(request, report={**(request.report or {}), "problems": list(hello.problems)}))
            times.mark("repaired")
            problems = (*hello.problems, *woken.problems, *([] if plan.with_memory else await grow(link)))
            for problem in problems:
                log.warning("a guest is not in order", workspace=identity.workspace_id, problem=problem)
            for hook in woken.hooks:
                if hook.outcome is not HookOutcome.OK:
                    log.warning("a hook failed", workspace=identity.workspace_id, hook=hook.name, outcome=hook.outcome.value)
        except BaseException:
            await link.close()
            raise
        return link, {
            "memory": plan.memory,
            "memory_reason": plan.reason,
            "boot_id": hello.boot_id,
            "clock_step_s": woken.clock_step_s,
            "connections_dropped": woken.connections_dropped,
            "execs_running": woken.execs_running,
            "execs_lost": woken.execs_lost,
            "problems": problems,
            "hooks": woken.hooks,
        }


def _told(spec: StartSpec, plan: Plan, machine: Machine, *, pooled: bool) -> dict[str, Any]:
    """The report as the workspace reads it, without what the guest itself finds out."""
    memory, reason = spec.told.memory(plan.memory, plan.reason)
    return {
        "workspace_id": spec.identity.workspace_id,
        "generation": spec.identity.generation,
        **spec.told.facts,
        "memory": memory.value,
        "memory_reason": reason,
        "isolation": machine.confinement.isolation.value,
        "pooled": pooled,
    }


async def grow(link: GuestLink) -> list[str]:
    """Let the file system fill its disk; returns what is wrong with it. A disk boot is the last way into a damaged workspace, so
    a file system that cannot grow does not stop it."""
    try:
        await link.grow_disk()
    except (MachineDied, GuestUnresponsive):
        raise
    except MachineFailed as error:
        return [f"The file system did not grow to the size of its disk: {error.message}"]
    return []
