"""Workers of durable functions: they ask for work, and say what came of it."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from starlette.requests import Request

from perdure.api.deps import Call
from perdure.api.waiting import while_asked
from perdure.core.errors import InvalidRequest
from perdure.runs.engine import Failure
from perdure.runs.protocol import ErrorObject, InvocationInput, InvocationOutput, InvocationStatus, Unit, parse
from perdure.runs.service.model import FAILURES, Assignment, Flight, Function, FunctionSpec
from perdure.wire.public import workers as wire
from perdure.wire.public.common import Done

router = APIRouter(tags=["workers"])
Number = Annotated[int, Path(ge=1, le=(1 << 63) - 1, description="Which of the execution's invocations.")]
_BODY: dict[str, Any] = {"requestBody": {"content": {"application/json": {"schema": {}}}}}


@router.post("/workers", status_code=201)
async def register_worker(body: wire.RegisterWorker, call: Call) -> wire.RegisteredWorker:
    """A worker begins, and says which functions it serves. Whoever starts again registers again."""
    functions = tuple(FunctionSpec(one.name, one.digest, one.timeout_s, one.durable, one.concurrency) for one in body.functions)
    worker = await call.services.executions.register(call.ctx.tenant_id, body.name, functions)
    call.about(worker.id)
    return wire.RegisteredWorker(worker_id=worker.id, lease_s=worker.lease_s)


@router.delete("/workers/{ref}")
async def remove_worker(ref: str, call: Call) -> Done:
    """It takes no more work. What it has in flight it may still answer."""
    await call.services.executions.leave(call.ctx.tenant_id, ref)
    return Done()


@router.post("/workers/{ref}/take")
async def take_work(ref: str, body: wire.TakeWork, call: Call, request: Request) -> wire.TakenWork:
    """The next invocation for this worker. Without one the answer comes after ``wait_s``, or when the server stops."""
    executions, tenant_id = call.services.executions, call.ctx.tenant_id
    taken = await while_asked(executions.take(tenant_id, ref, body.wait_s), request.receive, call.closing)
    if taken is not None and await request.is_disconnected():  # nobody will hear of it
        await executions.fail(tenant_id, Flight(taken.execution_id, taken.invocation), Failure.RETURNED)
        taken = None
    return wire.TakenWork(work=None if taken is None else _work(taken))


def _work(taken: Assignment) -> wire.Work:
    event = taken.event
    return wire.Work(
        execution_id=taken.execution_id,
        arn=taken.arn,
        function=taken.function,
        invocation=taken.invocation,
        request_id=taken.request_id,
        deadline_at=taken.deadline_at,
        event=event.wire(Unit.MILLISECONDS) if isinstance(event, InvocationInput) else _payload(event),
    )


def _payload(text: str | None) -> Any:
    """An input as a function that is not durable is called with it: what is no JSON is a text."""
    try:
        return {} if text is None else json.loads(text)
    except ValueError:
        return text


@router.post("/workers/{ref}/beat")
async def beat_worker(ref: str, body: wire.WorkerBeat, call: Call) -> wire.BeatAnswer:
    """The worker lives, and these are in flight. Those in the answer are over: end them."""
    flights = tuple(Flight(one.execution_id, one.invocation) for one in body.flights)
    over = await call.services.executions.beat(call.ctx.tenant_id, ref, flights)
    told = [wire.OverFlight(execution_id=one.execution_id, invocation=one.invocation) for one in over]
    return wire.BeatAnswer(over=told)


@router.post("/executions/{ref}/invocations/{invocation}/answer", openapi_extra=_BODY)
async def answer_work(
    ref: str,
    invocation: Number,
    request: Request,
    call: Call,
    durable: Annotated[bool, Query(description="False: the function is not durable, and the body is its result.")] = True,
) -> Done:
    """What the function returned, as JSON. What is no answer of a durable function ends its execution. One that comes when its
    invocation is over changes nothing."""
    executions, tenant_id, flight = call.services.executions, call.ctx.tenant_id, Flight(ref, invocation)
    body = await request.body()
    try:
        output = parse(InvocationOutput, body) if durable else _result(body)
    except InvalidRequest as problem:
        error = ErrorObject(error_type="InvalidParameterValueException", error_message=problem.message)
        await executions.fail(tenant_id, flight, Failure.INVALID, error)
    else:
        await executions.answer(tenant_id, flight, output)
    return Done()


def _result(body: bytes) -> InvocationOutput:
    """Of a function that is not durable. Raises InvalidRequest."""
    try:
        text = body.decode()
        json.loads(text or "null")
    except ValueError:
        raise InvalidRequest("What the function returned is not JSON.") from None
    return InvocationOutput(status=InvocationStatus.SUCCEEDED, result=text or "null")


@router.post("/executions/{ref}/invocations/{invocation}/fail")
async def fail_work(ref: str, invocation: Number, body: wire.FailWork, call: Call) -> Done:
    """The invocation ended without an answer. When it is over already, that changes nothing."""
    error = ErrorObject(error_type=body.error_type, error_message=body.error_message, stack_trace=tuple(body.stack_trace) or None)
    failure = FAILURES[body.failure.value]
    await call.services.executions.fail(call.ctx.tenant_id, Flight(ref, invocation), failure, error)
    return Done()


@router.get("/functions")
async def list_functions(call: Call) -> wire.FunctionList:
    """All that workers have ever registered, and how many serve each now."""
    return wire.FunctionList(functions=[_function(one) for one in await call.services.executions.functions(call.ctx.tenant_id)])


def _function(one: Function) -> wire.FunctionInfo:
    spec = one.spec
    return wire.FunctionInfo(
        name=spec.name,
        digest=spec.digest,
        timeout_s=spec.timeout_s,
        durable=spec.is_durable,
        concurrency=spec.concurrency,
        registered_at=one.registered_at,
        workers=one.workers,
        executions=one.executions,
        waiting=one.waiting,
        waiting_since=one.waiting_since,
    )
