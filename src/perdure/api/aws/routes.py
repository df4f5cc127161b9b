"""AWS's operations as routes. They are found by the path as it came, split before it is decoded: a framework that decodes first
takes an ARN for four parts of a path."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs, unquote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from perdure.api.aws import executions, faults, invoke, tasks
from perdure.api.aws.calls import AwsCall
from perdure.api.aws.paths import segments, task_target
from perdure.api.deps import admit, bundle
from perdure.api.trail import trail_of
from perdure.core.errors import PerdureError

log = logging.getLogger(__name__)
Endpoint = Callable[[AwsCall], Awaitable[Response]]


class AwsRoute(BaseRoute):
    """One operation. ``name`` is what policy, log, counts and audit call it; ``operation`` what AWS does."""

    def __init__(self, operation: str, name: str, request: str, endpoint: Endpoint) -> None:
        self.operation = operation
        self.name = name
        self.method, self.path = request.split(" ")
        self._template = self.path.split("/")[1:]
        self._endpoint = endpoint

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http":
            return Match.NONE, {}
        parts = segments(scope["raw_path"])
        pairs = list(zip(self._template, parts, strict=False))
        if len(parts) != len(self._template) or any(part != given for part, given in pairs if not part.startswith("{")):
            return Match.NONE, {}
        found = {part.strip("{}"): unquote(given) for part, given in pairs if part.startswith("{")}
        kind = Match.FULL if scope["method"] == self.method else Match.PARTIAL
        return kind, {"path_params": found, "route": self, "endpoint": self._endpoint}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != self.method:
            raise HTTPException(405)
        request = Request(scope, receive)
        try:
            await admit(request)
            query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            response = await self._endpoint(AwsCall(request, bundle(request), request.path_params, query))
        except PerdureError as error:
            if error.internal:
                log.warning("%s: %s (%s)", error.code, error.message, error.internal)
            if (trail := trail_of(request)) is not None:
                trail.failed(error.code)
            response = faults.answer(error, scope)
        await response(scope, receive, send)


class TaskRoute(AwsRoute):
    """Step Functions' operations have one path, and are told apart by a header."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http" or task_target(scope) is None:
            return Match.NONE, {}
        return Match.FULL, {"path_params": {}, "route": self, "endpoint": self._endpoint}


_EXECUTION = "/2025-12-01/durable-executions/{arn}"
_CALLBACK = "/2025-12-01/durable-execution-callbacks/{callback}"


def routes() -> tuple[AwsRoute, ...]:
    """By the operations' names in botocore's models, of which method and path are too."""
    table: tuple[tuple[str, str, str, Any], ...] = (
        ("Invoke", "aws_invoke", "POST /2015-03-31/functions/{function}/invocations", invoke.invoke),
        ("CheckpointDurableExecution", "aws_checkpoint", f"POST {_EXECUTION}/checkpoint", executions.checkpoint),
        ("GetDurableExecutionState", "aws_state", f"GET {_EXECUTION}/state", executions.state),
        ("GetDurableExecution", "aws_describe", f"GET {_EXECUTION}", executions.describe),
        ("GetDurableExecutionHistory", "aws_history", f"GET {_EXECUTION}/history", executions.history),
        ("StopDurableExecution", "aws_stop", f"POST {_EXECUTION}/stop", executions.stop),
        ("PauseDurableExecution", "aws_pause", f"POST {_EXECUTION}/pause", executions.pause),
        ("ResumeDurableExecution", "aws_resume", f"POST {_EXECUTION}/resume", executions.resume),
        ("DeleteDurableExecution", "aws_delete", f"DELETE {_EXECUTION}", executions.delete),
        (
            "ListDurableExecutionsByFunction",
            "aws_list",
            "GET /2025-12-01/functions/{function}/durable-executions",
            executions.find,
        ),
        ("SendDurableExecutionCallbackSuccess", "aws_succeed", f"POST {_CALLBACK}/succeed", executions.succeed),
        ("SendDurableExecutionCallbackFailure", "aws_fail", f"POST {_CALLBACK}/fail", executions.fail),
        ("SendDurableExecutionCallbackHeartbeat", "aws_heartbeat", f"POST {_CALLBACK}/heartbeat", executions.heartbeat),
    )
    return (*(AwsRoute(*row) for row in table), TaskRoute("SendTask*", "aws_task", "POST /", tasks.send_task))
