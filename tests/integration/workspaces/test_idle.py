"""When a workspace falls asleep by itself, what it is said to be kept awake by, and who comes in at that very moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from perdure.core.errors import GuestUnresponsive, MachineDied, NotFound, PerdureError, StaleGeneration, Unavailable
from perdure.core.ids import ExecId
from perdure.wire.node import Activity, ExecSpec, MemoryFate, PingStatus, ProgramPing
from perdure.workspaces import upkeep
from perdure.workspaces.hibernation import Said, Use
from perdure.workspaces.model import Idleness, Workspace, WorkspaceState
from perdure.workspaces.rows import Record
from tests.fakes.control_plane import CTX, ControlPlane
from tests.fakes.memory_guest import MemoryGuest
from tests.integration.workspaces.test_shutdown import PATIENCE_S, Stop, at_once, hold_captures

__all__ = ["at_once"]

RUNNING, HIBERNATED = WorkspaceState.RUNNING, WorkspaceState.HIBERNATED
IDLE_S = 5.0
POLICY = {"idle_timeout_s": IDLE_S, "checkpoint_interval_s": 0.0}
CLIENTS = 50
QUIET = Activity(open_execs=0, open_streams=0, open_outbound=0, idle_for_s=1e9, changed=False)


async def made(plane: ControlPlane, name: str = "demo", **policy: Any) -> Workspace:
    workspace, _ = await plane.create(name, **{**POLICY, **policy})
    return workspace


async def ticked(plane: ControlPlane, seconds: float = IDLE_S) -> None:
    """So much later everything has been looked at once, and what that set off is done."""
    plane.clock.advance(seconds)
    await plane.service.upkeep.tick()
    await plane.service.upkeep.drain()


async def idleness(plane: ControlPlane, name: str = "demo") -> Idleness:
    found = (await plane.service.get(CTX, name)).idleness
    assert found is not None
    return found


async def uses(plane: ControlPlane) -> list[Use]:
    return [reason.use for reason in (await idleness(plane)).reasons]


async def entries(plane: ControlPlane, kind: str, name: str = "demo") -> list[Any]:
    return [entry for entry in await plane.service.log(CTX, name) if entry.kind == kind]


class Clients:
    """Requests that each write a file of their own, and how often the workspace did what each asked for."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.done: dict[int, int] = {}
        self.generations: set[int] = set()

    async def request(self, number: int) -> None:
        async with self.plane.service.awake(CTX, "demo") as awake:
            await awake.guest.write_file(f"/request-{number}", _once())
            self.done[number] = self.done.get(number, 0) + 1
            self.generations.add(awake.workspace.generation)

    def come(self, numbers: range) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.request(number)) for number in numbers]

    async def check(self, count: int = CLIENTS) -> None:
        """Each was done exactly once, and nothing of it was lost."""
        assert self.done == dict.fromkeys(range(count), 1)
        for number in range(count):
            assert await self.plane.read("demo", f"/request-{number}") == b"x"


async def _once() -> Any:
    yield b"x"


# ----------------------------------------------------------------------------------------------------- what keeps it awake


async def test_each_reason_is_shown_while_it_holds(plane: ControlPlane) -> None:
    """Whoever wonders why a workspace is awake is told (peers: row 13)."""
    workspace = await made(plane)
    assert (await idleness(plane)).reasons == ()
    plane.clock.advance(2)
    assert await idleness(plane) == Idleness(2.0, (), 3.0)
    async with plane.service.awake(CTX, "demo") as awake:
        assert await uses(plane) == [Use.REQUEST]
        assert (await idleness(plane)).sleeps_in_s is None
        await awake.guest.start_exec(ExecSpec(ExecId("exe_1"), argv=("hang",)))
    assert await uses(plane) == [Use.COMMAND]
    plane.node.busy[workspace.id] = replace(QUIET, open_streams=2, open_outbound=1)
    assert await uses(plane) == [Use.STREAM, Use.OUTBOUND]
    plane.node.busy[workspace.id] = QUIET
    await plane.service.keep_awake(CTX, "demo", 60)
    (reason,) = (await idleness(plane)).reasons
    assert (reason.use, reason.left_s) == (Use.KEEP_AWAKE, 60.0)
    assert (await idleness(plane)).sleeps_in_s == 60.0
    (listed,) = await plane.service.find(CTX)
    assert listed.idleness is not None and listed.idleness.reasons == (reason,)
    await plane.service.sleep(CTX, "demo")
    assert (await plane.service.get(CTX, "demo")).idleness is None


