"""Durable executions as AWS's clients and SDKs ask for them."""

from __future__ import annotations

from starlette.responses import Response

from perdure.api.aws.calls import AwsCall
from perdure.api.aws.faults import respond
from perdure.core.errors import ExecutionEnded, InvalidRequest, NotFound
from perdure.runs.protocol import (
    CheckpointRequest,
    DeleteAnswer,
    ErrorObject,
    ExecutionPage,
    ExecutionStatus,
    PauseRequest,
    ResumeRequest,
    StopAnswer,
    Wire,
    event_wire,
)
from perdure.runs.service.model import ListQuery


def _told(answer: Wire, status: int = 200) -> Response:
    return respond(answer.wire(), status)


# --------------------------------------------------------------------------------------------------------- from the function


async def checkpoint(call: AwsCall) -> Response:
    request = await call.body(CheckpointRequest)
    return _told(await call.executions.checkpoint(call.tenant_id, call.execution_id, request))


async def state(call: AwsCall) -> Response:
    token = call.text("CheckpointToken")
    if token is None:
        raise InvalidRequest("CheckpointToken is missing.")
    limit, marker = call.items(), call.text("Marker")
    return _told(await call.executions.state(call.tenant_id, call.execution_id, token, marker, limit))


# ---------------------------------------------------------------------------------------------------------- from the outside


async def describe(call: AwsCall) -> Response:
    with_data = call.flag("IncludeExecutionData", default=True)
    return _told(await call.executions.describe(call.tenant_id, call.execution_id, with_data=with_data))


async def history(call: AwsCall) -> Response:
    page = await call.executions.history(
        call.tenant_id,
        call.execution_id,
        marker=call.text("Marker"),
        limit=call.items(),
        newest_first=call.flag("ReverseOrder", default=False),
        with_data=call.flag("IncludeExecutionData", default=True),
    )
    told = {"Events": [event_wire(event) for event in page.events]}
    return respond(told if page.next_marker is None else {**told, "NextMarker": page.next_marker})


async def find(call: AwsCall) -> Response:
    function = call.function()
    try:
        statuses = tuple(ExecutionStatus(one) for one in call.query.get("Statuses", ()))
    except ValueError as error:
        raise InvalidRequest(f"Statuses: {error}.", hint=f"They can be {', '.join(ExecutionStatus)}.") from None
    query = ListQuery(
        function=function,
        statuses=statuses,
        name=call.text("DurableExecutionName"),
        started_after=call.instant("StartedAfter"),
        started_before=call.instant("StartedBefore"),
        oldest_first=call.flag("ReverseOrder", default=False),
        marker=call.text("Marker"),
        limit=call.items(),
    )
    found = await call.executions.find(call.tenant_id, query)
    if not found.executions and function not in {one.spec.name for one in await call.executions.functions(call.tenant_id)}:
        raise NotFound(f"There is no function {function!r}.", hint="Start a worker that serves it: perdure worker.")
    return _told(ExecutionPage(durable_executions=found.executions, next_marker=found.next_marker))


async def stop(call: AwsCall) -> Response:
    """One that is stopped already says when it was: the first answer may have been lost."""
    execution_id = call.execution_id
    error = await call.body(ErrorObject)  # empty, where a client gives none
    try:
        at = await call.executions.stop(call.tenant_id, execution_id, None if error == ErrorObject() else error)
    except ExecutionEnded:
        info = await call.executions.describe(call.tenant_id, execution_id, with_data=False)
        if info.status is not ExecutionStatus.STOPPED or info.end_timestamp is None:
            raise
        at = info.end_timestamp
    return _told(StopAnswer(stop_timestamp=at))


async def pause(call: AwsCall) -> Response:
    asked = await call.body(PauseRequest)
    timeout_paused = asked.execution_timeout_paused is not False
    await call.executions.pause(call.tenant_id, call.execution_id, asked.reason, timeout_paused=timeout_paused)
    return respond({}, 202)


async def resume(call: AwsCall) -> Response:
    asked = await call.body(ResumeRequest)
    await call.executions.resume(call.tenant_id, call.execution_id, asked.reason)
    return respond({}, 202)


async def delete(call: AwsCall) -> Response:
    at = await call.executions.delete(call.tenant_id, call.execution_id)
    return _told(DeleteAnswer(deletion_request_timestamp=at), 202)


# ----------------------------------------------------------------------------------------------------------------- callbacks


async def succeed(call: AwsCall) -> Response:
    body = await call.request.body()
    try:
        result = body.decode() if body else None
    except UnicodeDecodeError:
        raise InvalidRequest("The result is not UTF-8.", hint="Encode bytes, such as in base64.") from None
    await call.executions.complete_callback(call.tenant_id, call.path["callback"], result)
    return respond({})


async def fail(call: AwsCall) -> Response:
    error = await call.body(ErrorObject)
    await call.executions.complete_callback(call.tenant_id, call.path["callback"], None, error)
    return respond({})


async def heartbeat(call: AwsCall) -> Response:
    await call.executions.heartbeat(call.tenant_id, call.path["callback"])
    return respond({})
