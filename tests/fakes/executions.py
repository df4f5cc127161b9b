"""A server of durable executions in memory: histories, the engine, a clock that is told the time, and the wire that boto3 speaks.

Functions are AWS's durable SDK as it is; its boto3 client sends its requests here instead of to a socket, so that every byte it
would send is parsed and every byte it would receive is made by the protocol's own models. Facts go through JSON on their way into
a XX
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import boto3
from botocore.awsrequest import AWSResponse
from botocore.config import Config

from perdure.core.errors import NotFound, PerdureError
from perdure.runs.engine import (
    Answer,
    Checkpoint,
    CodeRule,
    Command,
    CompleteCallback,
    CompleteInvoke,
    Decision,
    Fail,
    Failure,
    Finish,
    Heartbeat,
    Invoke,
    Parent,
    Reason,
    Rules,
    Standing,
    Start,
    StartChild,
    State,
    Tick,
    checkpoint_answer,
    decide,
    events,
    fold,
    invocation_input,
    page,
    require_token,
    standing,
    start,
)
from perdure.runs.protocol import (
    ERROR_TYPE_HEADER,
    CheckpointRequest,
    ErrorObject,
    ExecutionArn,
    ExecutionStatus,
    InvocationOutput,
    Unit,
    event_wire,
    fault_body,
    fault_of,
    parse,
    parse_arn,
    parse_callback_id,
)
from tests.fakes.run_history import Run

Handler = Callable[[Any, Any], Any]


class Killed(BaseException):
    """The process of a worker has died: nothing of it goes on. No SDK catches it."""


@dataclass(slots=True)
class Function:
    """``durable``: it is an SDK's handler; else it takes its payload and returns a value."""

    handler: Handler
    durable: bool = True
    digest: str = "v1"


