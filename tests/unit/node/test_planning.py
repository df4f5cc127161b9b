"""What a wake does with a snapshot, by its fingerprint: the same machine keeps memory, another boots the disk and says why."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from perdure.core.ids import DEFAULT_TENANT, BaseId, SnapshotId, WorkspaceId
from perdure.machines.fingerprint import fingerprint
from perdure.machines.guestlink_hooks import HookLimits
from perdure.node.goldens import Origin
from perdure.node.starting import Starter
from perdure.snapshots.manifest import BaseFact, BaseRef, FileFact, Manifest, MemoryFacts
from perdure.wire.node import FromSnapshot, Identity, MachineSize, MemoryFate, StartSpec

SIZE = MachineSize(512, 1)
PARTS = {
    **{"vmm": "7.2.22", "machine": "pc-q35-7.2", "cpu_model": "max", "accelerator": "tcg", "tsc_khz": "any"},
    **{"memory_mib": "512", "vcpus": "1", "arguments": "abc", "kernel": "def", "agent_protocol": "2"},
}
BASE = BaseRef("ab" * 32, "512m1c-1.2")
FACT = FileFact("x", 1, "0")
MEMORY = MemoryFacts(BASE, FACT, FACT, {}, 0, 0, 0, fingerprint(PARTS), PARTS)
NAME = SnapshotId(f"snp_{'0' * 26}")
MANIFEST = Manifest(
    snapshot_id=NAME,
    workspace_id=WorkspaceId("ws_one"),
    tenant_id=DEFAULT_TENANT,
    generation=1,
    parent_id=None,
    image=BASE.image,
    size=SIZE,
    disk_gib=8,
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
    quiesced=True,
    pause_s=0.0,
    disk_base=BASE,
    layers=(),
    memory=MEMORY,
)
SPEC = StartSpec(Identity(WorkspaceId("ws_one"), DEFAULT_TENANT, 2, "one", "0" * 32), BASE.image, SIZE, 8, FromSnapshot(NAME))


def starter(manifest: Manifest) -> Starter:
    """Of a host whose machines have ``PARTS``."""
    origin = Origin(cast(Any, None), SIZE, cast(Any, None), cast(Any, None), fingerprint(PARTS), PARTS)

    async def find(_image: str, _size: MachineSize) -> Origin:
        return origin

    goldens = SimpleNamespace(origin=find, at=lambda origin, _ref: origin)
    store = SimpleNamespace(manifest=lambda _snapshot_id: manifest)
    return Starter(cast(Any, goldens), cast(Any, store), cast(Any, None), cast(Any, None), 1.0, HookLimits(1.0, 1.0))


async def test_a_snapshot_of_the_same_machine_keeps_its_memory() -> None:
    plan = await starter(MANIFEST).plan(SPEC)
    assert (plan.with_memory, plan.memory, plan.reason) == (True, MemoryFate.KEPT, "")


@pytest.mark.parametrize("part", PARTS)
async def test_one_part_that_differs_is_enough_and_is_named(part: str) -> None:
    other = {**PARTS, part: "other"}
    memory = replace(MEMORY, fingerprint_parts=other, fingerprint=fingerprint(other))
    plan = await starter(replace(MANIFEST, memory=memory)).plan(SPEC)
    assert (plan.with_memory, plan.memory) == (False, MemoryFate.LOST)
    assert plan.manifest is not None, "the disk of the same snapshot is booted"
    assert plan.reason == f"fingerprint: {part}: other is now {PARTS[part]}"


async def test_parts_that_one_side_does_not_know_are_named_too() -> None:
    other = {**{key: value for key, value in PARTS.items() if key != "arguments"}, "agent_release": "fe"}
    memory = replace(MEMORY, fingerprint_parts=other, fingerprint=fingerprint(other))
    plan = await starter(replace(MANIFEST, memory=memory)).plan(SPEC)
    assert plan.reason == "fingerprint: agent_release: fe is now absent; arguments: absent is now abc"


async def test_a_snapshot_without_memory_says_so() -> None:
    plan = await starter(replace(MANIFEST, memory=None)).plan(SPEC)
    assert (plan.with_memory, plan.memory, plan.reason) == (False, MemoryFate.LOST, "no-memory-in-snapshot")


async def test_a_snapshot_on_its_own_base_needs_no_older_golden() -> None:
    own = replace(BASE, golden=None, private=BaseFact(BaseId("bas_1"), 512 << 20, 0, "0"))
    plan = await starter(replace(MANIFEST, memory=replace(MEMORY, base=own))).plan(SPEC)
    assert (plan.with_memory, plan.memory, plan.reason) == (True, MemoryFate.KEPT, "")