async def test_one_that_never_sleeps_says_so(plane: ControlPlane) -> None:
    await made(plane, idle_timeout_s=0.0)
    await ticked(plane, 1e6)
    assert await plane.state("demo") is RUNNING
    assert await uses(plane) == [Use.POLICY]


async def test_the_thread_says_why_it_sleeps_and_how_long_nobody_had_used_it(plane: ControlPlane) -> None:
    await made(plane)
    await ticked(plane, 7.5)
    (entry,) = await entries(plane, "hibernating")
    assert (entry.body["cause"], entry.body["idle_s"], entry.body["idle_timeout_s"]) == ("idle", 7.5, IDLE_S)
    await plane.service.wake(CTX, "demo")
    plane.clock.advance(2)
    await plane.service.sleep(CTX, "demo")
    _, entry = await entries(plane, "hibernating")
    assert (entry.body["cause"], entry.body["idle_s"]) == ("requested by test", 2.0)


async def test_five_seconds_are_five_seconds(plane: ControlPlane) -> None:
    await made(plane)
    await ticked(plane, 4.9)
    assert await plane.state("demo") is RUNNING
    await ticked(plane, 0.1)
    assert await plane.state("demo") is HIBERNATED


# ------------------------------------------------------------------------------------------------------------- the program


class Program:
    """What an agent program answers, and how often it was asked."""

    def __init__(self, plane: ControlPlane) -> None:
        self.answer: bool | Said | PerdureError | None = None
        self.asked = 0
        self.meanwhile: Callable[[], Awaitable[object]] | None = None
        plane.service.upkeep.ask_program = self.ask

    async def ask(self, _at: Record) -> Said | None:
        self.asked += 1
        if self.meanwhile is not None:
            await self.meanwhile()
        if isinstance(self.answer, PerdureError):
            raise self.answer
        return Said(self.answer) if isinstance(self.answer, bool) else self.answer


async def test_a_program_that_says_it_is_busy_keeps_its_workspace_awake(plane: ControlPlane) -> None:
    """A job that makes no noise is not stopped half way (peers: row 13)."""
    await made(plane)
    program = Program(plane)
    program.answer = True
    await ticked(plane)
    assert (await plane.state("demo"), program.asked) == (RUNNING, 1)
    assert await uses(plane) == [Use.PROGRAM]
    await ticked(plane, 1)
    assert program.asked == 1, "it is not asked at every tick"
    await ticked(plane, IDLE_S)
    assert (await plane.state("demo"), program.asked) == (RUNNING, 2)
    program.answer = False
    await ticked(plane, IDLE_S)
    assert (await plane.state("demo"), program.asked) == (HIBERNATED, 3)
    await plane.service.wake(CTX, "demo")
    assert await uses(plane) == [], "what it said before its sleep is forgotten"


async def test_a_program_is_asked_only_when_everything_else_says_idle(plane: ControlPlane) -> None:
    workspace = await made(plane)
    program = Program(plane)
    for busy in (replace(QUIET, open_execs=1), replace(QUIET, open_streams=1), replace(QUIET, open_outbound=1)):
        plane.node.busy[workspace.id] = busy
        await ticked(plane)
    plane.node.busy[workspace.id] = QUIET
    await plane.service.keep_awake(CTX, "demo", 60)
    await ticked(plane)
    async with plane.service.awake(CTX, "demo"):
        await ticked(plane)
    assert program.asked == 0
    await plane.service.keep_awake(CTX, "demo", 0)
    await ticked(plane)
    assert (await plane.state("demo"), program.asked) == (HIBERNATED, 1)


