"""Defects that the suite must find: each is one way in which this product could be wrong, switched on by name for tests only.

A defect replaces functions of the product in this process, and children get its name. ``python -m tests.torture --defect NAME``
must end with violations; ``test_defects.py`` asks that of every one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from perdure.core.errors import InvalidRequest
from perdure.node.resident import Resident
from perdure.node.supervisor import NodeSupervisor
from perdure.runs.service.clockwork import Clockwork
from perdure.snapshots import copying, pagelog, pageread
from perdure.snapshots.capture import Captured, MachineRun
from perdure.snapshots.frozen import FrozenLayers
from perdure.snapshots.objects.collect import Collector
from perdure.snapshots.objects.remote import pack_name
from perdure.snapshots.segments import SegmentWriter
from perdure.snapshots.store import SnapshotStore
from perdure.wire.objects import ItemState

Patches = list[Any]


def no_fsync() -> Patches:
    """The page log is written and never synced."""
    return [patch.object(SegmentWriter, "sync", lambda self: None)]


def no_generation_check() -> Patches:
    """Whoever names a workspace means the machine that it has now."""
    stop, live_record, forget = NodeSupervisor.stop, SnapshotStore.live_record, SnapshotStore.forget

    def now(store: SnapshotStore, workspace: Any, generation: int) -> int:
        record = store._records.get(workspace)
        return generation if record is None else record.generation

    async def any_stop(self: NodeSupervisor, workspace: Any, generation: int, *, keep_overlay: bool = False) -> None:
        resident = self._residents.get(workspace)
        await stop(self, workspace, generation if resident is None else resident.generation, keep_overlay=keep_overlay)

    return [
        patch.object(NodeSupervisor, "_resident", lambda self, workspace, _: self._residents[workspace]),
        patch.object(NodeSupervisor, "stop", any_stop),
        patch.object(SnapshotStore, "live_record", lambda self, ws, gen: live_record(self, ws, now(self, ws, gen))),
        patch.object(SnapshotStore, "forget", lambda self, ws, gen: forget(self, ws, now(self, ws, gen))),
    ]


def acknowledge_before_commit() -> Patches:
    """A snapshot is acknowledged when its files are there; its manifest is written with the next one's."""
    publish = SnapshotStore.publish

    def later(self: SnapshotStore, manifest: Any) -> None:
        waiting = self.__dict__.setdefault("_waiting_manifests", [])
        for earlier in waiting:
            if (self.snapshots / earlier.snapshot_id).is_dir():
                publish(self, earlier)
        waiting[:] = [manifest]
        with self._guard:
            self._adopt(manifest)

    return [patch.object(SnapshotStore, "publish", later)]


def zero_page_omitted() -> Patches:
    """A page that became zero is left out, as if the base had zeros there too."""
    classify = pagelog.classify

    def without_zeros(*arguments: Any) -> Any:
        return dataclasses.replace(classify(*arguments), zero=np.empty(0, np.intp))

    return [patch.object(pagelog, "classify", without_zeros)]


def stale_overlay() -> Patches:
    """A snapshot names the disk layers that were frozen before, without the one that this capture froze."""
    real = MachineRun._capture

    async def stale(self: MachineRun, machine: Any, request: Any) -> Captured:
        captured = await real(self, machine, request)
        self._pending = dataclasses.replace(captured, layers=captured.layers[:-1] or captured.layers)
        return self._pending

    return [patch.object(MachineRun, "_capture", stale)]


def gc_of_pinned() -> Patches:
    """A sweep removes what no manifest names, whatever a run or a live record holds."""
    sweep = SnapshotStore._sweep

    def all_idle(self: SnapshotStore, names: Any = None) -> Any:
        pins, records = self._pins, self._records
        self._pins, self._records = set(), {}
        try:
            return sweep(self, names)
        finally:
            self._pins, self._records = pins, records

    return [patch.object(SnapshotStore, "_sweep", all_idle)]


def gc_of_pinned_pack() -> Patches:
    """The store's collector deletes the packs of what was released, whoever else holds them."""
    collect = Collector.collect

    async def careless(self: Collector, scope: Any) -> Any:
        catalogue = self._catalogue
        released = [item for item in await catalogue.items(scope) if item.state is ItemState.RELEASED]
        packs = [pack.pack_id for item in released for pack in await catalogue.holds(item.key)]
        done = await collect(self, scope)
        await self._remote.objects.delete([pack_name(scope, pack) for pack in packs])
        self._remote.forget(packs)
        return done

    return [patch.object(Collector, "collect", careless)]


