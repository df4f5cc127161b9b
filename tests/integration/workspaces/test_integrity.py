"""Damage, as a workspace's owner meets it: named, with what else is whole, and a way there."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest

from perdure.core.errors import Conflict, CorruptSnapshot, InvalidRequest, NotFound
from perdure.core.ids import SnapshotId
from perdure.wire.node import Damage, MemoryFate, TrialKind
from perdure.workspaces.model import Recovery, Verified, Verifying, WorkspaceState
from tests.fakes.control_plane import CTX, OTHER, ControlPlane

HIBERNATED, RUNNING, FAILED = WorkspaceState.HIBERNATED, WorkspaceState.RUNNING, WorkspaceState.FAILED


def spoil(plane: ControlPlane, snapshot_id: SnapshotId, *, disk: bool = False) -> str:
    """One file of it is damaged; returns its name."""
    file = f"{'disks/dsk' if disk else 'segments/seg'}_of_{snapshot_id}"
    plane.node.damage[snapshot_id] = (Damage(file, f"The stored file {file} is damaged: its checksum does not hold."),)
    if disk:
        plane.node.bad_disk.add(snapshot_id)
    return file


async def three(plane: ControlPlane) -> list[SnapshotId]:
    """A sleeping workspace whose file says in which of its three snapshots it is."""
    await plane.create()
    made = []
    for step in ("one", "two"):
        await plane.write("demo", "/root/file", step.encode())
        made.append((await plane.service.checkpoint(CTX, "demo", name=step)).id)
    await plane.write("demo", "/root/file", b"three")
    _, head = await plane.service.sleep(CTX, "demo")
    return [*made, head.id]


async def verify(plane: ControlPlane, ref: str | None = "demo", **how: Any) -> list[Verified]:
    found: list[Verified] = []
    async with aclosing(plane.service.verify(how.pop("ctx", CTX), ref, **how)) as events:
        async for event in events:
            if isinstance(event, Verifying):
                assert event.done == len(found) < event.count
            else:
                found.append(event)
    return found


async def test_a_damaged_head_is_named_with_the_newest_intact_ancestor_and_rewind_goes_there(plane: ControlPlane) -> None:
    one, two, head = await three(plane)
    file = spoil(plane, head)
    with pytest.raises(CorruptSnapshot) as caught:
        await plane.service.wake(CTX, "demo")
    error = caught.value
    assert file in error.message
    assert error.details == {"file": file, "snapshot_id": head, "ancestor": two, "disk": "intact"}
    assert two in error.hint
    assert 0 < error.hint.index("--how disk-boot") < error.hint.index("perdure recover demo --how rewind")
    assert error.public()["details"] == error.details
    workspace = await plane.service.get(CTX, "demo")
    assert workspace.state is FAILED
    assert file in workspace.state_detail and two in workspace.state_detail
    workspace, report = await plane.service.recover(CTX, "demo", Recovery.REWIND)
    assert (workspace.state, workspace.head_snapshot_id, report.snapshot_id) == (RUNNING, two, two)
    assert report.memory is MemoryFate.KEPT and report.memory_reason.startswith("rewound: ")
    assert await plane.read("demo", "/root/file") == b"two"
    assert one != two


async def test_a_damaged_head_is_kept_as_damaged_as_it_was_until_somebody_discards_it(plane: ControlPlane) -> None:
    _, two, head = await three(plane)
    spoil(plane, head)
    with pytest.raises(CorruptSnapshot):
        await plane.service.wake(CTX, "demo")
    _, report = await plane.service.recover(CTX, "demo", Recovery.REWIND)
    branch = report.kept_branch
    assert branch is not None and branch.startswith("demo@before-")
    (entry,) = [entry for entry in await plane.service.log(CTX, "demo") if entry.body.get("how") == "rewind"]
    assert entry.body["kept_branch"] == branch
    await plane.service.upkeep.clean()
    with pytest.raises(CorruptSnapshot) as caught:
        await plane.service.wake(CTX, branch)
    assert (caught.value.details["snapshot_id"], caught.value.details["ancestor"]) == (head, two)
    _, booted = await plane.service.recover(CTX, branch, Recovery.DISK_BOOT)
    assert booted.memory is MemoryFate.LOST
    assert await plane.read(branch, "/root/file") == b"three", "its disk was whole"
    await plane.service.discard(CTX, branch)
    await plane.service.upkeep.clean()
    assert head not in plane.node.stored and two in plane.node.stored


async def test_an_ancestor_that_is_damaged_too_is_passed(plane: ControlPlane) -> None:
    one, two, head = await three(plane)
    spoil(plane, head)
    spoil(plane, two, disk=True)
    with pytest.raises(CorruptSnapshot) as caught:
        await plane.service.wake(CTX, "demo")
    assert caught.value.details["ancestor"] == one
    _, report = await plane.service.recover(CTX, "demo", Recovery.REWIND)
    assert report.snapshot_id == one
    assert "past 1 that are damaged" in report.memory_reason
    assert await plane.read("demo", "/root/file") == b"one"
    entry = [entry for entry in await plane.service.log(CTX, "demo") if entry.body.get("how") == "rewind"]
    assert (entry[0].body["snapshot_id"], entry[0].body["damaged"]) == (one, 1)


async def test_without_an_intact_ancestor_the_disk_is_offered_if_it_is_whole(plane: ControlPlane) -> None:
    *older, head = await three(plane)
    for snapshot_id in older:
        spoil(plane, snapshot_id)
    spoil(plane, head)
    with pytest.raises(CorruptSnapshot) as caught:
        await plane.service.wake(CTX, "demo")
    assert "ancestor" not in caught.value.details
    assert "No snapshot before it is intact." in caught.value.hint and "--how disk-boot" in caught.value.hint
    with pytest.raises(Conflict, match=r"no intact snapshot before its last one \(2 are damaged\)"):
        await plane.service.recover(CTX, "demo", Recovery.REWIND)
    assert await plane.state("demo") is FAILED
    _, report = await plane.service.recover(CTX, "demo", Recovery.DISK_BOOT)
    assert report.memory is MemoryFate.LOST
    assert await plane.read("demo", "/root/file") == b"three"


async def test_when_nothing_is_whole_it_says_so(plane: ControlPlane) -> None:
    for snapshot_id in await three(plane):
        spoil(plane, snapshot_id, disk=True)
    with pytest.raises(CorruptSnapshot) as caught:
        await plane.service.wake(CTX, "demo")
    assert caught.value.details["disk"] == "damaged"
    assert "disk-boot" not in caught.value.hint and "perdure snapshot verify demo" in caught.value.hint
    with pytest.raises(CorruptSnapshot):
        await plane.service.recover(CTX, "demo", Recovery.DISK_BOOT)
    assert await plane.state("demo") is FAILED
    assert "--how damaged-disk" in caught.value.hint
    _, report = await plane.service.recover(CTX, "demo", Recovery.DAMAGED_DISK)
    assert (report.memory, report.memory_reason) == (MemoryFate.LOST, "requested; its disk was not checked")
    assert await plane.read("demo", "/root/file") == b"three"


async def test_files_that_were_put_back_wake(plane: ControlPlane) -> None:
    for snapshot_id in await three(plane):
        spoil(plane, snapshot_id, disk=True)
    with pytest.raises(CorruptSnapshot):
        await plane.service.wake(CTX, "demo")
    plane.node.damage.clear()
    plane.node.bad_disk.clear()
    _, report = await plane.service.recover(CTX, "demo", Recovery.RETRY)
    assert report.memory is MemoryFate.KEPT


async def test_files_that_are_missing_at_a_start_are_offered_the_same(plane: ControlPlane) -> None:
    _, two, head = await three(plane)
    del plane.node.stored[head]
    await plane.service.upkeep.reconcile()
    assert await plane.state("demo") is FAILED
    for _ in range(2):  # every caller hears it, and the head is looked at once
        with pytest.raises(CorruptSnapshot) as caught:
            await plane.service.wake(CTX, "demo")
        assert caught.value.details == {
            "file": f"snapshots/{head}/manifest.json", "snapshot_id": head, "ancestor": two, "disk": "damaged",
        }  # fmt: skip
    assert plane.node.calls.count("verify") == 2
    _, report = await plane.service.recover(CTX, "demo", Recovery.REWIND)
    assert report.snapshot_id == two


async def test_files_that_go_missing_while_it_sleeps_are_damage(plane: ControlPlane) -> None:
    _, two, head = await three(plane)
    del plane.node.stored[head]
    with pytest.raises(CorruptSnapshot) as caught:
        await plane.service.wake(CTX, "demo")
    assert (caught.value.details["snapshot_id"], caught.value.details["ancestor"]) == (head, two)


async def test_a_branch_goes_back_to_what_it_was_forked_from(plane: ControlPlane) -> None:
    _, two, _ = await three(plane)
    await plane.service.fork(CTX, "demo", 1, snapshot=two, names=("branch",))
    await plane.write("branch", "/root/file", b"branch")
    _, own = await plane.service.sleep(CTX, "branch")
    spoil(plane, own.id)
    with pytest.raises(CorruptSnapshot) as caught:
        await plane.service.wake(CTX, "branch")
    assert caught.value.details["ancestor"] == two
    _, report = await plane.service.recover(CTX, "branch", Recovery.REWIND)
    assert report.snapshot_id == two
    assert await plane.read("branch", "/root/file") == b"two"


async def test_a_damaged_snapshot_is_neither_forked_nor_gone_back_to(plane: ControlPlane) -> None:
    one, two, head = await three(plane)
    spoil(plane, two)
    (failed,) = await plane.service.fork(CTX, "demo", 1, snapshot=two, names=("branch",))
    assert isinstance(failed, CorruptSnapshot)
    assert failed.details["ancestor"] == one and f"--snapshot {one}" in failed.hint
    with pytest.raises(NotFound):
        await plane.service.get(CTX, "branch")
    with pytest.raises(CorruptSnapshot) as caught:
        await plane.service.rewind(CTX, "demo", "two")
    assert caught.value.details["ancestor"] == one and f"perdure rewind demo {one}" in caught.value.hint
    assert (await plane.service.get(CTX, "demo")).head_snapshot_id == head
    assert await plane.state("demo") is HIBERNATED


async def test_a_workspace_that_failed_for_another_reason_is_not_said_to_be_damaged(plane: ControlPlane) -> None:
    await three(plane)
    await plane.service.wake(CTX, "demo")
    workspace = await plane.service.get(CTX, "demo")
    plane.node.hang(workspace.id)
    await plane.until("demo", lambda workspace: workspace.state is FAILED)
    with pytest.raises(Conflict) as caught:
        await plane.service.wake(CTX, "demo")
    assert caught.value.details == {}


# -------------------------------------------------------------------------------------------------------------------- verify


async def test_verifying_lists_all_damage_and_changes_nothing(plane: ControlPlane) -> None:
    one, two, head = await three(plane)
    await plane.create("other")
    assert [found.intact for found in await verify(plane)] == [True, True, True]
    files = [spoil(plane, head), spoil(plane, two, disk=True)]
    found = {result.snapshot.id: result for result in await verify(plane)}
    assert [found[snapshot_id].intact for snapshot_id in (one, two, head)] == [True, False, False]
    assert [found[head].damage[0].file, found[two].damage[0].file] == files
    assert (found[head].ancestor, found[two].ancestor, found[one].ancestor) == (one, one, None)
    assert (found[head].disk_intact, found[two].disk_intact) == (True, False)
    assert await plane.state("demo") is HIBERNATED
    assert await plane.state("other") is RUNNING


async def test_one_snapshot_by_its_name_with_a_trial(plane: ControlPlane) -> None:
    _, two, _ = await three(plane)
    plane.node.untrue[two] = "vmm: 7.2 is now 10.0"
    (result,) = await verify(plane, snapshot="two", trial=True)
    assert result.snapshot.id == two and result.trial is not None
    assert (result.trial.kind, result.trial.reason) == (TrialKind.DISK, "fingerprint: vmm: 7.2 is now 10.0")
    with pytest.raises(NotFound, match="no snapshot 'four'"):
        await verify(plane, snapshot="four")


async def test_all_workspaces_of_a_tenant_and_of_nobody_else(plane: ControlPlane) -> None:
    await three(plane)
    await plane.create("other")
    await plane.service.sleep(CTX, "other")
    assert [result.workspace.name for result in await verify(plane, None)] == ["demo", "demo", "demo", "other"]
    assert await verify(plane, None, ctx=OTHER) == []
    with pytest.raises(NotFound):
        await verify(plane, "demo", ctx=OTHER)
    with pytest.raises(InvalidRequest):
        await verify(plane, None, snapshot="two")


async def test_a_snapshot_the_node_does_not_have_is_damage_unless_it_was_removed(plane: ControlPlane) -> None:
    _, two, head = await three(plane)
    del plane.node.stored[head]
    found = {result.snapshot.id: result for result in await verify(plane)}
    assert [damage.file for damage in found[head].damage] == [f"snapshots/{head}/manifest.json"]
    assert found[head].ancestor == two
    plane.node.stored.pop(two)
    removed = False
    async with aclosing(plane.service.verify(CTX, "demo")) as events:
        async for event in events:
            if not removed:
                await plane.service.remove_snapshot(CTX, "demo", "two")
                removed = True
            if isinstance(event, Verified):
                assert event.snapshot.id != two
    assert removed
