"""Durable executions for operators, and for programs that start them without an AWS client; AWS's own calls are elsewhere.

A reference is an execution's id, its ARN, or a name: the newest execution that has it.
"""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.requests import Request

from perdure.api import render_runs as render
from perdure.api.deps import PAGE_LIMIT, PAGE_LIMIT_MAX, Bundle, Call, Cursor
from perdure.api.waiting import while_asked
from perdure.core.errors import Conflict, NotFound, Unavailable
from perdure.runs.engine import CodeRule
from perdure.runs.protocol import ErrorObject, ExecutionInfo, ExecutionStatus, parse_arn
from perdure.runs.service.model import Begun, ListQuery, NewExecution
from perdure.wire import public

router = APIRouter(prefix="/executions", tags=["executions"])
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_PAUSED = {ExecutionStatus.PAUSED, ExecutionStatus.PAUSING}
_RUNNING = {ExecutionStatus.RUNNING, ExecutionStatus.DELETING}
Limit = Annotated[int, Query(ge=1, le=PAGE_LIMIT_MAX, description="At most so many.")]
Seconds = Annotated[float, Query(ge=0, le=60, description="How long to wait for its end.")]


def is_name(text: str) -> bool:
    """Whether it can name an execution or an operation."""
    return _NAME.fullmatch(text) is not None


async def find(call: Bundle, ref: str) -> ExecutionInfo:
    """The execution that is meant, without its data, and the audit told. Raises NotFound, with the same words for another
    tenant's."""
    absent = NotFound(f"There is no execution {ref!r}.", hint="List them with 'perdure execution ls'.")
    executions, tenant_id = call.services.executions, call.ctx.tenant_id
    candidate = parse_arn(ref).id if ref.startswith("arn:") else ref
    if not is_name(candidate):
        raise absent
    try:
        found = await executions.describe(tenant_id, candidate, with_data=False)
    except NotFound:
        named = await executions.find(tenant_id, ListQuery(name=ref, limit=1)) if candidate == ref else None
        if named is None or not named.executions:
            raise absent from None
        candidate = parse_arn(named.executions[0].durable_execution_arn).id
        found = await executions.describe(tenant_id, candidate, with_data=False)
    call.about(candidate)
    return found


async def find_id(call: Bundle, ref: str) -> str:
    return parse_arn((await find(call, ref)).durable_execution_arn).id


async def _shown(call: Bundle, execution_id: str) -> public.ExecutionInfo:
    executions, tenant_id = call.services.executions, call.ctx.tenant_id
    told = await executions.inspect(tenant_id, execution_id)
    return render.execution(await executions.describe(tenant_id, execution_id), told)


@router.post("", status_code=201)
async def start_execution(body: public.StartExecution, call: Call) -> public.StartedExecution:
    """Start one. The same name and input again is the same execution; a name with another input is 409."""
    new = NewExecution(
        tenant_id=call.ctx.tenant_id,
        function=body.function,
        input=render.payload(body.input) if "input" in body.model_fields_set else None,
        name=body.name,
        timeout_s=body.timeout_s,
        code=CodeRule(body.code.value),
        priority=body.priority,
        key=body.key,
    )
    begun = await call.services.executions.begin(new)
    call.about(begun.execution_id)
    return public.StartedExecution(execution_id=begun.execution_id, arn=begun.arn, is_new=begun.is_new)


class Wanted(BaseModel):
    """Which executions. Without ``status`` those in any."""

    function: str | None = Field(default=None, max_length=256)
    status: list[public.ExecutionStatus] = Field(default_factory=list, description="In any of these.")
    name: str | None = Field(default=None, max_length=256)
    started_after: public.Moment | None = Field(default=None, description="With its offset.")
    started_before: public.Moment | None = Field(default=None, description="With its offset.")
    oldest_first: bool = False
    limit: int = Field(default=PAGE_LIMIT, ge=1, le=PAGE_LIMIT_MAX, description="At most so many.")
    cursor: str | None = Field(default=None, max_length=200, description="The next_cursor of the page before; none: the first.")


@router.get("")
async def list_executions(query: Annotated[Wanted, Query()], call: Call) -> public.ExecutionList:
    """Newest first, in pages."""
    wanted = ListQuery(
        function=query.function,
        statuses=tuple(ExecutionStatus(one.value) for one in query.status),
        name=query.name,
        started_after=query.started_after,
        started_before=query.started_before,
        oldest_first=query.oldest_first,
        marker=query.cursor,
        limit=query.limit,
    )
    found = await call.services.executions.find(call.ctx.tenant_id, wanted)
    return public.ExecutionList(executions=[render.item(one) for one in found.executions], next_cursor=found.next_marker)


@router.get("/{ref:path}/result")
async def execution_result(ref: str, call: Call, request: Request, wait_s: Seconds = 0) -> public.ExecutionOutcome:
    """What became of it. ``ended`` is false where it has not ended after ``wait_s``: ask again."""
    executions, tenant_id = call.services.executions, call.ctx.tenant_id
    execution_id = await find_id(call, ref)
    info = await while_asked(executions.ended(tenant_id, execution_id, wait_s), request.receive, call.closing)
    if info is not None:
        return render.outcome(info, has_ended=True)
    if call.closing.is_set():
        raise call.closing.reason(
            Unavailable("The server is stopping; the execution goes on.", hint="Ask again when it is back.")
        )
    return render.outcome(await executions.describe(tenant_id, execution_id, with_data=False), has_ended=False)


