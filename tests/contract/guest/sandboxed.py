"""The agent's sandbox as a machine: a real resident captures what a real agent serves, though nothing is copied.

It stands still when its init and its agent are stopped, so that what waits then goes on when the machine does, as in a virtual
one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

from perdure.core.clock import SystemClock
from perdure.core.errors import MachineDied
from perdure.core.ids import SnapshotId
from perdure.node.resident import Parts, Resident
from perdure.snapshots.capture import CaptureRequest
from perdure.wire.node import CaptureMode, CaptureSpec, NodeEvent
from tests.contract.guest.places import Place, host_agent, identity
from tests.unit.node.test_resident import StubMachine, StubRun


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
        self.quiesced: list[bool] = []
        self.committed: list[SnapshotId] = []
        self.discarded: list[SnapshotId] = []

    async def capture(self, machine: object, request: CaptureRequest) -> CaptureRequest:
        self.quiesced.append(request.quiesced)
        return await super().capture(machine, request)

    def commit(self, captured: Any, pause_s: float) -> SnapshotId:
        self.committed.append(captured.snapshot_id)
        return super().commit(captured, pause_s)

    def discard(self, snapshot_id: SnapshotId) -> None:
        self.discarded.append(snapshot_id)


class Guest:
    """A resident over the sandbox."""

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


@asynccontextmanager
async def captured() -> AsyncIterator[Guest]:
    """A sandbox of its own, with its resident."""
    async with host_agent() as (agent, place):
        pid = await agent.agent_pid()
        guest = Guest(place, SandboxMachine(_parent(pid), pid))
        yield guest
        await guest.resident.end(keep_layers=False)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
