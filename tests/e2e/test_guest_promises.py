"""What the issue promises about a guest, in a real machine and through the SDK: whatever its users do inside, it serves on."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.core.errors import NoSpace, PerdureError
from perdure.sdk import CommandHandle, Workspace
from tests.contract.guest.escape import ESCAPE, tried
from tests.e2e.live import Live, attempt, machine_of, serving, shell, until

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(900)]

BOOT = "cat /proc/sys/kernel/random/boot_id"
#: reboot(2) as a program calls it.
REBOOT = 'python3 -c "import ctypes; ctypes.CDLL(None).reboot({:#x})"'
RESTART, POWER_OFF = 0x01234567, 0x4321FEDC
UNRESPONSIVE_S = 20.0


@pytest.fixture(scope="module")
def live(base_image: Path) -> Iterator[Live]:
    with serving(PERDURE_UNRESPONSIVE_S=str(UNRESPONSIVE_S)) as server:
        yield server


@pytest.fixture(scope="module")
def workspace(live: Live) -> Workspace:
    """One machine for all that a machine survives."""
    return live.workspace("subject", checkpoint_interval_s=0)


def running(workspace: Workspace, line: str) -> CommandHandle:
    handle = workspace.commands.run(line, background=True)
    assert isinstance(handle, CommandHandle)
    return handle


# ------------------------------------------------------------------------------------------------------- without a restart


def test_a_command_returns_when_its_own_process_ends(workspace: Workspace) -> None:
    """The one it leaves in the background holds stdout and stderr and goes on."""
    done = attempt(workspace, "sleep 4321 & echo $!")
    pid = done.stdout.strip()
    assert (done.exit_code, done.end) == (0, "exited")
    assert shell(workspace, f"cat /proc/{pid}/comm; readlink /proc/{pid}/fd/1").split()[0] == "sleep"
    shell(workspace, f"kill {pid}")


def test_the_agent_is_not_among_the_users_processes(workspace: Workspace) -> None:
    """Process 1 is a reaper of the users' own; root inside can neither see nor signal the agent, nor end process 1."""
    boot = shell(workspace, BOOT)
    listed = shell(workspace, "ps -e -o pid=,args=; kill -9 1; kill -9 -1; true", user="root")
    pids = [int(line.split()[0]) for line in listed.splitlines()]
    assert len(pids) <= 4 and max(pids) > 1, listed
    assert shell(workspace, BOOT) == boot


def test_the_kernel_spares_the_agent_when_memory_runs_out(workspace: Workspace) -> None:
    watcher = running(workspace, "echo begun; exec sleep 5432")
    eater = "import itertools\nkept = [bytearray(b'x') * (8 << 20) for _ in itertools.count()]"
    done = workspace.commands.run(["python3", "-c", eater])
    assert (done.end, done.exit_code) == ("oom", 137)
    listed = {info.exec_id: info for info in workspace.commands.list()}
    assert listed[watcher.exec_id].outcome is None, "the agent that started it still knows it"
    watcher.kill()


@pytest.mark.long
def test_who_tries_to_leave_is_frozen_for_a_checkpoint_and_killed_by_a_limit(workspace: Workspace) -> None:
    """The guest's contract shows that it stands still; here the checkpoint says that everybody did, and the limit gets it."""
    neighbour = running(workspace, "echo $$; exec sleep 5432")
    pid = next(iter(neighbour)).text.strip()
    options: dict[str, Any] = {"user": "root", "run_limit_s": 40.0, "kill_grace_s": 0.2, "background": True}
    trying = workspace.commands.run(["python3", "-c", ESCAPE, pid], **options)
    said = b""
    for output in trying:
        said += output.data
        if said.endswith(b"\n"):
            break
    report = tried(said)
    assert len(report.places) == 4 and report.delegated, report
    assert report.escapes == [] and ".." not in report.group, report
    assert workspace.checkpoint().quiesced
    end = trying.wait(timeout=120)
    assert (end.end, end.exit_code) == ("run-limit", 137)
    shell(workspace, f"while kill -0 {report.pid}; do sleep 0.1; done")
    shell(workspace, f"kill -0 {pid}")
    neighbour.kill()


