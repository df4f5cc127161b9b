"""Invoke: a function's execution begins, and whoever calls may wait for its end."""

from __future__ import annotations

import json
import re
from enum import StrEnum

from starlette.responses import Response

from perdure.api.aws.calls import AwsCall
from perdure.api.aws.faults import JSON, respond
from perdure.api.waiting import while_asked
from perdure.core.errors import InvalidRequest, NotFound, Unavailable
from perdure.runs.protocol import ErrorObject, ExecutionInfo, ExecutionStatus
from perdure.runs.service.model import NewExecution

NAME_HEADER = "x-amz-durable-execution-name"
ARN_HEADER = "X-Amz-Durable-Execution-Arn"
#: One call of an AWS SDK has one, however often it is sent.
SDK_CALL_HEADER = "amz-sdk-invocation-id"
_SDK_CALL = re.compile(r"[0-9a-fA-F-]{36}")
#: How long the service is asked to wait at a time, in seconds.
WAIT_S = 60.0


class InvocationType(StrEnum):
    EVENT = "Event"
    REQUEST_RESPONSE = "RequestResponse"
    DRY_RUN = "DryRun"


async def invoke(call: AwsCall) -> Response:
    """A call that is sent again by an SDK, because its answer was lost, finds the execution that it has begun."""
    headers, function, kind = call.request.headers, call.function(), _kind(call)
    if headers.get("x-amz-tenant-id"):
        raise InvalidRequest("TenantId is not served: the tenant is that of the caller's key.", hint="Leave TenantId out.")
    payload = _payload(await call.request.body())
    if kind is InvocationType.DRY_RUN:
        if function not in {one.spec.name for one in await call.executions.functions(call.tenant_id)}:
            raise NotFound(f"There is no function {function!r}.", hint="Start a worker that serves it: perdure worker.")
        return Response(status_code=204)
    sdk_call = headers.get(SDK_CALL_HEADER, "")
    name = headers.get(NAME_HEADER) or (sdk_call if _SDK_CALL.fullmatch(sdk_call) else None)
    begun = await call.executions.begin(NewExecution(call.tenant_id, function, payload, name))
    call.bundle.about(begun.execution_id)
    told = {ARN_HEADER: begun.arn, "X-Amz-Executed-Version": "$LATEST"}
    if kind is InvocationType.EVENT:
        return Response(status_code=202, headers=told)
    info = await while_asked(_end(call, begun.execution_id), call.request.receive, call.bundle.closing)
    if info is None:
        stopping = Unavailable("The server stops; the execution goes on.", hint="Ask again under the same name.")
        raise call.bundle.closing.reason(stopping)
    return _result(info, told)


def _kind(call: AwsCall) -> InvocationType:
    given = call.request.headers.get("x-amz-invocation-type") or InvocationType.REQUEST_RESPONSE
    try:
        return InvocationType(given)
    except ValueError:
        raise InvalidRequest(f"There is no invocation type {given!r}.", hint=f"It can be {', '.join(InvocationType)}.") from None


def _payload(body: bytes) -> str:
    """An input is JSON; without one it is an empty object."""
    try:
        text = body.decode() or "{}"
        json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest("The payload is not JSON.", hint="Encode it, such as json.dumps(value).") from None
    return text


async def _end(call: AwsCall, execution_id: str) -> ExecutionInfo:
    while True:
        info = await call.executions.ended(call.tenant_id, execution_id, WAIT_S)
        if info is not None:
            return info


def _result(info: ExecutionInfo, headers: dict[str, str]) -> Response:
    """As Lambda tells a function's result, or its failure: that is no error of the call."""
    if info.status is ExecutionStatus.SUCCEEDED:
        return Response(info.result or "null", 200, headers, JSON)
    error = info.error or ErrorObject()
    told = {
        "errorType": error.error_type or f"Execution.{info.status.value}",
        "errorMessage": error.error_message,
        "errorData": error.error_data,
        "stackTrace": error.stack_trace,
    }
    body = {name: value for name, value in told.items() if value is not None}
    return respond(body, 200, {**headers, "X-Amz-Function-Error": "Unhandled"})