@dataclass(slots=True)
class Executions:
    now: datetime
    rules: Rules = field(default_factory=Rules)
    runs: dict[str, Run] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    #: Called with (operation, body) of each request, before it is looked at and after it was answered.
    before: Callable[[str, dict[str, Any]], None] = lambda *_: None
    after: Callable[[str, dict[str, Any]], None] = lambda *_: None
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    # --------------------------------------------------------------------------------------------------------------- executions

    def start(
        self,
        function: str,
        event: Any = None,
        *,
        name: str = "",
        timeout_s: int | None = None,
        code: CodeRule = CodeRule.ANY,
        parent: Parent | None = None,
    ) -> str:
        """A new execution's id; ``name`` makes it idempotent."""
        execution_id = name or f"exec-{len(self.runs) + 1}"
        if execution_id in self.runs:
            return execution_id
        arn = str(ExecutionArn("us-east-1", "000000000000", function, execution_id, execution_id))
        command = Start(
            execution_id=execution_id,
            arn=arn,
            name=execution_id,
            function=function,
            secret="secret",
            input=event if isinstance(event, str) else json.dumps(event),
            timeout_s=timeout_s,
            code=code,
            parent=parent,
        )
        decision = start(command, self.now, self.rules)
        self.runs[execution_id] = Run.begun(decision)
        return execution_id

    def do(self, execution_id: str, command: Command) -> Decision:
        """Decide, append, and do what is to be done after it."""
        run = self.runs[execution_id]
        decision = decide(run.state, command, self.now, self.rules)
        run.take(decision)
        for todo in decision.todo:
            match todo:
                case Finish(parent=Parent() as parent):
                    outcome = CompleteInvoke(parent.operation_id, todo.status, todo.result, todo.error, todo.timeout_s)
                    self.do(parent.execution_id, outcome)
                case StartChild():
                    self._start_child(execution_id, todo)
                case _:
                    pass
        return decision

    def _start_child(self, execution_id: str, child: StartChild) -> None:
        function = self.functions.get(child.function)
        if function is None:  # somebody else finishes it
            return
        if function.durable:
            self.start(
                child.function,
                child.payload,
                name=child.key,
                parent=Parent(execution_id=execution_id, operation_id=child.operation_id),
            )
            return
        try:
            outcome = CompleteInvoke(
                child.operation_id, ExecutionStatus.SUCCEEDED, json.dumps(function.handler(json.loads(child.payload), None))
            )
        except ValueError as problem:
            error = ErrorObject(error_type=type(problem).__name__, error_message=str(problem))
            outcome = CompleteInvoke(child.operation_id, ExecutionStatus.FAILED, error=error)
        self.do(execution_id, outcome)

    def check(self, execution_id: str) -> None:
        """The whole history, folded at once, is what it was piece by piece."""
        run = self.runs[execution_id]
        assert fold(run.history) == run.state

    def standing(self, execution_id: str) -> Standing:
        return standing(self.runs[execution_id].state)

    def state(self, execution_id: str) -> State:
        return self.runs[execution_id].state

    def events(self, execution_id: str) -> list[dict[str, Any]]:
        return [event_wire(event) for event in events(self.runs[execution_id].history)]

    # ------------------------------------------------------------------------------------------------------------------- worker

    def run(self, execution_id: str, most: int = 200) -> State:
        """Until it has ended or waits for somebody outside. Time passes as its timers ask."""
        for _ in range(most):
            if not self.step(execution_id):
                return self.state(execution_id)
        raise AssertionError(f"{execution_id} still moves after {most} steps")

    def step(self, execution_id: str) -> bool:
        """Whatever comes next; False when nothing does without somebody outside."""
        now_standing = self.standing(execution_id)
        match now_standing.reason:
            case Reason.INVOKE:
                self.now = max(self.now, now_standing.invoke_at or self.now)
                self.invoke(execution_id)
            case Reason.TIMER:
                assert now_standing.timer_at is not None
                self.now = max(self.now, now_standing.timer_at)
                self.do(execution_id, Tick())
            case Reason.WORLD if child := self._child_of(execution_id):
                return self.step(child)
            case _:
                return False
        return True

    def _child_of(self, execution_id: str) -> str | None:
        children = (
            child.state.id
            for child in self.runs.values()
            if child.state.started.parent and child.state.started.parent.execution_id == execution_id
        )
        return next((child for child in children if not self.state(child).has_ended), None)

    def invoke(self, execution_id: str) -> None:
        """One invocation, to its end."""
        run = self.runs[execution_id]
        function = self.functions[run.state.started.function]
        decision = self.do(execution_id, Invoke(request_id=f"request-{run.state.invocations + 1}", digest=function.digest))
        assert decision.reply is not None
        number = decision.state.invocations
        event = json.loads(json.dumps(invocation_input(decision.state, decision.reply, self.rules).wire(Unit.MILLISECONDS)))
        try:
            output = json.dumps(function.handler(event, LAMBDA_CONTEXT))
        except Killed:
            self.do(execution_id, Fail(number, Failure.LOST))
            return
        except Exception as problem:
            error = ErrorObject(error_type=type(problem).__name__, error_message=str(problem))
            self.do(execution_id, Fail(number, Failure.RAISED, error))
            return
        try:
            answer = parse(InvocationOutput, output.encode())
        except PerdureError as problem:
            error = ErrorObject(error_type="InvalidParameterValueException", error_message=problem.message)
            self.do(execution_id, Fail(number, Failure.INVALID, error))
            return
        self.do(execution_id, Answer(number, answer))

    # --------------------------------------------------------------------------------------------------------------------- wire

    def client(self) -> Any:
        """A real boto3 client of Lambda, whose requests end here."""
        client = _session().client(
            "lambda",
            region_name="us-east-1",
            aws_access_key_id="AKIDEXAMPLE",
            aws_secret_access_key="secret",
            config=Config(retries={"mode": "standard", "max_attempts": 3}),
        )

        def send(request: Any, **_: Any) -> Any:
            status, headers, body = self.answer(request.method, request.url, request.body or b"")
            return AWSResponse(request.url, status, headers, _Raw(body))

        client.meta.events.register("before-send.lambda", send)
        return client

    def answer(self, method: str, url: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request. Paths are split before they are decoded, since an ARN has slashes."""
        parts = urlsplit(url)
        _, _, kind, name, verb = parts.path.split("/")
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        told = {**query, **(json.loads(body) if body and verb == "checkpoint" else {})}
        self.requests.append((verb, told))
        self.before(verb, told)
        try:
            if kind == "durable-execution-callbacks":
                answer = self._callback(unquote(name), verb, body)
            else:
                answer = self._execution(parse_arn(unquote(name)).id, verb, body, query)
        except PerdureError as error:
            fault = fault_of(error)
            return fault.status, {ERROR_TYPE_HEADER: fault.name}, json.dumps(fault_body(error)).encode()
        self.after(verb, told)
        return 200, {"content-type": "application/json"}, json.dumps(answer).encode()

    def _execution(self, execution_id: str, verb: str, body: bytes, query: Mapping[str, str]) -> dict[str, Any]:
        if execution_id not in self.runs:
            raise NotFound("There is no such execution.")
        if verb == "state":
            state = self.state(execution_id)
            require_token(state, query["CheckpointToken"])
            return page(state, query.get("Marker"), self.rules, int(query.get("MaxItems", "100"))).wire()
        request = parse(CheckpointRequest, body)
        updates = request.updates or ()
        names = {update.chained_invoke_options.function_name for update in updates if update.chained_invoke_options}
        missing = ErrorObject(error_type="ResourceNotFoundException", error_message="Function not found")
        refused = {name: missing for name in names - self.functions.keys()}
        decision = self.do(execution_id, Checkpoint(request.checkpoint_token, updates, request.client_token, refused))
        assert decision.reply is not None
        return checkpoint_answer(decision.reply).wire()

    def _callback(self, callback_id: str, verb: str, body: bytes) -> dict[str, Any]:
        execution_id = parse_callback_id(callback_id).execution_id
        if execution_id not in self.runs:
            raise NotFound("There is no such callback.")
        match verb:
            case "succeed":
                self.do(execution_id, CompleteCallback(callback_id, body.decode()))
            case "fail":
                self.do(execution_id, CompleteCallback(callback_id, error=parse(ErrorObject, body)))
            case "heartbeat":
                self.do(execution_id, Heartbeat(callback_id))
        return {}


@cache
def _session() -> Any:
    """One for all tests: it keeps what it has read of the service's model."""
    return boto3.Session()


class _Raw(io.BytesIO):
    def stream(self, *_: Any, **__: Any) -> Any:
        yield self.read()


#: What the SDKs read of Lambda's context.
LAMBDA_CONTEXT = SimpleNamespace(
    aws_request_id="request",
    function_name="function",
    function_version="$LATEST",
    invoked_function_arn="arn:aws:lambda:us-east-1:000000000000:function:function",
    memory_limit_in_mb="128",
    log_group_name="group",
    log_stream_name="stream",
    client_context=None,
    identity=None,
    tenant_id=None,
    get_remaining_time_in_millis=lambda: 600_000,
)