@pytest.mark.parametrize("answer", [None, False, GuestUnresponsive("It does not answer."), NotFound("There is none.")])
async def test_a_program_that_says_nothing_is_not_busy(plane: ControlPlane, answer: bool | PerdureError | None) -> None:
    await made(plane)
    Program(plane).answer = answer
    await ticked(plane)
    assert await plane.state("demo") is HIBERNATED


async def test_what_it_did_between_two_questions_counts_until_it_was_done(plane: ControlPlane) -> None:
    """D9: idle is all of it for the whole timeout. The program worked, and was done before anybody asked."""
    await made(plane)
    program = Program(plane)
    program.answer = Said(is_busy=False, for_s=3.0)
    await ticked(plane, IDLE_S)
    assert (await plane.state("demo"), program.asked) == (RUNNING, 1)
    assert await uses(plane) == [], "it is used no more, and has been until three seconds ago"
    await ticked(plane, IDLE_S - 3.1)
    assert (await plane.state("demo"), program.asked) == (RUNNING, 1)
    program.answer = Said(is_busy=False, for_s=IDLE_S + 0.1)
    await ticked(plane, 0.2)
    assert (await plane.state("demo"), program.asked) == (HIBERNATED, 2)


async def test_what_it_did_before_somebody_else_used_it_makes_nothing_longer(plane: ControlPlane) -> None:
    await made(plane)
    Program(plane).answer = Said(is_busy=False, for_s=1e9)
    await ticked(plane, IDLE_S)
    assert await plane.state("demo") is HIBERNATED


async def test_one_that_puts_the_time_into_every_answer_is_found_out(plane: ControlPlane) -> None:
    """Its workspace would never sleep if that were believed."""
    await made(plane)
    program = Program(plane)
    program.answer = Said(is_busy=False, for_s=0.4)
    await ticked(plane, IDLE_S)
    assert (await plane.state("demo"), program.asked) == (RUNNING, 1)
    await ticked(plane, 1)
    assert (await plane.state("demo"), program.asked) == (RUNNING, 2)
    await ticked(plane, 1)
    assert (await plane.state("demo"), program.asked) == (HIBERNATED, 3)


async def test_one_that_was_done_right_before_the_question_stays_awake_for_its_timeout(plane: ControlPlane) -> None:
    await made(plane)
    program = Program(plane)
    program.answer = Said(is_busy=False, for_s=-0.5)  # the guest's clock is a little ahead
    await ticked(plane, IDLE_S)
    program.answer = Said(is_busy=False, for_s=2.5)
    await ticked(plane, 3)
    assert (await plane.state("demo"), program.asked) == (RUNNING, 2)
    await ticked(plane, 1)
    assert (await plane.state("demo"), program.asked) == (RUNNING, 2), "it is left alone now"
    program.answer = Said(is_busy=False, for_s=6.0)
    await ticked(plane, 2)
    assert (await plane.state("demo"), program.asked) == (HIBERNATED, 3)


