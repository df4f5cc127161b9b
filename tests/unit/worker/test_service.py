"""The worker itself, over a server and processes that a test plays: what it takes, keeps, kills, gives back and says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from perdure.core.errors import Conflict, Forbidden, NotFound, PayloadTooLarge, PerdureError
from perdure.sdk.errors import ServerUnreachable
from perdure.wire.public.workers import FailureKind, FlightRef, RegisteredWorker, Work
from perdure.worker.contact import Contact
from perdure.worker.model import Answered, Failed, Job, Outcome, Plan, Served, StartFailed
from perdure.worker.pool import Pool
from perdure.worker.service import Worker
from tests.fakes.clock import FakeClock

DEADLINE_S = 10
LEASE_S = 0.2
LONG_LEASE_S = 1000.0


class Played:
    """A process: an invocation ends when the test says so, or when it is killed."""

    def __init__(self, began: Callable[[], None]) -> None:
        self._began = began
        self.functions = (Served("main", "v1", True), Served("plain", "v2", False))
        self.is_alive = True
        self.jobs: list[Job] = []
        self.end: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    async def run(self, job: Job) -> Outcome:
        self.jobs.append(job)
        self.end = asyncio.get_running_loop().create_future()
        self._began()
        return await self.end

    async def kill(self) -> None:
        self.is_alive = False
        if not self.end.done():
            self.end.set_result(Failed(FailureKind.RAISED, "Runtime.ExitError", "killed"))


@dataclass
class Server(Contact):
    """What a worker is answered. ``trouble`` is raised by the next calls of that name, one each."""

    lease_s: float = LONG_LEASE_S
    work: asyncio.Queue[Work | None] = field(default_factory=asyncio.Queue)  # None: there was none in time
    empties: int = 0
    over: set[tuple[str, int]] = field(default_factory=set)
    trouble: dict[str, list[PerdureError]] = field(default_factory=dict)
    told: list[tuple[Any, ...]] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    beats: list[tuple[str, list[tuple[str, int]]]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    workers: int = 0

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()
        self._failures = 0

    def _tell(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))
        self._changed.set()

    def tell(self, kind: str, **fields: Any) -> None:
        self._tell(kind, **fields)

    def changed(self) -> None:
        self._changed.set()

    def _maybe(self, name: str) -> None:
        self._changed.set()
        if self.trouble.get(name):
            raise self.trouble[name].pop(0)

    async def until(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def register(self, plan: Plan, functions: Iterable[Served]) -> RegisteredWorker:
        self._maybe("register")
        self.workers += 1
        self.told.append(("register", plan.name, [(one.name, one.digest, one.is_durable) for one in functions]))
        return RegisteredWorker(worker_id=f"w{self.workers}", lease_s=self.lease_s)

    async def leave(self, worker_id: str) -> None:
        self._maybe("leave")
        self.left.append(worker_id)
        self._changed.set()

    async def take(self, worker_id: str, wait_s: float) -> Work | None:
        self._maybe("take")
        if wait_s == 0 and not self.work.qsize():
            self.empties += 1
            self._changed.set()
            return None
        taking, changed = asyncio.ensure_future(self.work.get()), None
        try:
            while not taking.done():
                if worker_id in self.left:
                    raise Conflict("This worker has left.")
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({taking, changed}, return_when=asyncio.FIRST_COMPLETED)
                self._changed.clear()
            return taking.result()
        finally:
            for task in (taking, changed):
                if task is not None:
                    task.cancel()

    async def beat(self, worker_id: str, flights: Iterable[FlightRef], timeout_s: float) -> set[tuple[str, int]]:
        self.beats.append((worker_id, [(one.execution_id, one.invocation) for one in flights]))
        self._maybe("beat")
        return self.over

    async def answer(self, work: Work, body: bytes, *, is_durable: bool) -> None:
        self._maybe("answer")
        self.told.append(("answer", work.execution_id, body, is_durable))
        self._changed.set()

    async def fail(self, work: Work, failed: Failed) -> None:
        self._maybe("fail")
        self.told.append(("fail", work.execution_id, failed.kind, failed.error_type))
        self._changed.set()

    def named(self, kind: str) -> list[dict[str, Any]]:
        return [fields for one, fields in self.events if one == kind]


@dataclass
class Stage:
    server: Server
    worker: Worker
    processes: list[Played]
    clock: FakeClock
    run: asyncio.Task[None]

    def give(self, execution_id: str = "e1", function: str = "main", invocation: int = 1) -> None:
        arn = f"arn:function:{function}:$LATEST/durable-execution/n/{execution_id}"
        work = Work(
            execution_id=execution_id,
            arn=arn,
            function=function,
            invocation=invocation,
            request_id=f"r-{execution_id}",
            deadline_at=datetime.now(UTC),
            event={"n": 1},
        )
        self.server.work.put_nowait(work)

    async def flying(self, count: int = 1) -> None:
        await self.server.until(lambda: sum(len(one.jobs) for one in self.processes) >= count)

    async def ended(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.run


@asynccontextmanager
async def staged(plan: Plan | None = None, **of_server: Any) -> AsyncIterator[Stage]:
    server, clock, processes = Server(**of_server), FakeClock(), list[Played]()

    async def start() -> Played:
        server._maybe("start")
        processes.append(Played(server.changed))
        return processes[-1]

    plan = plan or Plan()
    pool = Pool(start, plan.concurrency, plan.recycle_after, server.tell)
    worker = Worker(plan, server, pool, clock, server.tell)
    run = asyncio.ensure_future(worker.run())
    try:
        yield Stage(server, worker, processes, clock, run)
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await pool.close()
        assert not any(one.is_alive for one in processes), "a process is left behind"
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, f"tasks are left behind: {others}"


# ------------------------------------------------------------------------------------------------------------------------- work


async def test_it_registers_takes_runs_and_answers() -> None:
    async with staged(Plan(name="laptop", timeout_s=77)) as stage:
        stage.give()
        await stage.flying()
        (job,) = stage.processes[0].jobs
        assert (job.function, job.request_id, job.event, job.timeout_s) == ("main", "r-e1", {"n": 1}, 77)
        assert job.function_arn == "arn:function:main:$LATEST"
        stage.processes[0].end.set_result(Answered(b'{"Status": "PENDING"}'))
        await stage.server.until(lambda: stage.server.named("ended"))
        assert stage.server.told == [
            ("register", "laptop", [("main", "v1", True), ("plain", "v2", False)]),
            ("answer", "e1", b'{"Status": "PENDING"}', True),
        ]
        assert stage.server.named("ended")[0]["result"] == "waits"
        stage.give("e2", "plain")
        await stage.flying(2)
        stage.processes[0].end.set_result(Answered(b"7"))
        await stage.server.until(lambda: ("answer", "e2", b"7", False) in stage.server.told)


async def test_it_takes_no_more_than_it_has_processes_for() -> None:
    """Work that waits for a process would hold a lease and do nothing, while another worker could run it."""
    async with staged(Plan(concurrency=2)) as stage:
        for number in range(3):
            stage.give(f"e{number}")
        await stage.flying(2)
        assert stage.server.work.qsize() == 1 and len(stage.processes) == 2
        stage.processes[0].end.set_result(Answered(b"1"))
        await stage.flying(3)


async def test_a_question_that_brings_nothing_is_asked_again() -> None:
    async with staged() as stage:
        for _ in range(3):
            stage.server.work.put_nowait(None)
        stage.give()
        await stage.flying()
        assert len(stage.processes) == 1


async def test_a_process_that_dies_while_nobody_uses_it_is_replaced() -> None:
    async with staged(Plan(concurrency=2)) as stage:
        await stage.server.until(lambda: len(stage.processes) == 2)
        stage.processes[1].is_alive = False  # the one that is kept ready
        stage.give("e1")
        stage.give("e2")
        await stage.flying(2)
        assert not stage.processes[1].jobs and stage.server.named("process-died")


@pytest.mark.parametrize(
    ("trouble", "told"),
    [(PayloadTooLarge("The answer is too large."), FailureKind.INVALID), (NotFound("There is no such execution."), None)],
)
async def test_an_answer_that_is_refused(trouble: PerdureError, told: FailureKind | None) -> None:
    """It is not sent for ever: what is too large ends the execution, what is over is dropped (durable: fault 11)."""
    async with staged(trouble={"answer": [trouble]}) as stage:
        stage.give()
        await stage.flying()
        stage.processes[0].end.set_result(Answered(b"1"))
        await stage.server.until(lambda: stage.server.named("ended"))
        failed = [one[2] for one in stage.server.told if one[0] == "fail"]
        assert failed == ([told] if told else [])


async def test_a_process_that_died_is_replaced_and_so_is_one_that_is_spent() -> None:
    async with staged(Plan(recycle_after=2)) as stage:
        for number, expected in enumerate((1, 1, 2, 2, 3)):
            stage.give(f"e{number}")
            await stage.flying(number + 1)
            assert len(stage.processes) == expected
            stage.processes[-1].end.set_result(Answered(b"1"))
            await stage.server.until(lambda seen=number + 1: len(stage.server.named("ended")) == seen)
        stage.give("dies")
        await stage.flying(6)
        stage.processes[-1].is_alive = False
        stage.processes[-1].end.set_result(Failed(FailureKind.RAISED, "Runtime.ExitError", "exit code 1"))
        await stage.server.until(lambda: ("fail", "dies", FailureKind.RAISED, "Runtime.ExitError") in stage.server.told)
        stage.give("next")
        await stage.flying(7)
        assert stage.processes[-1].jobs[0].request_id == "r-next"


async def test_handlers_that_cannot_be_loaded_end_it_at_the_start_and_later_do_not() -> None:
    async with staged(trouble={"start": [StartFailed("No such module.")]}) as stage:
        with pytest.raises(StartFailed, match="No such module"):
            await stage.ended()
    async with staged(Plan(recycle_after=1)) as stage:
        stage.give()
        await stage.flying()
        stage.server.trouble["start"] = [StartFailed("A typo.")]
        stage.processes[0].end.set_result(Answered(b"1"))
        await stage.server.until(lambda: stage.server.named("start-failed"))
        stage.give("e2")
        await stage.flying(2)


# ----------------------------------------------------------------------------------------------------------------------- leases


async def test_it_beats_for_all_that_is_in_flight() -> None:
    async with staged(Plan(concurrency=2), lease_s=LEASE_S) as stage:
        stage.give("e1")
        stage.give("e2", invocation=4)
        await stage.server.until(lambda: ("w1", [("e1", 1), ("e2", 4)]) in stage.server.beats)
        seen = len(stage.server.beats)
        await stage.server.until(lambda: len(stage.server.beats) >= seen + 2)


async def test_an_invocation_whose_lease_has_ended_is_killed_and_says_nothing() -> None:
    """Whatever a zombie still does counts for nothing, so it does no more (durable: fault 19)."""
    async with staged(lease_s=LEASE_S) as stage:
        stage.give()
        await stage.flying()
        stage.server.over = {("e1", 1)}
        await stage.server.until(lambda: stage.server.named("ended"))
        assert not stage.processes[0].is_alive and stage.server.named("ended")[0]["result"] == "over"
        assert not [one for one in stage.server.told if one[0] in {"answer", "fail"}]
        stage.server.over = set()
        stage.give("e2")
        await stage.flying(2)
        assert stage.processes[-1].jobs[0].request_id == "r-e2"


async def test_beats_that_nobody_answers_end_a_lease_too() -> None:
    """A worker that is cut off kills what it runs, since the server gives it to others by then (durable: fault 19)."""
    async with staged(lease_s=LEASE_S) as stage:
        stage.give()
        await stage.flying()
        stage.server.trouble["beat"] = [ServerUnreachable("No server answers.") for _ in range(1000)]
        seen = len(stage.server.beats)
        await stage.server.until(lambda: len(stage.server.beats) >= seen + 2)
        assert stage.processes[0].is_alive  # its lease has not ended yet
        stage.clock.advance(LEASE_S + 1)
        await stage.server.until(lambda: stage.server.named("ended"))
        assert not stage.processes[0].is_alive and stage.server.named("ended")[0]["result"] == "over"


async def test_a_beat_that_is_answered_keeps_the_lease() -> None:
    async with staged(lease_s=LEASE_S) as stage:
        stage.give()
        await stage.flying()
        for _ in range(3):
            stage.clock.advance(0.9 * LEASE_S)
            seen = len(stage.server.beats)
            await stage.server.until(lambda seen=seen: len(stage.server.beats) >= seen + 2)  # type: ignore[misc]
        stage.server.trouble["beat"] = [ServerUnreachable("No server answers.")]
        await stage.server.until(lambda: stage.server.named("server-back"))
        assert stage.processes[0].is_alive and not stage.server.named("ended")


async def test_a_function_that_runs_for_too_long_is_killed_and_told() -> None:
    async with staged(Plan(timeout_s=0)) as stage:
        stage.give()
        await stage.server.until(lambda: ("fail", "e1", FailureKind.TIMED_OUT, "Sandbox.Timedout") in stage.server.told)
        assert not stage.processes[0].is_alive


async def test_a_worker_that_the_server_has_forgotten_registers_anew() -> None:
    """Each registration is a worker of its own, and what was given to the one before is over (durable: fault 2)."""
    async with staged(trouble={"take": [NotFound("There is no such worker.")]}) as stage:
        stage.give()
        await stage.flying()
        assert stage.server.workers == 2
    async with staged(lease_s=LEASE_S) as stage:
        stage.give()
        await stage.flying()
        stage.server.trouble["beat"] = [NotFound("There is no such worker.")]
        await stage.server.until(lambda: stage.server.workers == 2 and stage.server.named("ended"))
        assert not stage.processes[0].is_alive
        await stage.server.until(lambda: stage.server.beats[-1][0] == "w2")


# ------------------------------------------------------------------------------------------------------------------- the server


async def test_a_server_that_is_away_is_said_once_and_nothing_is_lost() -> None:
    def away() -> list[PerdureError]:
        return [ServerUnreachable("No server answers.") for _ in range(3)]

    async with staged(trouble={"register": away()}) as stage:
        stage.give()
        await stage.flying()
        kinds = [kind for kind, _ in stage.server.events]
        assert kinds[:3] == ["server-away", "server-back", "registered"] and kinds.count("server-away") == 1
        stage.server.trouble["answer"] = away()
        stage.processes[0].end.set_result(Answered(b"1"))
        await stage.server.until(lambda: ("answer", "e1", b"1", True) in stage.server.told)
        assert [kind for kind, _ in stage.server.events].count("server-away") == 2


async def test_what_the_server_refuses_for_good_ends_it() -> None:
    for name in ("register", "take", "beat"):
        async with staged(lease_s=LEASE_S, trouble={name: [Forbidden("This key may not.")]}) as stage:
            with pytest.raises(Forbidden, match="may not"):
                await stage.ended()


# ----------------------------------------------------------------------------------------------------------------------- drain


async def test_a_drain_takes_nothing_and_lets_what_runs_end() -> None:
    """(durable: fault 2): a worker that drains is given nothing any more."""
    async with staged(lease_s=LEASE_S) as stage:
        stage.give()
        await stage.flying()
        stage.worker.drain()
        await stage.server.until(lambda: stage.server.left)
        seen = len(stage.server.beats)
        await stage.server.until(lambda: len(stage.server.beats) > seen)  # its lease is still kept
        stage.processes[0].end.set_result(Answered(b"1"))
        await stage.ended()
        assert ("answer", "e1", b"1", True) in stage.server.told and stage.server.left == ["w1"]


async def test_a_drain_gives_back_what_does_not_end_in_its_time() -> None:
    async with staged(Plan(drain_s=0.05)) as stage:
        stage.give()
        await stage.flying()
        stage.worker.drain()
        await stage.ended()
        assert ("fail", "e1", FailureKind.RETURNED, "") in stage.server.told and not stage.processes[0].is_alive


async def test_a_second_signal_ends_it_at_once() -> None:
    async with staged(Plan(drain_s=1000)) as stage:
        stage.give()
        await stage.flying()
        stage.worker.drain()
        await stage.server.until(lambda: stage.server.named("draining"))
        stage.worker.drain()
        await stage.ended()
        assert ("fail", "e1", FailureKind.RETURNED, "") in stage.server.told


async def test_an_invocation_that_was_on_its_way_is_given_back() -> None:
    class Late(Server):
        async def leave(self, worker_id: str) -> None:
            stage.give("late")  # it was handed out just before
            await super().leave(worker_id)

        async def take(self, worker_id: str, wait_s: float) -> Work | None:
            self._tell("asked")
            return await self.work.get()

    server, processes = Late(), list[Played]()

    async def start() -> Played:
        processes.append(Played(server.changed))
        return processes[-1]

    pool = Pool(start, 1, 0, server.tell)
    worker = Worker(Plan(), server, pool, FakeClock(), server.tell)
    stage = Stage(server, worker, processes, FakeClock(), asyncio.ensure_future(worker.run()))
    await server.until(lambda: server.named("asked"))
    worker.drain()
    await stage.ended()
    assert ("fail", "late", FailureKind.RETURNED, "") in server.told and not processes[0].jobs
    await pool.close()


async def test_it_drains_while_it_waits_for_work_and_ends() -> None:
    async with staged() as stage:
        await stage.server.until(lambda: stage.server.beats)
        stage.worker.drain()
        await stage.ended()
        assert stage.server.left == ["w1"] and stage.server.events[-1][0] == "stopped"


async def test_it_drains_before_it_has_begun_and_while_the_server_is_away() -> None:
    async with staged(trouble={"register": [ServerUnreachable("No server answers.") for _ in range(100)]}) as stage:
        await stage.server.until(lambda: stage.server.named("server-away"))
        stage.worker.drain()
        await stage.ended()
        assert not stage.server.workers
    async with staged() as stage:
        stage.worker.drain()
        await stage.ended()
        assert not stage.server.workers


async def test_once_ends_when_nothing_is_left() -> None:
    async with staged(Plan(once=True, concurrency=2)) as stage:
        stage.give("e1")
        await stage.flying()
        await stage.server.until(lambda: stage.server.empties)
        stage.give("e2")  # it came while the first one ran, and after nothing else was there
        stage.processes[0].end.set_result(Answered(b"1"))
        await stage.flying(2)
        for process in stage.processes:
            if process.jobs and not process.end.done():
                process.end.set_result(Answered(b"1"))
        await stage.ended()
        assert sorted(one[1] for one in stage.server.told if one[0] == "answer") == ["e1", "e2"]
        assert stage.server.left == ["w1"]