class _NeverPaused:
    """A machine whose pause does nothing."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    async def pause(self) -> None:
        return None


def capture_without_freeze() -> Patches:
    """A capture copies while the machine runs on."""
    begin = Resident.__init__

    def unpaused(self: Resident, parts: Any, *arguments: Any, **named: Any) -> None:
        begin(self, parts, *arguments, **named)
        self.machine = _NeverPaused(self.machine)  # type: ignore[assignment]

    return [patch.object(Resident, "__init__", unpaused)]


def devices_before_memory() -> Patches:
    """A restore loads the devices and writes the memory after that."""

    async def restore(self: MachineRun, machine: Any) -> dict[str, float]:
        await machine.attach_disk(self.chain())
        await machine.load_devices(self._devices)
        copying.write_memory(machine.memory, self.store.segments, self._index, self.spec.base.ram)
        return {}

    return [patch.object(MachineRun, "restore", restore)]


def mark_before_the_look() -> Patches:
    """A checkpoint lets the machine begin anew to tell what it writes, and looks at what it has told after that."""
    real = copying.copy_for_checkpoint

    def forgetful(memory: Any, *arguments: Any, **named: Any) -> Any:
        memory.mark()
        return real(memory, *arguments, **named)

    return [patch.object(copying, "copy_for_checkpoint", forgetful)]


def mark_of_a_lost_capture() -> Patches:
    """What a machine tells counts since its last mark, whether the capture that set it was committed or not."""
    return [patch.object(MachineRun, "_knows_writes", True)]


def damage_believed() -> Patches:
    """Page content is used without a look at its checksum."""
    real = pageread.read

    def unverified(readers: Any, index: Any, positions: Any, base: Any, _verify: bool) -> Any:
        return real(readers, index, positions, base, False)

    return [patch.object(pageread, "read", unverified), patch.object(pagelog, "read", unverified)]


def layer_believed() -> Patches:
    """A start looks at the heads of disk layers and at nothing behind them."""
    return [patch.object(FrozenLayers, "check", lambda *_: None)]


def disk_of_a_dead_machine_dropped() -> Patches:
    """What a machine wrote after its last snapshot goes with it."""

    def dropped(self: SnapshotStore, workspace: Any, generation: int, *_: Any) -> None:
        self.forget(workspace, generation)

    return [patch.object(SnapshotStore, "salvage", dropped)]


def parent_forgotten() -> Patches:
    """An execution whose server died before it told its parent of the end counts as told."""
    move = Clockwork._move

    async def forgetful(self: Clockwork, execution_id: str, what: str, invocation: int) -> None:
        if what == "untold":
            await self._database.run("runs.told", id=execution_id)
        else:
            await move(self, execution_id, what, invocation)

    return [patch.object(Clockwork, "_move", forgetful)]


DEFECTS: dict[str, Callable[[], Patches]] = {
    "no-fsync": no_fsync,
    "no-generation-check": no_generation_check,
    "acknowledge-before-commit": acknowledge_before_commit,
    "zero-page-omitted": zero_page_omitted,
    "stale-overlay": stale_overlay,
    "gc-of-pinned": gc_of_pinned,
    "gc-of-pinned-pack": gc_of_pinned_pack,
    "capture-without-freeze": capture_without_freeze,
    "devices-before-memory": devices_before_memory,
    "mark-before-the-look": mark_before_the_look,
    "mark-of-a-lost-capture": mark_of_a_lost_capture,
    "damage-believed": damage_believed,
    "layer-believed": layer_believed,
    "dead-disk-dropped": disk_of_a_dead_machine_dropped,
    "parent-forgotten": parent_forgotten,
}


@contextmanager
def switched_on(name: str | None) -> Iterator[None]:
    """The product with this defect, until the block ends. Raises InvalidRequest for one that there is not."""
    if name is None:
        yield
        return
    if name not in DEFECTS:
        raise InvalidRequest(f"There is no defect {name!r}.", hint=f"There are: {', '.join(DEFECTS)}.")
    patches = DEFECTS[name]()
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in reversed(patches):
            one.stop()
