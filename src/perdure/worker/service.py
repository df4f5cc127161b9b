"""The worker: takes invocations while it has a process for them, keeps their leases, answers, and drains.

What a lease has ended for is killed: the server gives it to others, and a zombie would do things beside them. A worker that is
killed says nothing more, and its leases end by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from perdure.core.clock import Clock
from perdure.core.errors import Conflict, InvalidRequest, NotFound, PerdureError, Unauthenticated
from perdure.wire.public.workers import FailureKind, FlightRef, RegisteredWorker, Work
from perdure.worker.contact import Contact
from perdure.worker.model import Answered, Failed, Job, Outcome, Plan, Runner, Served, Tell
from perdure.worker.pool import Pool

#: How long the server may hold a question for work.
TAKE_S = 20.0
#: An invocation that was on its way when the worker left arrives within this.
ON_ITS_WAY_S = 5.0
BEATS_PER_LEASE = 4
#: Of a durable function's answer, for people.
STATUSES = {"SUCCEEDED": "succeeded", "FAILED": "failed", "PENDING": "waits"}

Result = TypeVar("Result")


class Cut(enum.Enum):
    """Why an invocation's process is killed."""

    OVER = "over"  # its lease has ended: whatever it answers counts for nothing
    RETURNED = "returned"  # the worker drains, and gives it back
    TIMED_OUT = "timed-out"


@dataclass(eq=False, slots=True)
class Flight:
    """An invocation with its process. ``kept_until``: when its lease ends unless a beat says otherwise, monotonic."""

    work: Work
    runner: Runner
    kept_until: float
    cut: Cut | None = None
    is_reporting: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def key(self) -> tuple[str, int]:
        return self.work.execution_id, self.work.invocation

    async def end(self, why: Cut) -> None:
        """Kill it, unless it has been, or has an answer that is on its way."""
        if why is Cut.OVER:
            self.over.set()
        if self.cut is None and not self.is_reporting:
            self.cut = why
            await self.runner.kill()