def test_without_python_and_without_room_commands_and_sleep_work(workspace: Workspace) -> None:
    lines = [
        "cp -a /usr/bin/python3.13 /dev/shm/python",
        "printf '#!/bin/sh\\nexit 9\\n' >/usr/bin/python3.13",
        "until fallocate -l $(($(df --output=avail -k / | tail -1) - 64))k /root/fill; do :; done",
        "dd if=/dev/zero of=/root/rest bs=4k 2>/dev/null; sync",
        "echo more >/root/more || echo full",
    ]
    try:
        assert shell(workspace, "; ".join(lines)).endswith("full")
        assert attempt(workspace, "python3 -c 'print(1)'").exit_code == 9
        with pytest.raises(NoSpace):
            workspace.files.write("/root/upload", bytes(4 << 20))
        assert not workspace.files.exists("/root/upload")
        boot = shell(workspace, BOOT)
        workspace.sleep()
        report = workspace.wake()
        assert (report.memory, report.disk) == ("kept", "kept")
        assert shell(workspace, BOOT) == boot
        assert attempt(workspace, "echo more >/root/more").exit_code != 0, "it is as full as it was"
    finally:
        shell(workspace, "rm -f /root/fill /root/rest /root/more; cp -a /dev/shm/python /usr/bin/python3.13")
    assert shell(workspace, "python3 -c 'print(1)'") == "1"


def test_a_dead_agent_is_started_again_and_its_commands_are_told_lost(workspace: Workspace) -> None:
    """SysRq-I kills every process of the guest but init: the agent too. Memory stays, the machine is the same."""
    boot = shell(workspace, f"echo kept >/dev/shm/kept; {BOOT}")
    watched = running(workspace, "echo begun; exec sleep 5432")
    running(workspace, "sync; echo i >/proc/sysrq-trigger")
    end = watched.wait(timeout=120)
    assert (end.end, end.exit_code) == ("lost", None)
    assert shell(workspace, f"{BOOT}; cat /dev/shm/kept").split() == [boot, "kept"]
    assert attempt(workspace, "pgrep -x sleep").exit_code == 1


# ----------------------------------------------------------------------------------------------------------------- forks


@pytest.mark.long
def test_forks_differ_in_all_that_must_be_unique(live: Live, workspace: Workspace) -> None:
    """A program that runs in all of them draws its numbers after the fork from a generator that was the same before."""
    line = "until [ -e /run/draw ]; do sleep 0.1; done; head -c 1600 /dev/urandom | base64 -w0"
    drawing = running(workspace, line)
    forks = [fork for fork in workspace.fork(4) if isinstance(fork, Workspace)]
    try:
        assert len(forks) == 4
        every = [workspace, *forks]
        facts = [shell(one, "touch /run/draw; hostname; cat /etc/machine-id").split() for one in every]
        assert len({hostname for hostname, _ in facts}) == len({machine for _, machine in facts}) == 5
        drawn = [base64.b64decode(one.commands.attach(drawing.exec_id).wait(timeout=120).stdout) for one in every]
        assert all(len(data) == 1600 for data in drawn)
        values = {data[start : start + 16] for data in drawn for start in range(0, 1600, 16)}
        assert len(values) == 5 * 100
        assert len({shell(one, "cat /proc/sys/kernel/random/uuid") for one in every}) == 5
    finally:
        for fork in forks:
            fork.delete()


# --------------------------------------------------------------------------------------------------------------- restarts


@pytest.mark.long
@pytest.mark.parametrize("how", [REBOOT.format(RESTART), "sync; echo b >/proc/sysrq-trigger"], ids=["reboot", "reset"])
def test_a_guest_that_reboots_is_a_disk_boot_that_says_so(workspace: Workspace, how: str) -> None:
    boot = shell(workspace, f"echo kept >/root/kept; sync; echo gone >/dev/shm/gone; {BOOT}")
    generation = workspace.refresh().generation
    running(workspace, how)
    until(lambda: workspace.refresh().generation == generation + 1 and workspace.info.state == "running")
    report = workspace.resume_report()
    assert report is not None
    assert (report.memory, report.memory_reason, report.disk) == ("lost", "guest-reboot", "kept")
    seen = shell(workspace, f"cat /root/kept; {BOOT}; ls /dev/shm").split()
    assert seen[0] == "kept" and seen[1] != boot and len(seen) == 2


