"""What every ``wire.node.Node`` does: the fake that the control plane is tested on, and the supervisor over QEMU."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from perdure.core.errors import Conflict, MachineDied, NotFound, StaleGeneration
from perdure.core.ids import ExecId, WorkspaceId
from perdure.wire.node import (
    CaptureMode,
    ExecExited,
    ExecOutput,
    ExecSpec,
    FromDisk,
    FromSnapshot,
    HookOutcome,
    MemoryFate,
    NodeEventKind,
    Told,
)
from tests.contract.node.benches import Bench

CHECKPOINT, HIBERNATE = CaptureMode.CHECKPOINT, CaptureMode.HIBERNATE
GONE = (StaleGeneration, NotFound)


async def test_a_new_workspace_answers(bench: Bench) -> None:
    workspace, report = await bench.begin()
    assert report.memory is MemoryFate.NEW
    assert report.execs_running == report.execs_lost == ()
    assert {"running", "hello"} <= set(report.timings_ms)
    guest = bench.node.guest(workspace, 1)
    handle = await guest.start_exec(ExecSpec(ExecId("exe_1"), argv=("echo", "hello")))
    events = [event async for event in handle.events()]
    assert b"".join(event.data for event in events if isinstance(event, ExecOutput)) == b"hello\n"
    assert isinstance(events[-1], ExecExited)
    assert events[-1].exit_code == 0
    assert await guest.ping() >= 0
    usage = await bench.node.usage(workspace, 1)
    assert usage.rss_bytes > 0
    first, second = bench.node.reading(workspace, 1), bench.node.reading(workspace, 1)
    assert second.cpu_s >= first.cpu_s > 0
    assert (first.sent_bytes, first.received_bytes, first.counter) == (0, 0, second.counter)


async def test_calls_of_another_generation_are_refused_and_change_nothing(bench: Bench) -> None:
    workspace, _ = await bench.begin(generation=2)
    for generation in (1, 3):
        with pytest.raises(GONE):
            bench.node.guest(workspace, generation)
        with pytest.raises(GONE):
            bench.node.activity(workspace, generation)
        with pytest.raises(GONE):
            await bench.node.usage(workspace, generation)
        with pytest.raises(GONE):
            bench.node.reading(workspace, generation)
        with pytest.raises(GONE):
            await bench.capture(workspace, generation, HIBERNATE)
    with pytest.raises(StaleGeneration):
        await bench.node.stop(workspace, 1)
    with pytest.raises((StaleGeneration, Conflict)):
        await bench.node.start(bench.spec(workspace, 2))
    assert await bench.node.guest(workspace, 2).ping() >= 0
    assert (await bench.node.inventory()).snapshots == ()


async def test_hibernate_and_wake_keep_memory_and_disk(bench: Bench) -> None:
    workspace, _ = await bench.begin()
    await bench.write(workspace, 1, "/root/file", b"kept")
    before = bench.node.guest(workspace, 1)
    await before.start_exec(ExecSpec(ExecId("exe_1"), argv=bench.world.forever))
    facts = await bench.capture(workspace, 1, HIBERNATE)
    assert (facts.workspace_id, facts.generation, facts.has_memory) == (workspace, 1, True)
    inventory = await bench.node.inventory()
    assert inventory.machines == ()
    assert [found.snapshot_id for found in inventory.snapshots] == [facts.snapshot_id]
    with pytest.raises(GONE):
        await before.ping()
    _, report = await bench.begin(workspace, generation=2, source=FromSnapshot(facts.snapshot_id))
    assert (report.memory, report.memory_reason, report.execs_running) == (MemoryFate.KEPT, "", ("exe_1",))
    guest = bench.node.guest(workspace, 2)
    assert await bench.read(guest, "/root/file") == b"kept"
    assert [info.exec_id for info in await guest.list_execs() if info.exited is None] == ["exe_1"]
    assert bench.node.activity(workspace, 2).open_execs == 1, "a command that runs keeps it awake, watched or not"
    handle = await guest.attach_exec(ExecId("exe_1"))
    await guest.kill_exec(ExecId("exe_1"))
    async for _ in handle.events():
        pass
    assert bench.node.activity(workspace, 2).open_execs == 0


@pytest.mark.long_on("real")
async def test_a_checkpoint_goes_on_and_is_what_a_killed_machine_goes_back_to(bench: Bench) -> None:
    workspace, _ = await bench.begin()
    await bench.write(workspace, 1, "/root/file", b"old")
    facts = await bench.capture(workspace, 1, CHECKPOINT)
    await bench.write(workspace, 1, "/root/file", b"new")
    await bench.world.kill(workspace)
    event = await bench.event(NodeEventKind.DIED)
    assert (event.workspace_id, event.generation) == (workspace, 1)
    with pytest.raises((MachineDied, *GONE)):
        await bench.node.usage(workspace, 1)
    with pytest.raises((MachineDied, *GONE)):
        bench.node.reading(workspace, 1)
    (machine,) = (await bench.node.inventory()).machines
    assert (machine.workspace_id, machine.generation, machine.alive) == (workspace, 1, False)
    lost = await bench.node.salvage(workspace, 1, bench.snapshot_id())
    assert lost is not None
    assert not lost.has_memory
    assert (await bench.node.inventory()).machines == ()
    await bench.begin(workspace, generation=2, source=FromSnapshot(facts.snapshot_id))
    assert await bench.read(bench.node.guest(workspace, 2), "/root/file") == b"old"
    branch, report = await bench.begin(source=FromDisk(lost.snapshot_id, "test"), new_identity=True)
    assert (report.memory, report.memory_reason) == (MemoryFate.LOST, "test")
    assert await bench.read(bench.node.guest(branch, 1), "/root/file") == b"new"


@pytest.mark.long_on("real")
async def test_what_a_killed_node_leaves_can_be_salvaged(bench: Bench) -> None:
    workspace, _ = await bench.begin()
    facts = await bench.capture(workspace, 1, CHECKPOINT)
    await bench.write(workspace, 1, "/root/file", b"synced")
    await bench.crash()
    inventory = await bench.node.inventory()
    assert [found.snapshot_id for found in inventory.snapshots] == [facts.snapshot_id]
    assert [(machine.workspace_id, machine.generation) for machine in inventory.machines] == [(workspace, 1)]
    await bench.node.stop(workspace, 1, keep_overlay=True)
    lost = await bench.node.salvage(workspace, 1, bench.snapshot_id())
    assert lost is not None
    branch, _ = await bench.begin(source=FromDisk(lost.snapshot_id, "test"), new_identity=True)
    assert await bench.read(bench.node.guest(branch, 1), "/root/file") == b"synced"


async def test_stopping_and_deleting_what_is_gone_succeed(bench: Bench) -> None:
    workspace, _ = await bench.begin()
    facts = await bench.capture(workspace, 1, CHECKPOINT)
    await bench.node.stop(workspace, 1)
    await bench.node.stop(workspace, 1)
    assert (await bench.node.inventory()).machines == ()
    with pytest.raises(NotFound):
        await bench.node.salvage(workspace, 1, bench.snapshot_id())
    assert await bench.node.delete_snapshots((facts.snapshot_id,)) > 0
    assert await bench.node.delete_snapshots((facts.snapshot_id,)) == 0
    assert (await bench.node.inventory()).snapshots == ()


async def test_salvage_refuses_a_running_machine(bench: Bench) -> None:
    workspace, _ = await bench.begin()
    with pytest.raises(Conflict):
        await bench.node.salvage(workspace, 1, bench.snapshot_id())
    assert await bench.node.guest(workspace, 1).ping() >= 0


async def test_a_start_that_fails_leaves_nothing_running(bench: Bench) -> None:
    workspace = bench.workspace_id()
    with pytest.raises(NotFound):
        await bench.node.start(bench.spec(workspace, 1, FromSnapshot(bench.snapshot_id())))
    assert [machine for machine in (await bench.node.inventory()).machines if machine.alive] == []
    await bench.begin(workspace, generation=2)


async def test_snapshots_are_verified_by_name(bench: Bench) -> None:
    workspace, _ = await bench.begin()
    facts = await bench.capture(workspace, 1, HIBERNATE)
    assert await bench.node.snapshot(facts.snapshot_id) == facts
    with pytest.raises(NotFound):
        await bench.node.snapshot(bench.snapshot_id())


async def test_branches_of_one_snapshot_are_strangers_to_each_other(bench: Bench) -> None:
    parent, _ = await bench.begin()
    await bench.write(parent, 1, "/root/file", b"shared")
    facts = await bench.capture(parent, 1, CHECKPOINT)
    assert facts.quiesced
    one, report = await bench.begin(source=FromSnapshot(facts.snapshot_id), new_identity=True)
    two, _ = await bench.begin(source=FromSnapshot(facts.snapshot_id), new_identity=True)
    assert report.memory is MemoryFate.KEPT
    await bench.write(one, 1, "/root/file", b"one")
    assert await bench.read(bench.node.guest(two, 1), "/root/file") == b"shared"
    assert await bench.read(bench.node.guest(parent, 1), "/root/file") == b"shared"
    path = bench.world.machine_id_path
    assert len({await bench.read(bench.node.guest(one_of, 1), path) for one_of in (parent, one, two)}) == 3


@pytest.mark.long_on("real")
async def test_a_branch_outlives_the_snapshot_it_came_from(bench: Bench) -> None:
    parent, _ = await bench.begin()
    await bench.write(parent, 1, "/root/file", b"shared")
    origin = await bench.capture(parent, 1, HIBERNATE)
    branch, _ = await bench.begin(source=FromSnapshot(origin.snapshot_id), new_identity=True)
    own = await bench.capture(branch, 1, HIBERNATE)
    await bench.node.delete_snapshots((origin.snapshot_id,))
    await bench.begin(branch, generation=2, source=FromSnapshot(own.snapshot_id))
    assert await bench.read(bench.node.guest(branch, 2), "/root/file") == b"shared"


async def test_snapshots_weigh_what_their_removal_frees_and_what_they_share(bench: Bench) -> None:
    workspace, _ = await bench.begin()
    await bench.write(workspace, 1, "/root/file", b"x" * 100_000)
    first = await bench.capture(workspace, 1, CHECKPOINT)
    second = await bench.capture(workspace, 1, HIBERNATE)
    unknown = bench.snapshot_id()
    sizes = await bench.node.stored_sizes((first.snapshot_id, second.snapshot_id, unknown))
    assert set(sizes) == {first.snapshot_id, second.snapshot_id}
    for one in sizes.values():
        assert 0 < one.own_bytes <= one.total_bytes
        assert one.shared_bytes == one.total_bytes - one.own_bytes
    await bench.node.delete_snapshots((first.snapshot_id,))
    left = await bench.node.stored_sizes((first.snapshot_id, second.snapshot_id))
    assert set(left) == {second.snapshot_id}
    assert left[second.snapshot_id].own_bytes >= sizes[second.snapshot_id].own_bytes, "what it shared may be its own now"


@pytest.mark.long_on("real")
async def test_a_reboot_goes_on_with_the_newest_disk(bench: Bench) -> None:
    workspace, _ = await bench.begin()
    await bench.write(workspace, 1, "/root/file", b"new")
    await bench.world.reboot(workspace)
    event = await bench.event(NodeEventKind.GUEST_REBOOT)
    assert (event.workspace_id, event.generation) == (workspace, 1)
    _, report = await bench.begin(workspace, generation=2, source=FromDisk(None, "guest-reboot"), new_identity=False, take_over=1)
    assert (report.memory, report.memory_reason) == (MemoryFate.LOST, "guest-reboot")
    assert await bench.read(bench.node.guest(workspace, 2), "/root/file") == b"new"
    machines = (await bench.node.inventory()).machines
    assert [(machine.generation, machine.alive) for machine in machines] == [(2, True)]


@pytest.mark.long_on("real")
async def test_a_disk_that_was_taken_over_is_still_newer_than_the_last_capture(bench: Bench) -> None:
    workspace, _ = await bench.begin()
    await bench.write(workspace, 1, "/root/file", b"new")
    await bench.world.reboot(workspace)
    await bench.event(NodeEventKind.GUEST_REBOOT)
    await bench.begin(workspace, generation=2, source=FromDisk(None, "guest-reboot"), new_identity=False, take_over=1)
    await bench.node.stop(workspace, 2, keep_overlay=True)
    lost = await bench.node.salvage(workspace, 2, bench.snapshot_id())
    assert lost is not None
    branch, _ = await bench.begin(source=FromDisk(lost.snapshot_id, "test"), new_identity=True)
    assert await bench.read(bench.node.guest(branch, 1), "/root/file") == b"new"


# ------------------------------------------------------------------------------------------------------- inside, at a wake


async def inside(bench: Bench, workspace: WorkspaceId, generation: int) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(await bench.read(bench.node.guest(workspace, generation), "/run/perdure/resume.json"))
    return report


@pytest.mark.long_on("real")
async def test_a_workspace_reads_its_own_report_after_a_wake_a_fork_and_a_disk_boot(bench: Bench) -> None:
    workspace, _ = await bench.begin()
    report = await inside(bench, workspace, 1)
    assert (report["workspace_id"], report["generation"], report["memory"]) == (workspace, 1, "new")
    await bench.node.guest(workspace, 1).start_exec(ExecSpec(ExecId("exe_1"), argv=bench.world.forever))
    facts = await bench.capture(workspace, 1, HIBERNATE)
    told = Told({"snapshot_id": facts.snapshot_id, "asleep_s": 5.0, "disk": "kept"}, rewound="on request")
    woken, _ = await bench.begin(workspace, generation=2, source=FromSnapshot(facts.snapshot_id), told=told)
    report = await inside(bench, woken, 2)
    expected = {**told.facts, "generation": 2, "memory": "kept", "memory_reason": "rewound: on request", "problems": []}
    assert expected.items() <= report.items()
    assert (report["execs_running"], report["hooks"]) == (["exe_1"], [])
    fork, _ = await bench.begin(generation=1, source=FromSnapshot(facts.snapshot_id), new_identity=True)
    report = await inside(bench, fork, 1)
    assert (report["workspace_id"], report["generation"], report["memory"]) == (fork, 1, "kept")
    await bench.node.stop(workspace, 2)
    await bench.node.stop(fork, 1)
    _, booted = await bench.begin(workspace, generation=3, source=FromDisk(facts.snapshot_id, "requested"))
    assert booted.memory is MemoryFate.LOST
    report = await inside(bench, workspace, 3)
    assert (report["generation"], report["memory"], report["memory_reason"]) == (3, "lost", "requested")


@pytest.mark.long_on("real")
async def test_hooks_run_at_a_wake_in_their_order_and_are_told(bench: Bench) -> None:
    workspace, report = await bench.begin()
    assert report.hooks == ()
    guest = bench.node.guest(workspace, 1)
    await guest.make_dir("/etc/perdure/on-wake.d")
    for name, line, mode in (("20-b", "exit 3", 0o755), ("10-a", "echo hello", 0o755), ("15-no", "echo never", 0o644)):

        async def content(line: str = line) -> AsyncIterator[bytes]:
            yield f"#!/bin/sh\n{line}\n".encode()

        await guest.write_file(f"/etc/perdure/on-wake.d/{name}", content(), mode=mode)
    facts = await bench.capture(workspace, 1, HIBERNATE)
    for generation, source in ((2, FromSnapshot(facts.snapshot_id)), (3, FromDisk(facts.snapshot_id, "requested"))):
        _, report = await bench.begin(workspace, generation=generation, source=source)
        ran = [(hook.name, hook.outcome, hook.exit_code, hook.output) for hook in report.hooks]
        assert ran == [("10-a", HookOutcome.OK, 0, "hello\n"), ("20-b", HookOutcome.FAILED, 3, "")]
        told = await inside(bench, workspace, generation)
        assert [(hook["name"], hook["outcome"]) for hook in told["hooks"]] == [("10-a", "ok"), ("20-b", "failed")]
        await bench.node.stop(workspace, generation)
