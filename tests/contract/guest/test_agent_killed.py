"""The guest's agent is killed by SIGKILL at each named point of a capture: the real agent, its real link and a real resident.

The machine is the agent's sandbox: it stands still when its init and its agent are stopped, so that a killed agent is started
again when the machine runs on, as in a virtual one. What is copied is not looked at here; no machine may be given up, nothing
stays frozen, and whoever watched a command hears how it ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from perdure.core.clock import SystemClock
from perdure.core.crashpoints import CrashPoint
from perdure.core.errors import MachineDied
from perdure.core.ids import SnapshotId
from perdure.machines.driver import MachineState
from perdure.node import resident as module
from perdure.node.resident import Parts, Resident
from perdure.wire.node import CaptureMode, CaptureSpec, ExecEnd, ExecSpec, NodeEvent
from tests.contract.guest.places import Place, host_agent, identity, new_id
from tests.unit.node.test_resident import StubMachine, StubRun

pytestmark = pytest.mark.asyncio(loop_scope="session")

POINTS = (CrashPoint.CAPTURE_READY, CrashPoint.CAPTURE_PAUSED, CrashPoint.CAPTURE_COPIED, CrashPoint.CAPTURE_PUBLISHED)


class SandboxMachine(StubMachine):
    def __init__(self, init: int, agent: int) -> None:
        super().__init__()
        self._agent = agent
        self._pids = [init, agent]

    def kill_agent(self) -> None:
        self._pids.remove(self._agent)  # somebody else may be given that number
        os.kill(self._agent, signal.SIGKILL)

    async def pause(self) -> None:
        self._tell(signal.SIGSTOP)
        await super().pause()

    async def resume(self) -> None:
        self._tell(signal.SIGCONT)
        await super().resume()

    async def kill(self) -> None:
        self._tell(signal.SIGCONT)  # the sandbox is ended by whoever made it
        await super().kill()

    def _tell(self, what: signal.Signals) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, what)


class Run(StubRun):
    def __init__(self) -> None:
        self.committed: list[SnapshotId] = []
        self.discarded: list[SnapshotId] = []

    def commit(self, captured: Any, pause_s: float) -> SnapshotId:
        self.committed.append(captured.snapshot_id)
        return super().commit(captured, pause_s)

    def discard(self, snapshot_id: SnapshotId) -> None:
        self.discarded.append(snapshot_id)


class Guest:
    """A resident over the sandbox, with a command that somebody watches."""

    def __init__(self, place: Place, machine: SandboxMachine) -> None:
        self.place, self.machine, self.run = place, machine, Run()
        self.told: list[NodeEvent] = []
        parts = Parts(identity(), cast("Any", machine), place.link, cast("Any", self.run))
        self.resident = Resident(parts, SystemClock(), 1000.0, self.told.append)
        self.resident.watch()

    async def capture(self, name: str, mode: CaptureMode) -> bool:
        """Whether it was acknowledged. An agent that dies may cost the caller an answer, and nothing else."""
        try:
            await self.resident.capture(CaptureSpec(identity().workspace_id, 1, SnapshotId(name), mode))
        except MachineDied as error:
            assert error.retryable
            return False
        return True


@pytest_asyncio.fixture(loop_scope="session")
async def guest() -> AsyncIterator[Guest]:
    async with host_agent() as (agent, place):
        pid = await agent.agent_pid()
        guest = Guest(place, SandboxMachine(_parent(pid), pid))
        yield guest
        await guest.resident.end(keep_layers=False)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_at(wanted: CrashPoint, machine: SandboxMachine, monkeypatch: pytest.MonkeyPatch) -> list[CrashPoint]:
    """The agent dies at the first pass of the point; returns what has fired."""
    fired: list[CrashPoint] = []

    def passed(point: CrashPoint, _vmm: int | None = None) -> None:
        if point is wanted and not fired:
            fired.append(point)
            machine.kill_agent()

    monkeypatch.setattr(module, "crashpoint", passed)
    return fired


@pytest.mark.parametrize("point", POINTS)
async def test_a_checkpoint(guest: Guest, point: CrashPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    place = guest.place
    await place.run("echo kept >/tmp/kept")
    watched = await place.guest.start_exec(ExecSpec(new_id(), shell="exec sleep 1000"))
    fired = kill_at(point, guest.machine, monkeypatch)
    done = await guest.capture("snp_1", CaptureMode.CHECKPOINT)
    assert fired == [point]
    assert (guest.run.committed, guest.run.discarded) == ((["snp_1"], []) if done else ([], ["snp_1"])), "all of it, or nothing"
    assert done or point is CrashPoint.CAPTURE_READY, "what stood still was captured, whoever died meanwhile"
    assert guest.machine.state is MachineState.RUNNING and not guest.machine.killed
    async with asyncio.timeout(60):
        ends = [event async for event in watched.events()]
        assert ends[-1].end is ExecEnd.LOST, "it is told honestly"
        assert (await place.run("cat /tmp/kept")).stdout == b"kept\n", "another agent answers, and nobody is frozen"
        assert (await place.run("echo $((6 * 7))")).stdout == b"42\n"
    assert guest.told == [], "nobody heard of a machine's end"


@pytest.mark.parametrize("point", POINTS)
async def test_a_hibernation(guest: Guest, point: CrashPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    fired = kill_at(point, guest.machine, monkeypatch)
    done = await guest.capture("snp_1", CaptureMode.HIBERNATE)
    assert fired == [point]
    assert (guest.run.committed, guest.run.discarded) == ((["snp_1"], []) if done else ([], ["snp_1"])), "all of it, or nothing"
    assert done or point is CrashPoint.CAPTURE_READY
    assert guest.machine.killed is done, "it is ended when its snapshot is there, and not before"
    assert guest.told == []
    if not done:
        async with asyncio.timeout(60):
            assert (await guest.place.run("echo $((6 * 7))")).stdout == b"42\n", "the machine goes on"
