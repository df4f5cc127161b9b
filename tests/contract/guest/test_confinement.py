"""Users' processes stay where a capture freezes them and a limit kills them, whatever root tries inside."""

from __future__ import annotations

import pytest

from perdure.wire.node import ExecEnd, ExecOutput, ExecSpec, ExecStarted
from tests.contract.guest.escape import ESCAPE, tried
from tests.contract.guest.places import DEADLINE_S, Place, new_id
from tests.fakes.guest_agent import cgroup_mount

pytestmark = pytest.mark.asyncio(loop_scope="session")

#: Long enough for the program to try everything in an emulated machine, and for a look at it while it is frozen.
LIMIT_S = 25.0

CHROOT_TRICK = """
import os
os.makedirs("/run/trick", exist_ok=True)
outside = os.open("/", os.O_RDONLY)
os.chroot("/run/trick")
os.fchdir(outside)
for _ in range(64):
    os.chdir("..")
os.chroot(".")
root = os.stat("/")
print(f"{root.st_dev}:{root.st_ino}")
"""


async def test_no_way_leads_to_the_agents_root(real: Place) -> None:
    """Neither up from a second chroot, nor through process 1, nor into its mount namespace, nor below what is mounted."""
    lines = ["stat -c %d:%i /", f"python3 -c '{CHROOT_TRICK}'", "nsenter --mount=/proc/1/ns/mnt stat -c %d:%i /"]
    lines += ["stat -L -c %d:%i /proc/1/root", "nsenter --mount=/proc/1/ns/mnt cat /proc/1/comm"]
    done = await real.run("; ".join(lines))
    mine, *others, init = done.stdout.decode().split()
    assert others == [mine] * 3 and init == "perdure-init", done.stderr.decode()
    dig = "while umount -l {0}; do :; done; ls {0}"
    under = "; ".join(dig.format(place) for place in ("/sys/fs/cgroup", "/proc"))  # umount needs /proc
    done = await real.run(f"unshare --mount sh -c '{under}' 2>/dev/null; true")
    assert done.stdout == b""


async def test_a_command_sees_its_own_cgroup_as_the_root(real: Place) -> None:
    if real.kind == "agent" and cgroup_mount() is None:
        pytest.skip("this host has no cgroup2")
    done = await real.run(
        "grep ^0:: /proc/self/cgroup; d=$(mktemp -d); mount -t cgroup2 none $d && cat $d/cgroup.procs; echo $$; umount $d"
    )
    group, *pids, own = done.stdout.decode().split()
    assert group == "0::/"
    assert own in pids and len(pids) <= 2


@pytest.mark.qemu
async def test_who_tries_to_leave_is_frozen_for_a_capture_and_killed_by_a_limit(vm_place: Place) -> None:
    place = vm_place
    other = await place.guest.start_exec(ExecSpec(new_id(), shell="exec sleep 1000"))
    first = await anext(other.events())
    assert isinstance(first, ExecStarted)
    argv = ("python3", "-c", ESCAPE, str(first.pid))
    handle = await place.guest.start_exec(ExecSpec(new_id(), argv=argv, run_limit_s=LIMIT_S, kill_grace_s=0.2))
    events = handle.events()
    said = b""
    while not said.endswith(b"\n"):
        event = await anext(events)
        assert isinstance(event, ExecStarted | ExecOutput), (event, said)
        said += event.data if isinstance(event, ExecOutput) else b""
    report = tried(said)

    assert len(report.places) == 4, "it has seen the groups of process 1, of another command, and its own"
    assert report.escapes == [] and ".." not in report.group
    assert report.delegated, "what is below its own group is its to use"

    async def count() -> int:
        return int(b"".join([part async for part in place.guest.read_file(f"/run/count-{report.pid}")]))

    counter = f"/run/count-{report.pid}"
    await place.run(f"until [ -s {counter} ]; do sleep 0.1; done", run_limit_s=DEADLINE_S)
    try:
        assert await place.link.quiesce(deadline_s=10)
        before = await count()
        for _ in range(10):
            await place.link.ping()
        assert await count() == before, "it goes on while everybody stands still"
    finally:
        await place.link.thaw()
    await place.run(f"until [ $(cat {counter}) -gt {before} ]; do sleep 0.1; done", run_limit_s=DEADLINE_S)

    last = [event async for event in events][-1]
    assert (last.end, last.signal) == (ExecEnd.RUN_LIMIT, 9)
    gone = await place.run(f"while kill -0 {report.pid}; do sleep 0.1; done", run_limit_s=DEADLINE_S)
    assert gone.exited.end is ExecEnd.EXITED, "it has outlived the limit"
    assert (await place.run(f"kill -0 {first.pid}")).exited.exit_code == 0, "another command is not concerned"
    await place.guest.kill_exec(other.exec_id)
    await other.close()


@pytest.mark.qemu
async def test_a_neighbour_cannot_make_a_group_one_that_is_not_killed_as_a_whole(vm_place: Place) -> None:
    """The kernel refuses cgroup.kill for a threaded group, and a neighbour's namespace does not protect its root's type."""
    place = vm_place
    shell = "mkdir -p /run/mine; mount -t cgroup2 none /run/mine; trap '' TERM; echo ready; while :; do sleep 1; done"
    handle = await place.guest.start_exec(ExecSpec(new_id(), shell=shell, kill_grace_s=0.2))
    events = handle.events()
    while not isinstance(await anext(events), ExecOutput):
        continue
    done = await place.run("echo threaded >/run/mine/cgroup.type; cat /run/mine/cgroup.type; umount -l /run/mine")
    assert done.stdout == b"domain\n" and b"not supported" in done.stderr
    await place.guest.kill_exec(handle.exec_id)
    last = [event async for event in events][-1]
    assert (last.end, last.signal) == (ExecEnd.KILLED, 9)
