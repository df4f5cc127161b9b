"""The guest's agent is killed by SIGKILL at each named point of a capture: the real agent, its real link and a real resident.

A killed agent is started again when the machine runs on. What is copied is not looked at here; no machine may be given up,
nothing stays frozen, and whoever watched a command hears how it ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from perdure.core.crashpoints import CrashPoint
from perdure.machines.driver import MachineState
from perdure.node import resident as module
from perdure.wire.node import CaptureMode, ExecEnd, ExecSpec
from tests.contract.guest.places import new_id
from tests.contract.guest.sandboxed import Guest, SandboxMachine, captured

pytestmark = pytest.mark.asyncio(loop_scope="session")

POINTS = (CrashPoint.CAPTURE_READY, CrashPoint.CAPTURE_PAUSED, CrashPoint.CAPTURE_COPIED, CrashPoint.CAPTURE_PUBLISHED)


@pytest_asyncio.fixture(loop_scope="session")
async def guest() -> AsyncIterator[Guest]:
    async with captured() as made:
        yield made


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
