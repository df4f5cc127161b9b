"""Three guests for one suite: the fake in memory, the real agent in namespaces of this host, the real agent in a real VM."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from perdure.machines.driver import Machine
from tests.contract.guest.places import Place, booted, host_agent, linked
from tests.fakes.memory_guest import MemoryGuest, World


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def agent_place() -> AsyncIterator[Place]:
    async with host_agent() as (_, place):
        yield place


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vm_machine(base_image: Path) -> AsyncIterator[Machine]:
    async with booted() as (machine, _):
        yield machine


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vm_place(vm_machine: Machine) -> AsyncIterator[Place]:
    async with linked(vm_machine.connect, "vm") as place:
        yield place


def _fresh(place: Place) -> Place:
    place.streams.clear()
    place.on_stream = None
    return place


@pytest.fixture(params=["agent", pytest.param("vm", marks=pytest.mark.qemu)])
def real(request: pytest.FixtureRequest) -> Place:
    """A guest with the real agent."""
    return _fresh(request.getfixturevalue(f"{request.param}_place"))


@pytest.fixture(params=["fake", "agent", pytest.param("vm", marks=pytest.mark.qemu)])
def place(request: pytest.FixtureRequest) -> Place:
    """Any guest."""
    if request.param == "fake":
        world = World()
        world.environment = {"COLOUR": "green"}
        world.files |= {name: world.files["/"] for name in ("/tmp", "/etc")}
        return Place(MemoryGuest(world, 1), "fake")
    return _fresh(request.getfixturevalue(f"{request.param}_place"))
