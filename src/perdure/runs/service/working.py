"""What workers and the functions that they run ask for: work, leases, checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from perdure.core.clock import Clock, epoch_ms
from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import AlreadyExists, CodeChanged, Conflict, InvalidRequest, NotDue, NotFound, StaleInvocation
from perdure.core.ids import TenantId, mint
from perdure.db.database import Database
from perdure.runs.engine import (
    Answer,
    Checkpoint,
    Decision,
    Fail,
    Failure,
    Invoke,
    checkpoint_answer,
    invocation_input,
    page,
    require_token,
)
from perdure.runs.protocol import (
    CheckpointAnswer,
    CheckpointRequest,
    ErrorObject,
    InvocationOutput,
    InvocationStatus,
    OperationPage,
    parse_function,
)
from perdure.runs.service.actors import actor
from perdure.runs.service.deciding import Decider, no_such_execution
from perdure.runs.service.model import LEASE_S, Assignment, Flight, Function, FunctionSpec, Worker
from perdure.runs.service.rows import Claim
from perdure.runs.service.signals import Signals

#: How often a worker that waits for work looks for itself: another server may have made some ready.
_LOOK_S = 2.0
#: How long a worker that waits is believed to be up; here it is told at once that it left, by another server after so long.
_KNOWN_S = 10.0
#: How many candidates are looked at at once; others may be faster with some of them.
_CANDIDATES = 16
Follow = Callable[[Coroutine[Any, Any, None]], None]
_MISSING = ErrorObject(error_type="ResourceNotFoundException", error_message="Function not found")


class Working:
    """``follow`` does something behind the caller's back, and is waited for at the end."""

    def __init__(self, database: Database, clock: Clock, decider: Decider, ready: Signals, follow: Follow) -> None:
        self._database = database
        self._clock = clock
        self._decider = decider
        self._ready = ready
        self._follow = follow

    # ------------------------------------------------------------------------------------------------------------------- workers

    async def functions(self, tenant_id: TenantId) -> list[Function]:
        rows = await self._database.all("runs.functions", tenant_id=tenant_id)
        return [_function(row) for row in rows]

    async def register(self, tenant_id: TenantId, name: str, functions: tuple[FunctionSpec, ...]) -> Worker:
        names = [parse_function(spec.name).name for spec in functions]
        if not functions or len(set(names)) != len(names):
            raise InvalidRequest("A worker serves at least one function, and each once.", hint="Name each function once.")
        worker_id = mint("wrk", now_ms=epoch_ms(self._clock))
        async with self._database.transaction() as transaction:
            for spec in sorted(
                functions, key=lambda one: one.name
            ):  # in one order, so that two that register do not lock each other
                await transaction.run(
                    "runs.register_function",
                    tenant_id=tenant_id,
                    name=spec.name,
                    digest=spec.digest,
                    timeout_s=spec.timeout_s,
                    is_durable=spec.is_durable,
                    concurrency=spec.concurrency,
                )
            await transaction.run(
                "runs.register_worker",
                id=worker_id,
                tenant_id=tenant_id,
                name=name,
                functions=names,
                digests=[spec.digest for spec in functions],
                lease_s=LEASE_S,
            )
        return Worker(worker_id, LEASE_S)

    async def leave(self, tenant_id: TenantId, worker_id: str) -> None:
        await self._worker(tenant_id, worker_id)
        await self._database.run("runs.worker_leaves", tenant_id=tenant_id, id=worker_id)
        self._ready.tell(worker_id)  # what it waits with must end

    async def _worker(self, tenant_id: TenantId, worker_id: str) -> dict[str, Any]:
        """Its row; it is heard of. Raises NotFound."""
        row = await self._database.one("runs.worker", tenant_id=tenant_id, id=worker_id, renew_s=LEASE_S / 2)
        if row is None:
            raise NotFound("There is no such worker.", hint="Register again.")
        if row["state"] == "up" and row["is_unseen"]:
            await self._database.run("runs.worker_seen", tenant_id=tenant_id, id=worker_id, lease_s=LEASE_S)
        return row

    async def _up(self, tenant_id: TenantId, worker_id: str) -> dict[str, Any]:
        worker = await self._worker(tenant_id, worker_id)
        if worker["state"] != "up":
            raise Conflict("This worker has left, so it takes nothing.", hint="Register again to take more.")
        return worker

    # ---------------------------------------------------------------------------------------------------------------------- work

    async def take(self, tenant_id: TenantId, worker_id: str, wait_s: float) -> Assignment | None:
        until = self._clock.monotonic() + wait_s
        worker = await self._up(tenant_id, worker_id)
        known_until = self._clock.monotonic() + _KNOWN_S
        while True:
            names = worker["functions"]
            with self._ready.listen([worker_id, *((tenant_id, name) for name in names)]) as listening:
                taken = await self._try(tenant_id, worker_id, worker)
                left = until - self._clock.monotonic()
                if taken is not None or left <= 0:
                    return taken
                soonest = await self._database.one("runs.soonest", tenant_id=tenant_id, functions=names)
                next_s = _LOOK_S if soonest is None or soonest["wait_s"] is None else float(soonest["wait_s"])
                is_told = await listening.wait(min(left, _LOOK_S, next_s))
            if is_told or self._clock.monotonic() > known_until:
                worker = await self._up(tenant_id, worker_id)
                known_until = self._clock.monotonic() + _KNOWN_S

    async def _try(self, tenant_id: TenantId, worker_id: str, worker: Mapping[str, Any]) -> Assignment | None:
        digests = dict(zip(worker["functions"], worker["digests"], strict=True))
        candidates = await self._database.all(
            "runs.ready",
            tenant_id=tenant_id,
            functions=worker["functions"],
            digests=worker["digests"],
            limit=_CANDIDATES,
        )
        for row in candidates:
            try:
                return await self._claim(tenant_id, worker_id, row, digests[row["function"]])
            except (AlreadyExists, CodeChanged, NotDue, NotFound):  # others were faster, or it is not to be run now
                continue
        return None

    async def _claim(self, tenant_id: TenantId, worker_id: str, row: Mapping[str, Any], digest: str) -> Assignment:
        deadline_at = self._decider.time.told(row["now"]) + timedelta(seconds=row["timeout_s"])
        slot = _free_slot(row["slots"]) if row["concurrency"] is not None else None
        command = Invoke(mint("req", now_ms=epoch_ms(self._clock)), digest)
        claim = Claim(worker_id, deadline_at, slot)
        claiming = asyncio.ensure_future(self._decider.decide(tenant_id, row["id"], command, actor(worker_id), claim))
        try:
            decision = await asyncio.shield(claiming)
        except asyncio.CancelledError:
            self._follow(self._give_back(tenant_id, claiming))
            raise
        crashpoint(CrashPoint.RUNS_CLAIM_COMMITTED)
        state, reply = decision.state, decision.reply
        assert reply is not None, "an invocation that begins has its reply"
        return Assignment(
            execution_id=state.id,
            arn=state.started.arn,
            function=state.started.function,
            invocation=state.invocations,
            request_id=command.request_id,
            deadline_at=deadline_at,
            event=invocation_input(state, reply, self._decider.rules) if row["is_durable"] else state.started.input,
        )

    async def _give_back(self, tenant_id: TenantId, claiming: asyncio.Future[Decision]) -> None:
        """Whoever asked has left while it was given to him."""
        with suppress(AlreadyExists, CodeChanged, NotDue, NotFound):
            state = (await claiming).state
            await self.fail(tenant_id, Flight(state.id, state.invocations), Failure.RETURNED)

    async def beat(self, tenant_id: TenantId, worker_id: str, flights: tuple[Flight, ...]) -> tuple[Flight, ...]:
        await self._worker(tenant_id, worker_id)
        rows = await self._database.all(
            "runs.beat",
            tenant_id=tenant_id,
            worker_id=worker_id,
            ids=[flight.execution_id for flight in flights],
            invocations=[flight.invocation for flight in flights],
            lease_s=LEASE_S,
        )
        going_on = {(row["id"], row["invocation"]) for row in rows}
        return tuple(flight for flight in flights if (flight.execution_id, flight.invocation) not in going_on)

    async def answer(self, tenant_id: TenantId, flight: Flight, output: InvocationOutput) -> None:
        await self._over(tenant_id, flight, Answer(flight.invocation, output))

    async def fail(self, tenant_id: TenantId, flight: Flight, failure: Failure, error: ErrorObject | None = None) -> None:
        if failure is Failure.RAISED and not await self._is_durable(tenant_id, flight.execution_id):
            # Whatever it did before is not recorded, so it is not run again: what it raised is its answer.
            output = InvocationOutput(status=InvocationStatus.FAILED, error=error)
            await self._over(tenant_id, flight, Answer(flight.invocation, output))
            return
        await self._over(tenant_id, flight, Fail(flight.invocation, failure, error))

    async def _is_durable(self, tenant_id: TenantId, execution_id: str) -> bool:
        row = await self._database.one("runs.is_durable", tenant_id=tenant_id, id=execution_id)
        if row is None:
            raise no_such_execution()
        return bool(row["is_durable"])

    async def _over(self, tenant_id: TenantId, flight: Flight, command: Answer | Fail) -> None:
        try:
            await self._decider.decide(tenant_id, flight.execution_id, command, actor("worker"))
        except StaleInvocation:
            return  # somebody else has ended it, or it was answered before
        crashpoint(CrashPoint.RUNS_ANSWER_COMMITTED)

    # ------------------------------------------------------------------------------------------------------------------ function

    async def checkpoint(self, tenant_id: TenantId, execution_id: str, request: CheckpointRequest) -> CheckpointAnswer:
        updates = request.updates or ()
        refused = await self._refused(
            tenant_id, {one.chained_invoke_options.function_name for one in updates if one.chained_invoke_options}
        )
        command = Checkpoint(request.checkpoint_token, updates, request.client_token, refused)
        decision = await self._decider.decide(tenant_id, execution_id, command, actor("function"))
        crashpoint(CrashPoint.RUNS_CHECKPOINT_COMMITTED)
        assert decision.reply is not None, "a checkpoint has its reply"
        return checkpoint_answer(decision.reply)

    async def _refused(self, tenant_id: TenantId, targets: set[str]) -> dict[str, ErrorObject]:
        """Those of the targets that nobody serves, or that are no names."""
        if not targets:
            return {}
        names: dict[str, str] = {}
        for target in targets:
            try:
                names[target] = parse_function(target).name
            except InvalidRequest:
                continue
        rows = await self._database.all("runs.known_functions", tenant_id=tenant_id, names=list(names.values()))
        known = {row["name"] for row in rows}
        return {target: _MISSING for target in targets if names.get(target) not in known}

    async def state(
        self, tenant_id: TenantId, execution_id: str, token: str, marker: str | None, limit: int | None
    ) -> OperationPage:
        state = (await self._decider.read(tenant_id, execution_id)).state
        require_token(state, token)
        return page(state, marker, self._decider.rules, limit)


def _free_slot(taken: list[int]) -> int:
    return next(slot for slot in range(len(taken) + 1) if slot not in taken)


def _function(row: Mapping[str, Any]) -> Function:
    spec = FunctionSpec(row["name"], row["digest"], row["timeout_s"], row["is_durable"], row["concurrency"])
    return Function(spec, row["registered_at"], row["workers"], row["executions"], row["waiting"], row["waiting_since"])
