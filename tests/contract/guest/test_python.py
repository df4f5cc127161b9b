"""Python kernels under the real agent in its sandbox, with this host's ipykernel: whose they are, and who outlives whom."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
import pytest_asyncio

from perdure.api.kernels.talk import RUN_DIR, STATE_DIR, Kernels
from perdure.core.errors import PythonFailed
from perdure.wire import node, public
from tests.contract.guest.places import DEADLINE_S, Place, host_agent, new_id
from tests.contract.guest.test_program import kill_agent
from tests.fakes.guest_agent import HostAgent

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[tuple[HostAgent, Place]]:
    """``python3`` is this test's own."""
    path = f"{sys.prefix}/bin:/usr/bin:/bin"
    async with host_agent({"PATH": path}, shared=(sys.base_prefix, sys.prefix)) as found:
        yield found


@pytest.fixture
def place(pair: tuple[HostAgent, Place]) -> Place:
    return pair[1]


def kernels(place: Place) -> Kernels:
    return Kernels(place.guest, new_id)


async def begin(place: Place, code: str) -> node.ExecHandle:
    return await kernels(place).run(new_id(), public.RunPython(code=code), lambda: None)


async def follow(place: Place, handle: node.ExecHandle, until: str = "done") -> list[public.PythonEvent]:
    seen = []
    async with asyncio.timeout(DEADLINE_S), aclosing(kernels(place).events(handle, "default")) as events:
        async for event in events:
            seen.append(event)
            if event.type == until:
                break
    return seen


async def value(place: Place, code: str) -> str:
    handle = await begin(place, code)
    (found,) = [event.data["text/plain"] for event in await follow(place, handle) if event.type == "execute_result"]
    await handle.close()
    return str(found)


async def none_runs(place: Place) -> None:
    """Returns when no command runs any more: one ends a moment after its last word."""
    async with asyncio.timeout(DEADLINE_S):
        while place.link.activity().running_execs:
            await place.guest.ping()


async def test_a_cell_is_a_command_and_a_kernel_that_waits_is_none(place: Place) -> None:
    """(peers: row 13)"""
    assert await value(place, "import os, time\nkept = 41\nos.getcwd()") == "'/root'"
    await none_runs(place)  # the kernel is there, and does not count
    running = await begin(place, "print('on')\ntime.sleep(1000)")
    await follow(place, running, "stream")
    assert place.link.activity().running_execs == 1
    assert await kernels(place).interrupt("default") is True
    assert (await follow(place, await place.guest.attach_exec(running.exec_id)))[-1].status == "interrupted"
    assert await value(place, "kept + 1") == "42"


async def test_to_kill_a_cell_is_to_interrupt_it_even_the_first(place: Place) -> None:
    """The cell that a kernel is started for does not own it."""
    await kernels(place).restart("default")
    await value(place, "import time\nkept = 1\n1")
    running = await begin(place, "print('on')\ntime.sleep(1000)")
    await follow(place, running, "stream")
    await place.guest.kill_exec(running.exec_id)
    with pytest.raises(PythonFailed, match="was killed"):
        await follow(place, await place.guest.attach_exec(running.exec_id))
    assert await value(place, "kept") == "1"


async def test_another_user_can_neither_enter_nor_ask(place: Place) -> None:
    await value(place, "1")
    for command in (f"ls {RUN_DIR}/default", f"cat {RUN_DIR}/default/kernel.json", f"touch {STATE_DIR}/default.json"):
        assert (await place.run(command, user="agent")).exited.exit_code not in {0, None}


async def test_a_dead_agent_costs_the_answer_and_not_the_variables(pair: tuple[HostAgent, Place]) -> None:
    agent, place = pair
    await value(place, "import time\nkept, turns = 'kept', 0\n1")
    running = await begin(place, "print('on')\nturns += 1\ntime.sleep(1)\nturns += 1")
    await follow(place, running, "stream")
    await kill_agent(agent, place)
    with pytest.raises(PythonFailed, match="not known") as caught:
        await follow(place, running)
    assert caught.value.ambiguous
    assert await value(place, "kept, turns") == "('kept', 2)", "the cell went on, and was not run again"