@router.get("/{ref:path}/history")
async def execution_history(
    ref: str,
    call: Call,
    cursor: Cursor = None,
    limit: Limit = PAGE_LIMIT,
    newest_first: Annotated[bool, Query()] = False,
    data: Annotated[bool, Query(description="With inputs, results and errors.")] = True,
) -> public.ExecutionHistory:
    """Its events as AWS has them, in pages."""
    execution_id = await find_id(call, ref)
    page = await call.services.executions.history(
        call.ctx.tenant_id, execution_id, marker=cursor, limit=limit, newest_first=newest_first, with_data=data
    )
    return public.ExecutionHistory(events=[render.event(one) for one in page.events], next_cursor=page.next_marker)


@router.get("/{ref:path}/operations")
async def execution_operations(ref: str, call: Call, cursor: Cursor = None, limit: Limit = PAGE_LIMIT) -> public.OperationList:
    """All its operations as they are now, in order of their creation, in pages."""
    execution_id = await find_id(call, ref)
    page = await call.services.executions.operations(call.ctx.tenant_id, execution_id, marker=cursor, limit=limit)
    return public.OperationList(operations=[render.operation(one) for one in page.operations], next_cursor=page.next_marker)


@router.post("/{ref:path}/stop")
async def stop_execution(ref: str, call: Call, body: public.StopExecution | None = None) -> public.StoppedExecution:
    """End it now. What an invocation in flight still does counts for nothing. Stopping one that has ended is 409."""
    execution_id = await find_id(call, ref)
    told = body or public.StopExecution()
    error = ErrorObject(error_type=told.error_type, error_message=told.error_message, error_data=told.error_data)
    at = await call.services.executions.stop(call.ctx.tenant_id, execution_id, error if told.model_fields_set else None)
    return public.StoppedExecution(execution_id=execution_id, stopped_at=at)


@router.post("/{ref:path}/pause")
async def pause_execution(ref: str, call: Call, body: public.PauseExecution | None = None) -> public.ExecutionInfo:
    """Invoke it no more until it is resumed. Timers and callbacks go on, and an invocation in flight is told to end."""
    execution_id = await find_id(call, ref)
    told = body or public.PauseExecution()
    await call.services.executions.pause(call.ctx.tenant_id, execution_id, told.reason, timeout_paused=told.timeout_paused)
    return await _shown(call, execution_id)


@router.post("/{ref:path}/resume")
async def resume_execution(ref: str, call: Call, body: public.ResumeExecution | None = None) -> public.ExecutionInfo:
    """Let a paused one go on."""
    execution_id = await find_id(call, ref)
    told = body or public.ResumeExecution()
    code = None if told.code is None else CodeRule(told.code.value)
    await call.services.executions.resume(call.ctx.tenant_id, execution_id, told.reason, code)
    return await _shown(call, execution_id)


@router.post("/{ref:path}/retry")
async def retry_execution(ref: str, call: Call, body: public.RetryExecution | None = None) -> public.RetriedExecution:
    """Resume a paused one; of one that has ended, start another with the same function, input and rules. One that runs is 409."""
    info = await find(call, ref)
    arn = parse_arn(info.durable_execution_arn)
    if info.status in _PAUSED:
        await call.services.executions.resume(call.ctx.tenant_id, arn.id, None)
        return public.RetriedExecution(execution_id=arn.id, arn=str(arn), resumed=True)
    if info.status in _RUNNING:
        raise Conflict(f"Execution {ref!r} is {info.status.value}.", hint="Retry it when it is paused or has ended.")
    begun = await _again(call, arn.id, body.name if body else None)
    return public.RetriedExecution(execution_id=begun.execution_id, arn=begun.arn, resumed=False)


async def _again(call: Bundle, execution_id: str, name: str | None) -> Begun:
    executions, tenant_id = call.services.executions, call.ctx.tenant_id
    info, told = await executions.describe(tenant_id, execution_id), await executions.inspect(tenant_id, execution_id)
    new = NewExecution(
        tenant_id=tenant_id,
        function=parse_arn(info.durable_execution_arn).function,
        input=info.input_payload,
        name=name,
        timeout_s=info.durable_config.execution_timeout if info.durable_config else None,
        code=told.code,
        priority=told.priority,
        key=told.key,
    )
    return await executions.begin(new)


@router.delete("/{ref:path}")
async def delete_execution(ref: str, call: Call) -> public.Done:
    """With its history. One that has not ended is 409: stop it first."""
    await call.services.executions.delete(call.ctx.tenant_id, await find_id(call, ref))
    return public.Done()


@router.get("/{ref:path}")
async def get_execution(ref: str, call: Call) -> public.ExecutionInfo:
    """By id, ARN or name: what it was given, what became of it, and why it will move again."""
    return await _shown(call, await find_id(call, ref))