class Worker:
    """``run`` it once; ``drain`` ends it, at once when told a second time."""

    def __init__(self, plan: Plan, contact: Contact, pool: Pool[Any], clock: Clock, tell: Tell) -> None:
        self._plan = plan
        self._contact = contact
        self._pool = pool
        self._clock = clock
        self._tell = tell
        self._functions: Sequence[Served] = ()
        self._registered: RegisteredWorker | None = None
        self._registering = asyncio.Lock()
        self._flights: dict[tuple[str, int], Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = asyncio.Event()
        self._at_once = asyncio.Event()
        self._has_left = False

    def drain(self) -> None:
        """Take nothing any more, and end when what runs has ended, or is given back."""
        if self._draining.is_set():
            self._at_once.set()
        self._draining.set()

    async def run(self, digest: str | None = None) -> None:
        """Serve until it is drained, or, with ``once``, until there is nothing to take. ``digest`` stands in place of the
        functions' own. Raises StartFailed for handlers that cannot be loaded, and what the server refuses for good."""
        beats = serving = None
        try:
            first = await self._first(self._pool.first(), self._draining)
            self._functions = [replace(one, digest=digest or one.digest) for one in first.functions] if first else []
            if first is None or not await self._register(None):
                return
            beats = asyncio.ensure_future(self._beat())
            serving = asyncio.ensure_future(self._serve())
            done, _ = await asyncio.wait({beats, serving}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await self._drained()
        finally:
            await _cancel(*(task for task in (serving, *self._tasks, beats) if task is not None))
            if self._registered is not None:
                await self._leave()
                self._tell("stopped")

    # ------------------------------------------------------------------------------------------------------------- the server

    async def _register(self, stale: RegisteredWorker | None) -> bool:
        """Until the server knows this worker, by another id than ``stale``. False: it drains before that."""
        async with self._registering:
            while self._registered is stale and not self._draining.is_set():
                try:
                    self._registered = await self._contact.register(self._plan, self._functions)
                except PerdureError as error:
                    await self._within(self._draining, self._contact.failed(error))
                else:
                    self._contact.reached()
                    functions = [{"name": one.name, "durable": one.is_durable, "digest": one.digest} for one in self._functions]
                    self._tell("registered", worker=self._registered.worker_id, functions=functions)
        return self._registered is not stale

    @property
    def _known(self) -> RegisteredWorker:
        assert self._registered is not None
        return self._registered

    async def _leave(self) -> None:
        """It may be given nothing from here on. When the server cannot be told, it finds out by itself."""
        if self._registered is None or self._has_left:
            return
        self._has_left = True
        with contextlib.suppress(PerdureError):
            await self._first(self._contact.leave(self._known.worker_id), self._at_once)

    async def _beat(self) -> None:
        """Keep the leases of what is in flight, and be known while nothing is."""
        while True:
            known = self._known
            period_s = known.lease_s / BEATS_PER_LEASE
            flights = list(self._flights.values())
            began = self._clock.monotonic()
            pause_s = period_s
            refs = [FlightRef(execution_id=one.work.execution_id, invocation=one.work.invocation) for one in flights]
            try:
                over = await self._contact.beat(known.worker_id, refs, period_s)
            except (NotFound, Unauthenticated):  # what it was given it was given by another name
                await asyncio.gather(*(one.end(Cut.OVER) for one in flights))
                over = set()
                if not self._has_left:
                    await self._register(known)
            except PerdureError as error:
                pause_s = min(period_s, self._contact.failed(error))
                over = {one.key for one in flights if one.kept_until <= self._clock.monotonic()}
            else:
                self._contact.reached()
                for one in flights:
                    one.kept_until = began + known.lease_s
            await asyncio.gather(*(one.end(Cut.OVER) for one in flights if one.key in over))
            await asyncio.sleep(pause_s)

    # ------------------------------------------------------------------------------------------------------------------- work

    async def _serve(self) -> None:
        """Take what there is, as long as a process is free for it."""
        while not self._draining.is_set():
            runner = await self._first(self._pool.acquire(), self._draining)
            if runner is None:
                return
            was_busy = bool(self._tasks)
            work = await self._take()
            if work is not None and not self._draining.is_set():
                self._begin(work, runner)
                continue
            self._pool.release(runner, used=False)
            if work is not None:
                self._in_background(self._give_back(work))
            elif self._plan.once:
                if not was_busy:  # else what ran at the time of the question may have left something to do
                    return
                if self._tasks:
                    await asyncio.wait({*self._tasks}, return_when=asyncio.FIRST_COMPLETED)

    async def _take(self) -> Work | None:
        """What the server gives; None when it has nothing or must not be asked any more."""
        while not self._draining.is_set():
            known = self._known
            taking = asyncio.ensure_future(self._contact.take(known.worker_id, 0.0 if self._plan.once else TAKE_S))
            try:
                if not await self._ends_before(taking, self._draining):
                    await self._leave()
                    await self._ends_before(taking, self._at_once, ON_ITS_WAY_S)
                    return taking.result() if taking.done() and not taking.exception() else None
                work = taking.result()
            except (NotFound, Conflict, Unauthenticated):
                await self._register(known)
            except PerdureError as error:
                await self._within(self._draining, self._contact.failed(error))
            else:
                self._contact.reached()
                return work
            finally:
                await _cancel(taking)
        return None

    def _begin(self, work: Work, runner: Runner) -> None:
        flight = Flight(work, runner, self._clock.monotonic() + self._known.lease_s)
        self._flights[flight.key] = flight
        self._in_background(self._fly(flight))

    async def _give_back(self, work: Work) -> None:
        await self._report(work, Failed(FailureKind.RETURNED), self._at_once)

    async def _fly(self, flight: Flight) -> None:
        """One invocation from its beginning to what the server is told of it."""
        work, began = flight.work, self._clock.monotonic()
        named = {"execution_id": work.execution_id, "invocation": work.invocation, "function": work.function}
        self._tell("invoked", **named)
        job = Job(work.function, work.arn, work.request_id, work.event, self._plan.timeout_s)
        try:
            outcome = await self._outcome(flight, job)
            seconds = round(self._clock.monotonic() - began, 3)
            self._pool.release(flight.runner)
            if flight.cut is not Cut.OVER:
                flight.is_reporting = True
                outcome = await self._report(work, outcome, flight.over)
            self._tell("ended", **named, seconds=seconds, **_shown(flight.cut, outcome))
        finally:
            self._flights.pop(flight.key, None)

    async def _outcome(self, flight: Flight, job: Job) -> Outcome:
        running = asyncio.ensure_future(flight.runner.run(job))
        try:
            await asyncio.wait({running}, timeout=job.timeout_s)
            if not running.done():
                await flight.end(Cut.TIMED_OUT)
            outcome = await running
        finally:
            if not running.done():
                await flight.runner.kill()
            await _cancel(running)
        match flight.cut:
            case Cut.TIMED_OUT:
                said = f"{job.function} was still running after its timeout of {job.timeout_s:g} s, and was killed."
                return Failed(FailureKind.TIMED_OUT, "Sandbox.Timedout", said)
            case Cut.RETURNED:
                return Failed(FailureKind.RETURNED)
            case _:
                return outcome

    async def _report(self, work: Work, outcome: Outcome, until: asyncio.Event) -> Outcome:
        """Tell it until the server has it, or until it is of no use any more. Returns what was told."""
        while not until.is_set():
            try:
                if isinstance(outcome, Answered):
                    is_durable = any(one.name == work.function and one.is_durable for one in self._functions)
                    await self._contact.answer(work, outcome.body, is_durable=is_durable)
                else:
                    await self._contact.fail(work, outcome)
            except (NotFound, Conflict):
                break  # over: what was to be told counts for nothing
            except InvalidRequest as error:
                if not isinstance(outcome, Answered):
                    raise
                outcome = Failed(FailureKind.INVALID, error.code, error.message)
            except PerdureError as error:
                await self._within(until, self._contact.failed(error))
            else:
                self._contact.reached()
                break
        return outcome

    async def _drained(self) -> None:
        """What still runs has ``drain_s`` to end; the rest is given back."""
        await self._leave()
        if self._flights:
            self._tell("draining", flights=len(self._flights), limit_s=self._plan.drain_s)
        if self._tasks:
            ending = asyncio.ensure_future(asyncio.wait({*self._tasks}))
            await self._ends_before(ending, self._at_once, self._plan.drain_s)
            await _cancel(ending)
        await asyncio.gather(*(one.end(Cut.RETURNED) for one in list(self._flights.values())))
        if self._tasks:
            await asyncio.wait({*self._tasks}, timeout=ON_ITS_WAY_S)

    # ---------------------------------------------------------------------------------------------------------------- waiting

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._tell("failed", message=str(error) or type(error).__name__)

    async def _first(self, work: Coroutine[Any, Any, Result], event: asyncio.Event) -> Result | None:
        """What the work gives, or None when the event comes before."""
        task = asyncio.ensure_future(work)
        try:
            await self._ends_before(task, event)
            return task.result() if task.done() else None
        finally:
            await _cancel(task)

    async def _ends_before(self, task: asyncio.Future[Any], event: asyncio.Event, limit_s: float | None = None) -> bool:
        """Whether the task has ended when the event comes, or the time is over."""
        coming = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({task, coming}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            return task.done()
        finally:
            await _cancel(coming)

    async def _within(self, event: asyncio.Event, seconds: float) -> None:
        """A pause that the event ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Returns when they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _shown(cut: Cut | None, outcome: Outcome) -> dict[str, str]:
    """How an invocation ended, for people and logs."""
    if cut is Cut.OVER:
        return {"result": cut.value}
    if isinstance(outcome, Failed):
        return {"result": outcome.kind.value, "error_type": outcome.error_type, "message": outcome.message}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return {"result": STATUSES[json.loads(outcome.body)["Status"]]}
    return {"result": "answered"}