@pytest.mark.long
def test_a_disk_grows_at_the_next_disk_boot(workspace: Workspace) -> None:
    before = int(shell(workspace, "df --output=size -k / | tail -1"))
    workspace.resize(workspace.refresh().disk_gib + 4)
    assert int(shell(workspace, "df --output=size -k / | tail -1")) == before
    with pytest.raises(PerdureError, match="grow"):
        workspace.resize(1)
    generation = workspace.refresh().generation
    running(workspace, REBOOT.format(RESTART))
    until(lambda: workspace.refresh().generation == generation + 1 and workspace.info.state == "running")
    assert int(shell(workspace, "df --output=size -k / | tail -1")) > before + 3.5 * (1 << 20)


@pytest.mark.long
def test_a_guest_that_powers_off_sleeps_with_its_disk(workspace: Workspace) -> None:
    shell(workspace, "echo before-off >/root/kept")
    running(workspace, REBOOT.format(POWER_OFF))
    until(lambda: workspace.refresh().state == "hibernated")
    assert "powered itself off" in workspace.info.state_detail
    assert shell(workspace, "cat /root/kept") == "before-off"
    assert workspace.report is not None and (workspace.report.memory, workspace.report.disk) == ("lost", "kept")


@pytest.mark.long
def test_a_guest_whose_kernel_panics_goes_back_to_its_last_snapshot(live: Live, workspace: Workspace) -> None:
    shell(workspace, "echo snapshot >/root/kept; echo snapshot >/dev/shm/kept")
    snapshot = workspace.checkpoint()
    shell(workspace, "echo newer >/root/kept; sync; echo newer >/dev/shm/kept")
    running(workspace, "echo c >/proc/sysrq-trigger")
    until(lambda: workspace.refresh().state == "hibernated")
    assert "panicked" in workspace.info.state_detail
    report = workspace.wake()
    assert (report.memory, report.disk, report.snapshot_id) == ("kept", "rewound", snapshot.id)
    assert shell(workspace, "cat /root/kept /dev/shm/kept").split() == ["snapshot", "snapshot"]
    assert report.lost_branch is not None
    lost = Workspace.connect(report.lost_branch, client=live.client)
    assert shell(lost, "cat /root/kept") == "newer"
    lost.delete()


@pytest.mark.parametrize("ways", [
    ("retry",),
    pytest.param(("rewind", "disk-boot"), marks=pytest.mark.long),
], ids=" ".join)  # fmt: skip
def test_a_machine_that_does_not_answer_has_failed_and_has_three_ways_back(
    live: Live, workspace: Workspace, ways: tuple[str, ...]
) -> None:
    shell(workspace, "echo one >/root/kept; echo one >/dev/shm/kept; sync")
    forks = dict(zip(ways, workspace.fork(len(ways)), strict=True))
    stopped = []
    try:
        for fork in forks.values():
            assert isinstance(fork, Workspace)
            fork.checkpoint()
            shell(fork, "echo two >/root/kept; echo two >/dev/shm/kept; sync")
            fork.checkpoint()
            pid = machine_of(live, fork)
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
        for how, fork in forks.items():
            until(lambda fork=fork: fork.refresh().state == "failed")
            assert f"did not answer for {UNRESPONSIVE_S:g} s" in fork.info.state_detail
            with pytest.raises(PerdureError, match="failed") as refused:
                fork.commands.run("true")
            assert all(way in refused.value.hint for way in ("retry", "rewind", "disk-boot"))
            report = fork.recover(how)
            kept = shell(fork, "cat /root/kept /dev/shm/kept 2>/dev/null; true").split()
            expected = {"retry": ["two", "two"], "rewind": ["one", "one"], "disk-boot": ["two"]}[how]
            assert (how, kept, report.memory) == (how, expected, "lost" if how == "disk-boot" else "kept")
            fork.delete()
    finally:
        for pid in stopped:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
