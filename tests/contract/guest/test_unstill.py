"""A real agent whose users do not stand still in time: it says so, what is captured then says so, and everybody goes on."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from perdure.machines.driver import MachineState
from perdure.wire.node import CaptureMode, ExecEnd, ExecHandle, ExecOutput, ExecSpec
from tests.contract.guest.places import DEADLINE_S, Place, new_id
from tests.contract.guest.sandboxed import captured
from tests.contract.guest.unstill import UNSTILL
from tests.fakes.guest_agent import cgroup_mount

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Unstill:
    """The program, running, in a system call that ends with ``let_go``."""

    def __init__(self, place: Place, handle: ExecHandle, path: str) -> None:
        self._place, self._handle, self._path = place, handle, path
        self._events = handle.events()
        self.said = b""

    async def begin(self) -> None:
        while not self.said.endswith(b"\n"):
            event = await anext(self._events)
            assert not hasattr(event, "end"), (event, self.said)
            self.said += event.data if isinstance(event, ExecOutput) else b""
        if self._place.kind == "agent" and self.said.startswith(b"cannot"):
            pytest.skip(f"this host's kernel lets nobody wait for a page: {self.said.decode()}")
        assert self.said == b"waits\n"

    async def let_go(self) -> None:
        """It ends by itself, with what it was doing done."""
        await self._place.run(f"touch {self._path}")
        rest = [event async for event in self._events]
        said = b"".join(event.data for event in rest if isinstance(event, ExecOutput))
        assert (rest[-1].end, rest[-1].exit_code, said) == (ExecEnd.EXITED, 0, b"4096\n")


@asynccontextmanager
async def unstill(place: Place) -> AsyncIterator[Unstill]:
    if place.kind == "agent" and cgroup_mount() is None:
        pytest.skip("this host has no cgroup2 to freeze processes with")
    path = f"/tmp/let-go-{os.urandom(4).hex()}"
    argv = ("python3", "-c", UNSTILL, path)
    handle = await place.guest.start_exec(ExecSpec(new_id(), argv=argv, user="root"))
    program = Unstill(place, handle, path)
    try:
        await program.begin()
        yield program
    finally:
        if not place.link.closed.is_set():  # its machine has not ended
            await place.run(f"rm -f {path}")
            await place.guest.kill_exec(handle.exec_id)
            await handle.close()


async def count(place: Place, path: str) -> int:
    return len(b"".join([part async for part in place.guest.read_file(path)]))


@pytest.mark.long_on("vm")
async def test_the_deadline_passes_and_who_could_stand_still_does(real: Place) -> None:
    counter = f"/tmp/count-{os.urandom(4).hex()}"
    counting = await real.guest.start_exec(ExecSpec(new_id(), shell=f"while :; do echo >>{counter}; done"))
    await real.run(f"until [ -s {counter} ]; do sleep 0.1; done", run_limit_s=DEADLINE_S)
    async with unstill(real) as program:
        assert not await real.link.quiesce(), "one thread is in the kernel, and does not leave it"
        try:
            before = await count(real, counter)
            await real.link.ping()
            assert await count(real, counter) == before, "everybody else stands still, and waits for the thaw"
        finally:
            await real.link.thaw()
        moved = f"until [ $(stat -c %s {counter}) -gt {before} ]; do sleep 0.1; done"
        assert (await real.run(moved, run_limit_s=DEADLINE_S)).exited.exit_code == 0
        assert not await real.link.quiesce()
        await real.link.thaw()
        await program.let_go()
    assert await real.link.quiesce(deadline_s=DEADLINE_S), "nothing of it is left"
    await real.link.thaw()
    await real.guest.kill_exec(counting.exec_id)
    await counting.close()
    await real.run(f"rm -f {counter}")


async def test_a_checkpoint_and_a_sleep_are_taken_all_the_same_and_marked() -> None:
    async with captured() as guest:
        async with unstill(guest.place) as program:
            assert await guest.capture("snp_1", CaptureMode.CHECKPOINT)
            assert guest.run.quiesced == [False]
            assert guest.machine.state is MachineState.RUNNING
            await program.let_go()
        assert await guest.capture("snp_2", CaptureMode.CHECKPOINT)
        assert guest.run.quiesced == [False, True]
        async with unstill(guest.place):
            assert await guest.capture("snp_3", CaptureMode.HIBERNATE)
            assert guest.run.quiesced == [False, True, False]
            assert guest.run.committed == ["snp_1", "snp_2", "snp_3"]
            assert guest.machine.killed, "it sleeps"
            assert guest.told == []
