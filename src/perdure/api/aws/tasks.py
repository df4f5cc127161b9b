"""Step Functions' task tokens: whoever approves or works with those completes callbacks, whose ids are their tokens."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from perdure.api.aws.calls import AwsCall
from perdure.api.aws.faults import TASK_JSON, BadOutput, BadToken, UnknownOperation, respond
from perdure.api.aws.paths import task_target
from perdure.core.errors import InvalidRequest, NotFound
from perdure.runs.protocol import ErrorObject, parse_callback_id

OPERATIONS = ("SendTaskSuccess", "SendTaskFailure", "SendTaskHeartbeat")
_Token = Annotated[str, Field(min_length=1, max_length=2048, alias="taskToken")]


class _Task(BaseModel):
    """The body of any of the three; each has some of the members."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    token: _Token
    output: str | None = None
    error: Annotated[str, Field(max_length=256)] | None = None
    cause: Annotated[str, Field(max_length=32_768)] | None = None


async def send_task(call: AwsCall) -> Response:
    operation = task_target(call.request.scope)
    if operation not in OPERATIONS:
        hint = f"{', '.join(OPERATIONS)} are."
        raise UnknownOperation(f"{operation!r} of Step Functions is not served here.", hint=hint)
    task = _parse(await call.request.body())
    try:
        parse_callback_id(task.token)
    except NotFound as error:
        raise BadToken("This is no task token.", hint=error.hint) from None
    if operation == "SendTaskHeartbeat":
        await call.executions.heartbeat(call.tenant_id, task.token)
    elif operation == "SendTaskSuccess":
        await call.executions.complete_callback(call.tenant_id, task.token, _output(task))
    else:
        told = ErrorObject(error_type=task.error, error_message=task.cause)
        await call.executions.complete_callback(call.tenant_id, task.token, None, told)
    return respond({}, media_type=TASK_JSON)


def _parse(body: bytes) -> _Task:
    try:
        return _Task.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the body"
        raise InvalidRequest(f"{place}: {first['msg']}.") from None


def _output(task: _Task) -> str:
    if task.output is None:
        raise InvalidRequest("output: Field required.")
    try:
        json.loads(task.output)
    except (ValueError, RecursionError):
        raise BadOutput("The output is not JSON.", hint="Encode it, such as json.dumps(value).") from None
    return task.output
