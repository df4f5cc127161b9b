"""Which processes the freeze watchdog gets from a node: every one whose guest can run, at every moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perdure.core.ids import DEFAULT_TENANT, WorkspaceId
from perdure.machines.driver import MachineState
from perdure.node import supervisor as supervisor_module
from perdure.node.supervisor import NodeSupervisor
from perdure.wire.node import FromGolden, Identity, MachineSize, StartSpec
from tests.contract.node.real import make_node

WORKSPACE = WorkspaceId("ws_one")


@dataclass
class OnlyMachine:
    pid: int
    state: MachineState = MachineState.RUNNING


class SlowStarter:
    """Its guest runs, and does not answer before ``answer`` is set."""

    def __init__(self, machine: OnlyMachine) -> None:
        self.machine = machine
        self.runs, self.answer = asyncio.Event(), asyncio.Event()

    async def start(self, _spec: StartSpec, _on_stream: object, before_run: Callable[[Any], None]) -> tuple[object, object]:
        before_run(self.machine)
        self.runs.set()
        await self.answer.wait()
        return object(), object()


class OnlyResident:
    def __init__(self, *_: object) -> None:
        self.machine = OnlyMachine(7)
        self.identity = SimpleNamespace(workspace_id=WORKSPACE)
        self.generation = 1
        self.frozen = 0

    def freeze(self) -> None:
        self.frozen += 1

    def thaw(self) -> None:
        self.frozen -= 1

    def watch(self) -> None:
        return None


@pytest.fixture
def starter() -> SlowStarter:
    return SlowStarter(OnlyMachine(7))


@pytest.fixture
def node(home: Path, starter: SlowStarter, monkeypatch: pytest.MonkeyPatch) -> NodeSupervisor:
    node = make_node(home)
    origin = SimpleNamespace(key=("image", "golden"), image=SimpleNamespace(egress_allow=()))

    async def find(*_: object) -> object:
        return origin

    monkeypatch.setattr(node._goldens, "origin", find)
    monkeypatch.setattr(node, "_starter", starter)
    monkeypatch.setattr(supervisor_module, "Resident", OnlyResident)
    return node


def spec() -> StartSpec:
    identity = Identity(WORKSPACE, DEFAULT_TENANT, 1, "host", "0" * 32)
    return StartSpec(identity, "image", MachineSize(512, 1), 8, FromGolden())


async def test_a_machine_that_has_not_answered_yet_is_frozen_too(node: NodeSupervisor, starter: SlowStarter) -> None:
    starting = asyncio.create_task(node.start(spec()))
    await starter.runs.wait()
    assert node.pids() == [7]
    node.lease_changed(True)
    starter.answer.set()
    await starting
    assert node.pids() == [7]
    resident: Any = node._residents[WORKSPACE]
    assert resident.frozen == 1, "its silence means nothing while it stands still"
    node.lease_changed(False)
    assert resident.frozen == 0


async def test_a_dead_machines_number_is_never_signalled(node: NodeSupervisor, starter: SlowStarter) -> None:
    starting = asyncio.create_task(node.start(spec()))
    await starter.runs.wait()
    starter.machine.state = MachineState.DEAD
    assert node.pids() == []
    starter.answer.set()
    await starting


async def test_workspaces_may_come_while_the_watchdog_looks(node: NodeSupervisor) -> None:
    class Coming:
        @property
        def machine(self) -> OnlyMachine:
            node._residents[WorkspaceId(f"ws_{len(node._residents)}")] = self  # type: ignore[assignment]
            return OnlyMachine(7)

    node._residents[WORKSPACE] = Coming()  # type: ignore[assignment]
    assert node.pids() == [7]
