"""Damage of what a snapshot lies on, met by the real node over small machines: no machine runs on it, and none is left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from perdure.core.errors import CorruptSnapshot
from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.images.registry import ImageStore, image_to_json
from perdure.images.sparse import file_facts
from perdure.machines.driver import Machine, MachineState
from perdure.node.pool import WarmPool
from perdure.node.shared import below
from perdure.snapshots.layers import disk_file
from perdure.wire.node import CaptureMode, CaptureSpec, FromDisk, FromGolden, FromSnapshot
from tests.fakes.tiny_node import snapshot_id
from tests.torture.node import DIGEST as TORTURE
from tests.torture.node import TortureNode, make_image, start_spec


def flip(path: Path, at: int) -> None:
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[TortureNode]:
    image = tmp_path / "blobs" / TORTURE
    make_image(image)
    home = tmp_path / "home"
    home.mkdir()
    node = TortureNode(home, image)
    facts = {path.name: file_facts(path) for path in image.iterdir()}
    made = (await node._goldens.origin(TORTURE, start_spec(WorkspaceId("ws_one"), 1, FromGolden()).size)).image
    (image / "image.json").write_bytes(image_to_json(made, facts))
    await node.open()
    yield node
    await node.close()


async def slept(node: TortureNode) -> SnapshotId:
    workspace = WorkspaceId("ws_one")
    await node.start(start_spec(workspace, 1, FromGolden()))
    await node.put(workspace, 1, 7)
    return (await node.capture(CaptureSpec(workspace, 1, snapshot_id(), CaptureMode.HIBERNATE))).snapshot_id


async def test_no_machine_runs_on_a_damaged_golden_and_nothing_is_written_over_it(node: TortureNode) -> None:
    name = await slept(node)
    ram = node._goldens._ram.path
    flip(ram, 9000)
    workspace = WorkspaceId("ws_two")
    for source in (FromSnapshot(name), FromGolden()):
        with pytest.raises(CorruptSnapshot) as caught:
            await node.start(start_spec(workspace, 1, source))
        assert caught.value.file == f"images/blobs/{TORTURE}/ram.base"
    assert (node.pids(), node.store.live()) == ([], ())
    with pytest.raises(CorruptSnapshot):
        await node._whole_base_of(node.store.manifest(name))
    await node.start(start_spec(workspace, 1, FromDisk(name, "requested")))  # which does not read it
    await node.stop(workspace, 1)
    flip(ram, 9000)
    await node.start(start_spec(workspace, 2, FromSnapshot(name)))
    assert (await node.prove(workspace, 2)).value == 7
    await node.stop(workspace, 2)


async def test_a_damaged_private_base_is_refused_by_name(node: TortureNode) -> None:
    name = await slept(node)
    assert await node.rebase(name)
    fact = node.store.manifest(name).private_base
    assert fact is not None
    path = node.store.bases / f"{fact.base_id}.ram"
    flip(path, 9000)
    with pytest.raises(CorruptSnapshot) as caught:
        await node.start(start_spec(WorkspaceId("ws_two"), 1, FromSnapshot(name)))
    assert caught.value.file == f"bases/{path.name}"
    assert (node.pids(), node.store.live()) == ([], ())
    listed = {file.name for file in below(node.store, ImageStore(path.parent), node._shared)}
    assert f"bases/{path.name}" in listed


async def test_what_the_snapshots_of_a_node_lie_on_is_listed(node: TortureNode, tmp_path: Path) -> None:
    await slept(node)
    listed = {file.path.name for file in below(node.store, ImageStore(tmp_path), node._shared)}
    assert listed == {"ram.base", "root.raw", "disk.qcow2", "devices.state"}


async def test_a_warm_machine_that_was_taken_for_a_wake_that_fails_is_put_away(node: TortureNode) -> None:
    name = await slept(node)
    made: list[Machine] = []

    async def prepare(_key: tuple[str, str]) -> Machine:
        made.append(cast(Machine, node._goldens.machine(f"warm{len(made)}")))  # type: ignore[attr-defined]
        return made[-1]

    node._pool = node._starter._pool = WarmPool(prepare, 1)
    key = (await node._goldens.origin(TORTURE, node.store.manifest(name).size)).key
    node._pool.refill(key)
    await node._pool.filled(key)
    flip(node.store.disks / disk_file(node.store.manifest(name).disk_ids[-1]), -2000)
    with pytest.raises(CorruptSnapshot, match="qcow2"):
        await node.start(start_spec(WorkspaceId("ws_one"), 2, FromSnapshot(name)))
    assert [machine.state for machine in made] == [MachineState.DEAD]
    assert (node.pids(), node.store.live()) == ([], ())
