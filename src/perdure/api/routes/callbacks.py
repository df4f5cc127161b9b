"""Open callbacks of durable executions: what waits for somebody outside, and how it is completed."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from perdure.api import render_runs as render
from perdure.api.deps import Bundle, Call
from perdure.api.routes.executions import find_id, is_name
from perdure.runs.protocol import ErrorObject, parse_callback_id
from perdure.wire import public

router = APIRouter(prefix="/callbacks", tags=["executions"])


@router.get("")
async def list_callbacks(
    call: Call, execution: Annotated[str | None, Query(description="Only those of this one, by id, ARN or name.")] = None
) -> public.CallbackList:
    """Those that may still be completed, oldest first."""
    execution_id = None if execution is None else await find_id(call, execution)
    found = await call.services.executions.callbacks(call.ctx.tenant_id, execution_id)
    return public.CallbackList(callbacks=[render.callback(one) for one in found])


@router.post("/{callback_id:path}/succeed")
async def succeed_callback(callback_id: str, call: Call, body: public.SucceedCallback | None = None) -> public.Done:
    """Complete it with a result. One that was completed before, or has timed out, is 409."""
    has_result = body is not None and "result" in body.model_fields_set
    await _complete(call, callback_id, render.payload(body.result) if body is not None and has_result else None)
    return public.Done()


@router.post("/{callback_id:path}/fail")
async def fail_callback(callback_id: str, call: Call, body: public.FailCallback | None = None) -> public.Done:
    """Complete it with an error, which its function sees."""
    told = body or public.FailCallback()
    error = ErrorObject(
        error_type=told.error_type,
        error_message=told.error_message,
        error_data=told.error_data,
        stack_trace=None if told.stack_trace is None else tuple(told.stack_trace),
    )
    await _complete(call, callback_id, None, error)
    return public.Done()


async def _complete(call: Bundle, callback_id: str, result: str | None, error: ErrorObject | None = None) -> None:
    _about(call, callback_id)
    await call.services.executions.complete_callback(call.ctx.tenant_id, callback_id, result, error)


@router.post("/{callback_id:path}/heartbeat")
async def beat_callback(callback_id: str, call: Call) -> public.Done:
    """Say that somebody still works on it: its heartbeat's timeout begins anew."""
    _about(call, callback_id)
    await call.services.executions.heartbeat(call.ctx.tenant_id, callback_id)
    return public.Done()


def _about(call: Bundle, callback_id: str) -> None:
    """The audit names the execution and the operation, where the id is one of ours."""
    name = parse_callback_id(callback_id)
    if is_name(name.execution_id) and is_name(name.operation_id):
        call.about(f"{name.execution_id}/{name.operation_id}")
