"""A command is started once for a key, and when nobody knows what became of it, that is said."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from perdure.core.errors import Busy, Conflict, Forgotten, GuestUnresponsive, KeyReused, MachineDied, PerdureError
from perdure.core.ids import ExecId, TenantId, WorkspaceId, keyed_exec
from perdure.wire.node import ExecExited, ExecHandle, ExecOutput, ExecSpec
from perdure.workspaces.exec_keys import KeyedExecs
from perdure.workspaces.model import Awake
from tests.fakes.exec_keys import FakeExecKeys
from tests.fakes.memory_guest import Handle, MemoryGuest, World

KEY = "order 7"


class Bench:
    """A workspace at a generation, and its keys."""

    def __init__(self) -> None:
        self.world = World()
        self.generation = 3
        self.store = FakeExecKeys()
        self.keyed = KeyedExecs(self.store)
        self.guest = MemoryGuest(self.world, 3)

    @property
    def awake(self) -> Awake:
        class Workspace:
            id, tenant_id, name, generation = WorkspaceId("ws_1"), TenantId("ten_1"), "demo", self.generation

        return Awake(cast("Any", Workspace), self.guest, None)

    async def start(self, shell: str = "echo hi", key: str = KEY, **fields: Any) -> ExecHandle:
        return await self.keyed.start(self.awake, ExecSpec(keyed_exec("ws_1", key), shell=shell, **fields), key)


async def said(handle: ExecHandle) -> tuple[bytes, int | None]:
    events = [event async for event in handle.events()]
    (last,) = (event for event in events if isinstance(event, ExecExited))
    return b"".join(event.data for event in events if isinstance(event, ExecOutput)), last.exit_code


async def test_the_same_key_is_the_same_command_while_it_runs_and_after_it_ended() -> None:
    bench = Bench()
    first = await bench.start("cat", stdin=True)
    again = await bench.start("cat", stdin=True)
    assert first.exec_id == again.exec_id == keyed_exec("ws_1", KEY)
    await again.write_stdin(b"once")
    await first.close_stdin()
    assert await said(first) == await said(again) == await said(await bench.start("cat", stdin=True)) == (b"once", 0)
    assert len(bench.world.commands) == 1


async def test_many_at_once_start_one() -> None:
    bench = Bench()
    handles = await asyncio.gather(*(bench.start() for _ in range(50)))
    assert {await said(handle) for handle in handles} == {(b"hi\n", 0)}
    assert len(bench.world.commands) == 1


@pytest.mark.parametrize("other", [{"shell": "echo ho"}, {"env": {"A": "1"}}, {"cwd": "/srv"}, {"run_limit_s": 5.0}])
async def test_the_same_key_with_another_command_is_a_conflict(other: dict[str, Any]) -> None:
    bench = Bench()
    await said(await bench.start())
    with pytest.raises(KeyReused, match="used for another command"):
        await bench.start(**other)
    assert len(bench.world.commands) == 1


async def test_keys_of_two_workspaces_are_two_commands() -> None:
    assert keyed_exec("ws_1", KEY) != keyed_exec("ws_2", KEY)
    assert keyed_exec("ws_1", "a") != keyed_exec("ws_1", "b")


@pytest.mark.parametrize("generation", [3, 4])
async def test_what_the_guest_has_forgotten_is_not_run_again(generation: int) -> None:
    """Evicted in the same generation; rewound, or booted from disk, in a later one."""
    bench = Bench()
    await said(await bench.start())
    bench.world.commands.clear()
    bench.generation = generation
    for _ in range(2):
        with pytest.raises(Forgotten, match="not known any more") as caught:
            await bench.start()
        assert (caught.value.ambiguous, caught.value.gone, caught.value.retryable) == (True, True, False)
    assert bench.world.commands == {}
    with pytest.raises(KeyReused):
        await bench.start("echo ho")


async def test_after_a_wake_that_kept_the_memory_it_is_still_the_same_command() -> None:
    bench = Bench()
    first = await bench.start("cat", stdin=True)
    bench.generation, bench.guest = 4, MemoryGuest(bench.world, 4)
    again = await bench.start("cat", stdin=True)
    assert isinstance(again, Handle) and isinstance(first, Handle)
    assert again.command is first.command


@pytest.mark.parametrize("error", [Busy("256 commands are running."), Conflict("No."), MachineDied("Gone before it was asked.")])
async def test_a_command_that_was_refused_leaves_the_key_free(error: PerdureError, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    async def refuse(_spec: ExecSpec) -> Handle:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(bench.guest, "start_exec", refuse)
        with pytest.raises(type(error)):
            await bench.start()
    assert await said(await bench.start("echo ho")) == (b"ho\n", 0)


@pytest.mark.parametrize(
    "error", [MachineDied("Broken.", ambiguous=True), GuestUnresponsive("Silent.", ambiguous=True), asyncio.CancelledError()]
)
async def test_a_start_that_nobody_saw_succeed_is_never_tried_again(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()

    async def vanish(_spec: ExecSpec) -> Handle:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(bench.guest, "start_exec", vanish)
        with pytest.raises(type(error)):
            await bench.start()
    with pytest.raises(Forgotten):
        await bench.start()
    assert bench.world.commands == {}


async def test_a_start_whose_answer_was_lost_is_attached_to(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    start = bench.guest.start_exec

    async def lose(spec: ExecSpec) -> Handle:
        await start(spec)
        raise MachineDied("The channel broke.", ambiguous=True)

    with monkeypatch.context() as patch:
        patch.setattr(bench.guest, "start_exec", lose)
        with pytest.raises(MachineDied):
            await bench.start()
    assert await said(await bench.start()) == (b"hi\n", 0)
    assert len(bench.world.commands) == 1


async def test_a_guest_that_remembers_longer_than_the_key_counts_does_not_run_it_again() -> None:
    bench = Bench()
    await said(await bench.start())
    bench.store.rows.clear()
    assert await said(await bench.start()) == (b"hi\n", 0)
    assert len(bench.world.commands) == 1


async def test_the_digest_is_of_all_that_the_spec_says() -> None:
    from perdure.workspaces.exec_keys import _digest

    spec = ExecSpec(ExecId("exe_1"), shell="x", env={"A": "1", "B": "2"})
    assert _digest(spec) == _digest(replace(spec, exec_id=ExecId("exe_2"), env={"B": "2", "A": "1"}))
    assert (
        len(
            {
                _digest(replace(spec, **{name: value}))
                for name, value in (
                    ("shell", "y"),
                    ("user", "me"),
                    ("stdin", True),
                    ("idle_limit_s", 1.0),
                    ("kill_grace_s", 1.0),
                    ("env", {}),
                )
            }
        )
        == 6
    )