async def test_its_own_ping_is_what_is_asked(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """``GET /ping`` of the container contract, in the guest of this generation."""
    answers = [PingStatus.HEALTHY_BUSY, PingStatus.HEALTHY]

    async def ping_program(_guest: MemoryGuest, _deadline_s: float) -> ProgramPing | None:
        return ProgramPing(answers.pop(0), 8080, None)

    monkeypatch.setattr(MemoryGuest, "ping_program", ping_program)
    await made(plane)
    await ticked(plane)
    assert await uses(plane) == [Use.PROGRAM]
    await ticked(plane)
    assert (await plane.state("demo"), answers) == (HIBERNATED, [])


async def test_a_program_that_never_answers_is_not_busy(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "PING_S", 0.01)
    await made(plane)
    Program(plane).meanwhile = asyncio.Event().wait
    await ticked(plane)
    assert await plane.state("demo") is HIBERNATED


# ------------------------------------------------------------------------------------------------------------------- races


async def test_a_request_that_comes_while_it_falls_asleep_waits_and_is_done_once(plane: ControlPlane) -> None:
    """Nobody is told to come again later (peers: row 15)."""
    await made(plane)
    begun, go_on = hold_captures(plane)
    plane.clock.advance(IDLE_S)
    await plane.service.upkeep.tick()
    await begun.wait()
    assert await plane.state("demo") is WorkspaceState.HIBERNATING
    clients = Clients(plane)
    coming = clients.come(range(1))
    await plane.until("demo", lambda _: plane.service.upkeep.owner(_.id).callers == 1)
    assert clients.done == {}
    go_on.set()
    await asyncio.gather(*coming)
    await clients.check(1)
    assert clients.generations == {2}
    assert await plane.state("demo") is RUNNING
    assert len(await entries(plane, "waking")) == 1


async def test_fifty_clients_before_during_and_after_a_sleep(plane: ControlPlane) -> None:
    """One wake serves all who came too late for the machine before (peers: rows 15, 16)."""
    await made(plane)
    begun, go_on = hold_captures(plane)
    plane.clock.advance(IDLE_S)
    await plane.service.upkeep.tick()
    clients = Clients(plane)
    coming = clients.come(range(20))
    await begun.wait()
    coming += clients.come(range(20, 40))
    await asyncio.sleep(0)
    go_on.set()
    coming += clients.come(range(40, CLIENTS))
    await asyncio.gather(*coming)
    await clients.check()
    assert clients.generations == {2}
    assert plane.node.calls.count("start") == 2
    assert len(await entries(plane, "waking")) == len(await entries(plane, "hibernating")) == 1


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55])
async def test_fifty_clients_at_any_moment_of_falling_asleep(plane: ControlPlane, steps: int) -> None:
    """However far the sleep has come when they do (peers: rows 15, 16)."""
    await made(plane)
    plane.clock.advance(IDLE_S)
    await plane.service.upkeep.tick()
    for _ in range(steps):
        await asyncio.sleep(0)
    clients = Clients(plane)
    await asyncio.gather(*clients.come(range(CLIENTS)))
    await clients.check()
    await plane.service.upkeep.drain()
    assert await plane.state("demo") is RUNNING
    assert len(clients.generations) == 1, "all of them met the same machine"
    assert len(await entries(plane, "waking")) == len(await entries(plane, "hibernating")) <= 1


async def test_who_comes_between_the_decision_and_the_pause_keeps_it_awake(plane: ControlPlane) -> None:
    """A command that starts in that instant is not frozen by it."""
    await made(plane)
    program = Program(plane)

    async def start() -> None:
        async with plane.service.awake(CTX, "demo") as awake:
            assert awake.report is None, "it was awake"
            await awake.guest.start_exec(ExecSpec(ExecId("exe_1"), argv=("hang",)))

    program.meanwhile = start
    await ticked(plane)
    assert (await plane.state("demo"), program.asked) == (RUNNING, 1)
    assert await uses(plane) == [Use.COMMAND]
    assert await entries(plane, "hibernating") == []


async def test_a_request_of_an_instant_starts_the_time_anew(plane: ControlPlane) -> None:
    await made(plane)
    program = Program(plane)
    program.meanwhile = lambda: plane.read("demo", "/etc-hostname")
    await ticked(plane)
    assert await plane.state("demo") is RUNNING
    program.meanwhile = None
    await ticked(plane, IDLE_S - 0.1)
    assert await plane.state("demo") is RUNNING
    await ticked(plane, 0.1)
    assert await plane.state("demo") is HIBERNATED


