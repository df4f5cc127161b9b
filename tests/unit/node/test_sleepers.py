"""What the node does with a snapshot that waits to be looked at when something starts from it, and with one on its own base."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.core.errors import PerdureError
from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.wire.node import CaptureMode, CaptureSpec, FromDisk, FromGolden, FromSnapshot, MemoryFate
from tests.fakes.tiny_node import snapshot_id
from tests.torture.node import TortureNode, make_image, start_spec

ONE, TWO = WorkspaceId("ws_one"), WorkspaceId("ws_two")


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[TortureNode]:
    make_image(tmp_path / "image")
    home = tmp_path / "home"
    home.mkdir()
    node = TortureNode(home, tmp_path / "image")
    await node.open()
    yield node
    await node.close()


async def asleep(node: TortureNode, generation: int = 1, value: int = 7) -> SnapshotId:
    if generation == 1:
        await node.start(start_spec(ONE, 1, FromGolden()))
    await node.put(ONE, generation, value)
    name = snapshot_id()
    await node.capture(CaptureSpec(ONE, generation, name, CaptureMode.HIBERNATE))
    return name


def waiting(node: TortureNode) -> list[SnapshotId]:
    return list(node._compaction._waiting)


async def test_its_own_wake_takes_it_off_the_list(node: TortureNode) -> None:
    name = await asleep(node)
    assert waiting(node) == [name]
    await node.start(start_spec(ONE, 2, FromSnapshot(name)))
    assert waiting(node) == []


async def test_a_fork_does_not(node: TortureNode) -> None:
    name = await asleep(node)
    await node.start(start_spec(TWO, 1, FromSnapshot(name)))
    assert waiting(node) == [name]
    assert (await node.prove(TWO, 1)).value == 7


async def test_a_wake_that_fails_does_not_either(node: TortureNode) -> None:
    name = await asleep(node)
    devices = node.store.snapshots / name / "devices.state"
    good = devices.read_bytes()
    devices.write_bytes(b"damaged")
    with pytest.raises(PerdureError):
        await node.start(start_spec(ONE, 2, FromSnapshot(name)))
    assert waiting(node) == [name]
    devices.write_bytes(good)
    await node.start(start_spec(ONE, 3, FromSnapshot(name)))
    assert waiting(node) == []


async def test_on_its_own_base_it_wakes_forks_reboots_and_sleeps_again(node: TortureNode) -> None:
    name = await asleep(node)
    assert await node.rebase(name)
    report = await node.start(start_spec(ONE, 2, FromSnapshot(name)))
    assert (report.memory, report.pooled) == (MemoryFate.KEPT, False)
    assert (await node.prove(ONE, 2)).value == 7
    await node.start(start_spec(TWO, 1, FromSnapshot(name)))
    assert (await node.prove(TWO, 1)).value == 7
    await node.machines[ONE].kill()
    report = await node.start(start_spec(ONE, 3, FromDisk(None, "guest-reboot"), 2))
    assert report.memory is MemoryFate.LOST
    again = await asleep(node, 3, 8)
    manifest = node.store.manifest(again)
    assert manifest.private_base is None, "what was booted anew lies on the golden"
    await node.stop(TWO, 1)
    await node.delete_snapshots((name,))
    assert list(node.store.bases.iterdir()) == []


async def test_a_plan_made_before_a_rebase_is_carried_out_on_what_is_there_after_it(
    node: TortureNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = await asleep(node)
    plan = node._starter.plan

    async def and_then(spec):  # type: ignore[no-untyped-def]
        planned = await plan(spec)
        assert await node.rebase(name)
        return planned

    monkeypatch.setattr(node._starter, "plan", and_then)
    await node.start(start_spec(ONE, 2, FromSnapshot(name)))
    assert (await node.prove(ONE, 2)).value == 7
    assert (await node.prove(ONE, 2)).wrong == ""
