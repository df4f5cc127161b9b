"""Verification of what is stored on this node, and trials: starts of snapshots in throwaway machines.

A trial takes the path of a wake up to the agent's answer and then kills the machine. The agent is not told to go on, so the
programs of a quiesced snapshot stay frozen; there is no egress, no API, and no workspace of that id. Its live record names an id
that no workspace can have: the store drops such records when it is opened, with the layer that the machine wrote, and machines
that an earlier process left are killed before that. So nothing of a trial outlives its process, however that ends.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from perdure.core.clock import Clock, epoch_ms
from perdure.core.errors import CorruptData, CorruptSnapshot, NotFound, PerdureError
from perdure.core.ids import SnapshotId, WorkspaceId, mint
from perdure.images.registry import ImageStore
from perdure.images.verify import ImageVerifier
from perdure.machines.driver import Machine
from perdure.machines.guestlink import GuestLink
from perdure.node.goldens import Goldens
from perdure.node.starting import BOOTED_HELLO_S, RESTORED_HELLO_S, Plan, Starter
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.capture import MachineRun
from perdure.snapshots.manifest import Manifest
from perdure.snapshots.store import THROWAWAY, SnapshotStore
from perdure.snapshots.verify import Verifier
from perdure.wire.node import Checking, Damage, FromSnapshot, Identity, StartSpec, Trial, TrialKind, Verdict

#: Progress is told when so much of a file was read, and at each new file.
TOLD_BYTES = 4 << 20


class _Ended(Exception):
    """Nobody waits for the rest of this pass."""


class Verification:
    """Verifies; ``close`` ends whatever is under way. ``machines`` are those of trials, whose guests can run."""

    def __init__(self, store: SnapshotStore, goldens: Goldens, starter: Starter, clock: Clock) -> None:
        self._store = store
        self._goldens = goldens
        self._starter = starter
        self._clock = clock
        self._passes: set[_Pass] = set()
        self._trials: set[asyncio.Task[Trial]] = set()
        self._one_trial = asyncio.Lock()  # each is a whole machine, and nobody has counted it in
        self._closed = False
        self.machines: set[Machine] = set()

    async def run(self, snapshot_ids: tuple[SnapshotId, ...], *, trial: bool) -> AsyncGenerator[Checking | Verdict, None]:
        """As ``wire.node.Node.verify``."""
        work = _Pass(self._store, self._goldens.images, self._closed)
        self._passes.add(work)
        try:
            for snapshot_id in snapshot_ids:
                verdict: Verdict | None = None
                async with aclosing(work.check(snapshot_id)) as events:
                    async for event in events:
                        if isinstance(event, Verdict):
                            verdict = event
                        else:
                            yield event
                if verdict is not None and trial and verdict.intact:
                    verdict = await self._with_trial(verdict)
                if verdict is not None:
                    yield verdict
        finally:
            self._passes.discard(work)
            await work.end()

    async def close(self) -> None:
        """A thread that reads the store must not read on when the store is somebody else's."""
        self._closed = True
        for task in self._trials:
            task.cancel()
        await asyncio.gather(*self._trials, *(work.end() for work in list(self._passes)), return_exceptions=True)

    async def _with_trial(self, verdict: Verdict) -> Verdict:
        task = asyncio.create_task(self._try(verdict.snapshot_id), name=f"trial-{verdict.snapshot_id}")
        self._trials.add(task)
        task.add_done_callback(self._trials.discard)
        try:
            outcome = await task
        except NotFound:
            return Verdict(verdict.snapshot_id, missing=True)
        finally:  # when we are cancelled, its machine ends before we do
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return Verdict(verdict.snapshot_id, disk_intact=verdict.disk_intact, trial=outcome)

    # ------------------------------------------------------------------------------------------------------------- trials

    async def _try(self, snapshot_id: SnapshotId) -> Trial:
        """Raises NotFound when the snapshot is gone; every other failure is the trial's outcome."""
        async with self._one_trial:
            begun = time.perf_counter()
            manifest = self._store.manifest(snapshot_id)
            spec = self._spec(manifest)
            plan: Plan | None = None
            problem = ""
            try:
                plan = await self._starter.plan(spec)
                await self._start(spec, plan)
            except PerdureError as error:
                self._store.manifest(snapshot_id)  # raises NotFound when it was removed meanwhile
                problem = error.message
            kind = TrialKind.MEMORY if (plan.with_memory if plan else manifest.memory is not None) else TrialKind.DISK
            return Trial(kind, plan.reason if plan else "", round(time.perf_counter() - begun, 3), problem)

    def _spec(self, manifest: Manifest) -> StartSpec:
        throwaway = WorkspaceId(mint(THROWAWAY, now_ms=epoch_ms(self._clock)))
        # Newer than all that its memory has heard of, so that the agent answers.
        identity = Identity(throwaway, manifest.tenant_id, manifest.generation + 1, "trial", "0" * 32)
        return StartSpec(identity, manifest.image, manifest.size, manifest.disk_gib, FromSnapshot(manifest.snapshot_id))

    async def _start(self, spec: StartSpec, plan: Plan) -> None:
        """Returns when the agent has answered and the machine is gone."""
        run = await asyncio.to_thread(self._starter.begin, spec, plan)
        async with self._machine(run, plan) as machine:
            if plan.with_memory:
                await run.restore(machine)
                self.machines.add(machine)
                await machine.resume()
            link = GuestLink(machine.connect, generation=spec.identity.generation)
            try:
                await link.open(RESTORED_HELLO_S if plan.with_memory else BOOTED_HELLO_S)
            finally:
                await link.close()

    @asynccontextmanager
    async def _machine(self, run: MachineRun, plan: Plan) -> AsyncIterator[Machine]:
        """Not out of the pool: those that wait there are for wakes."""
        machine: Machine | None = None
        driver, launch = self._goldens.driver, self._starter.launch(plan, run, "trial")
        try:
            if plan.with_memory:
                machine = await driver.prepare(launch)
            else:
                machine = await driver.boot(launch, await run.checked_chain())
                self.machines.add(machine)
            yield machine
        finally:
            if machine is not None:
                await machine.kill()
                self.machines.discard(machine)
            await asyncio.to_thread(run.end)