async def test_keep_awake_at_its_end(plane: ControlPlane) -> None:
    await made(plane)
    await plane.service.keep_awake(CTX, "demo", 60)
    await ticked(plane, 59.9)
    assert await plane.state("demo") is RUNNING
    await ticked(plane, 0.1)
    assert await plane.state("demo") is HIBERNATED


async def test_keep_awake_in_the_instant_of_the_sleep(plane: ControlPlane) -> None:
    """It has come too late for this machine, wakes nobody, and is kept by the next one (peers: row 6)."""
    await made(plane)
    plane.clock.advance(IDLE_S)
    begun, go_on = hold_captures(plane)
    await plane.service.upkeep.tick()
    await begun.wait()
    asking = asyncio.create_task(plane.service.keep_awake(CTX, "demo", 60))
    go_on.set()
    assert (await asking).keep_awake_until is not None
    await plane.service.upkeep.drain()
    assert await plane.state("demo") is HIBERNATED
    await plane.service.wake(CTX, "demo")
    await ticked(plane, 50)
    assert await plane.state("demo") is RUNNING
    await ticked(plane, 60)
    assert await plane.state("demo") is HIBERNATED


async def test_a_wake_that_meets_the_servers_end_is_done_or_told_to_come_again(plane: ControlPlane) -> None:
    """Who was let in is done and kept; who was not may simply repeat it, and then it is done once (peers: row 15)."""
    await made(plane)
    await plane.service.sleep(CTX, "demo")
    plane.node.gate = asyncio.Event()
    plane.node.entered.clear()
    clients = Clients(plane)
    early = clients.come(range(5))
    await plane.node.entered.wait()
    stop = Stop(plane, PATIENCE_S)
    await stop.looks_twice()
    late = clients.come(range(5, 10))
    plane.node.gate.set()
    outcomes = dict(enumerate(await asyncio.gather(*early, *late, return_exceptions=True)))
    assert await stop.report()
    assert await plane.state("demo") is HIBERNATED
    plane.node.crash()
    await plane.restart()
    for number, outcome in outcomes.items():
        if outcome is None:
            assert await plane.read("demo", f"/request-{number}") == b"x", "acknowledged, so it is there"
            continue
        assert isinstance(outcome, Unavailable | StaleGeneration | MachineDied), outcome
        assert number not in clients.done
        assert outcome.retryable, outcome
        await clients.request(number)
    await clients.check(10)


async def test_every_way_to_sleep_keeps_the_same(plane: ControlPlane) -> None:
    """By itself, on request, with the server: files and memory, again and again (peers: rows 1, 2)."""
    await made(plane)

    async def by_itself() -> None:
        await ticked(plane)

    async def on_request() -> None:
        await plane.service.sleep(CTX, "demo")

    async def with_the_server() -> None:
        await Stop(plane).report()
        plane.node.crash()
        await plane.restart()

    for number, fall_asleep in enumerate([by_itself, on_request, with_the_server] * 2):
        await plane.write("demo", f"/file-{number}", b"kept")
        await fall_asleep()
        assert await plane.state("demo") is HIBERNATED
        _, report = await plane.service.wake(CTX, "demo")
        assert (report.memory, report.memory_reason) == (MemoryFate.KEPT, "")
        for earlier in range(number + 1):
            assert await plane.read("demo", f"/file-{earlier}") == b"kept"


async def test_only_who_says_so_changes_a_timer(plane: ControlPlane) -> None:
    """Sleep, wake and use leave every one as it was (peers: row 6)."""
    await made(plane)
    before = await plane.service.keep_awake(CTX, "demo", 1000)

    def timers(workspace: Workspace) -> tuple[object, ...]:
        return (workspace.keep_awake_until, workspace.idle_timeout_s, workspace.wake_at, workspace.asleep_after_days)

    for _ in range(2):
        await plane.service.sleep(CTX, "demo")
        await plane.write("demo", "/file", b"x")
        assert timers(await plane.service.get(CTX, "demo")) == timers(before)
    await ticked(plane, 900)
    assert await plane.state("demo") is RUNNING, "kept awake across sleeps"
