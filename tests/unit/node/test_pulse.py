"""When a guest counts as unresponsive."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from perdure.core.clock import SystemClock
from perdure.core.errors import Busy, Conflict, GuestUnresponsive, PerdureError
from perdure.machines.driver import MachineState
from perdure.node.resident import Parts, Resident
from perdure.wire.node import NodeEvent, NodeEventKind


@pytest.mark.parametrize("answer", [GuestUnresponsive("It is silent."), Busy("So it says."), Conflict("So it says.")])
async def test_a_guest_that_refuses_pings_is_as_good_as_silent(answer: PerdureError) -> None:
    class Link:
        async def cpu_s(self) -> float:
            raise answer

    class Machine:
        state = MachineState.RUNNING

        async def events(self) -> Any:
            await asyncio.Event().wait()
            yield None

    told: asyncio.Queue[NodeEvent] = asyncio.Queue()
    identity = SimpleNamespace(workspace_id="ws_one", generation=1)
    parts = Parts(cast("Any", identity), cast("Any", Machine()), cast("Any", Link()), cast("Any", SimpleNamespace(layer_count=1)))
    resident = Resident(parts, SystemClock(), 0.02, told.put_nowait)
    resident.watch()
    try:
        async with asyncio.timeout(30):
            assert (await told.get()).kind is NodeEventKind.UNRESPONSIVE
    finally:
        for task in resident._tasks:
            task.cancel()