class _Pass:
    """Reads in a thread, tells in the loop."""

    def __init__(self, store: SnapshotStore, images: ImageStore, closed: bool) -> None:
        self._store = store
        self._enough = threading.Event()
        if closed:
            self._enough.set()
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Checking | Verdict | None] = asyncio.Queue()
        self._snapshot_id = SnapshotId("")
        self._file, self._unsaid = "", 0
        self._own = Verifier(store, self._told)
        self._shared = ImageVerifier(images, self._told)
        self._reading: asyncio.Task[None] | None = None

    async def check(self, snapshot_id: SnapshotId) -> AsyncGenerator[Checking | Verdict, None]:
        """Progress, then the verdict; nothing when the pass was ended."""
        self._snapshot_id = snapshot_id
        self._reading = asyncio.create_task(asyncio.to_thread(self._work, snapshot_id))
        while (event := await self._events.get()) is not None:
            yield event
        await self._reading

    async def end(self) -> None:
        self._enough.set()
        if self._reading is not None:
            await asyncio.wait([self._reading])

    def _say(self, event: Checking | Verdict | None) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def _told(self, file: str, count: int) -> None:
        if self._enough.is_set():
            raise _Ended
        if file != self._file:
            self._flush()
            self._file = file
        self._unsaid += count
        if self._unsaid >= TOLD_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._unsaid:
            self._say(Checking(self._snapshot_id, self._file, self._unsaid))
        self._unsaid = 0

    def _work(self, snapshot_id: SnapshotId) -> None:
        try:
            verdict = self._verdict(snapshot_id)
            self._flush()
            self._say(verdict)
        except _Ended:
            pass
        finally:
            self._say(None)

    def _verdict(self, snapshot_id: SnapshotId) -> Verdict:
        try:
            manifest = self._store.manifest(snapshot_id)
            shared, disk_intact, base = self._base_of(manifest)
        except CorruptSnapshot:
            shared, disk_intact, base = [], True, None  # the manifest: nobody knows what it lies on
        except NotFound:
            return Verdict(snapshot_id, disk_intact=False, missing=True)
        try:
            found = self._own.snapshot(snapshot_id, base)
        except NotFound:
            return Verdict(snapshot_id, disk_intact=False, missing=True)
        damage = tuple(dict.fromkeys((*shared, *found.damage)))
        return Verdict(snapshot_id, damage, disk_intact=disk_intact and found.disk_intact)

    def _base_of(self, manifest: Manifest) -> tuple[list[Damage], bool, BaseRam | None]:
        """Damage of what the snapshot lies on, whether its disk lies on none of that, and the RAM if that is whole."""
        damage = [*self._shared.image(manifest.disk_base.image)]
        below = manifest.disk_base.golden
        if below is not None:
            damage += self._shared.golden(manifest.disk_base.image, below)
        disk_intact = not [one for one in damage if not one.file.endswith(_MEMORY_ONLY)]
        memory = manifest.memory
        if memory is None or memory.base.golden is None:  # no memory, or it lies on a base of its own
            return [one for one in damage if not one.file.endswith(_MEMORY_ONLY)], disk_intact, None
        of_memory = self._shared.golden(memory.base.image, memory.base.golden)
        base: BaseRam | None = None
        if not of_memory:
            try:
                base = BaseRam(self._shared.ram(memory.base.image, memory.base.golden))
            except (CorruptData, OSError):
                base = None  # it went this moment
        return [*damage, *of_memory], disk_intact, base


#: Files of a golden that a boot of its disk does not read.
_MEMORY_ONLY = ("/ram.base", "/devices.state")
