"""Workspaces on disks of many layers, each with something of its own and something that the next one writes over."""

from __future__ import annotations

from perdure.core.ids import DiskId, SnapshotId, WorkspaceId
from perdure.wire.node import SnapshotFacts
from tests.fakes.tiny_machine import TinyMachine
from tests.fakes.tiny_node import Node, capture


async def asleep(node: Node, count: int, *, keep: int = 1) -> tuple[list[SnapshotFacts], TinyMachine]:
    """A workspace on ``count`` layers, and the last ``keep`` of its snapshots. Each layer has written cluster 0 and one more."""
    run, machine = await node.wake(1)
    made = []
    for number in range(count):
        machine.write_memory(number, number + 1)
        machine.write_disk(b"newest %d" % number)
        machine.write_disk(b"layer %d" % number, 10 + number)
        made.append(await capture(run, machine, goes_on=number < count - 1))
    run.end()
    node.store.delete([facts.snapshot_id for facts in made[:-keep]])
    return made[-keep:], machine


async def disk_of(node: Node, name: SnapshotId, count: int) -> list[bytes]:
    run, machine = await node.wake(1, name, WorkspaceId("ws_look"))
    found = [machine.read_disk(), *(machine.read_disk(10 + number) for number in range(count))]
    run.end()
    return found


def wanted(count: int) -> list[bytes]:
    return [b"newest %d" % (count - 1), *(b"layer %d" % number for number in range(count))]


def layers_of(node: Node, name: SnapshotId) -> tuple[DiskId, ...]:
    return node.store.manifest(name).disk_ids


def disks_of(node: Node) -> set[str]:
    return {path.stem for path in node.store.disks.iterdir()}
