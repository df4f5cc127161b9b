"""What the SDK says about durable executions, and how it judges what comes back, without any I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict
from urllib.parse import quote

from perdure.core.errors import InvalidRequest, PerdureError, RateLimited
from perdure.sdk import _core
from perdure.sdk._core import Call
from perdure.sdk.errors import ExecutionFailed, ExecutionRunning, ExecutionStopped, ExecutionTimedOut
from perdure.wire import public

#: How long the server is asked to wait at a time for an execution's end.
WAIT_S = 20.0
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_PASSING = frozenset({"unavailable", "server_unreachable", "connection_lost", "busy"})
_ENDS: Mapping[public.ExecutionStatus, type[ExecutionFailed]] = {
    public.ExecutionStatus.TIMED_OUT: ExecutionTimedOut,
    public.ExecutionStatus.STOPPED: ExecutionStopped,
}


class StartOptions(TypedDict, total=False):
    """Of ``executions.start``."""

    name: str  # makes it idempotent: the same name and input are the same execution
    timeout_s: int  # of the whole execution; left out: none
    priority: int  # higher ones are invoked first
    key: str  # executions with the same one run one after the other
    code: str  # any, or exact: only by a worker with the code that it began with


class ExecutionFilters(TypedDict, total=False):
    """Of ``executions.list``: all of what is given must hold. Times are aware."""

    function: str
    status: str | Sequence[str]  # in any of these
    name: str
    started_after: datetime
    started_before: datetime
    oldest_first: bool


def execution_path(ref: str, *rest: str) -> str:
    """``/v1/executions/REF/…``; a reference is an id, a name or an ARN."""
    if not (_NAME.fullmatch(ref) or ref.startswith("arn:")):
        raise InvalidRequest(
            f"{ref!r} is not an execution's id, name or ARN.", hint="List executions with 'perdure execution ls'."
        )
    return "/".join(["/v1/executions", quote(ref, safe=""), *rest])


def callback_path(callback_id: str, verb: str) -> str:
    if not callback_id or callback_id in {".", ".."}:
        raise InvalidRequest(f"{callback_id!r} is not a callback's id.", hint="List them with 'perdure callback ls'.")
    return f"/v1/callbacks/{quote(callback_id, safe='')}/{verb}"


def start(function: str, given: Any, options: StartOptions) -> Call:
    """The start of an execution. Without a name it gets one, so that it can be repeated when its answer is lost."""
    values: dict[str, Any] = {"name": _core.request_key(), **options, "function": function}
    if given is not None:
        values["input"] = json_value(given, "input")
    body = _core.checked(public.StartExecution, **values).model_dump(mode="json", exclude_unset=True)
    return _core.post("/v1/executions", body, keyed="name" not in options, repeatable=True)


def find(filters: ExecutionFilters) -> Call:
    asked: dict[str, Any] = dict(filters)
    statuses = asked.pop("status", ())
    for name in ("started_after", "started_before"):
        asked[name] = _core.instant(asked.get(name))
    call = _core.get("/v1/executions", **asked, limit=_core.PAGE)
    named = [statuses] if isinstance(statuses, str) else statuses
    return Call("GET", call.path, (*call.query, *(("status", str(one)) for one in named)), repeatable=True)


def body_of(kind: type[public.Body], values: Mapping[str, Any]) -> dict[str, Any]:
    """A request's body of those that are given."""
    given = {name: value for name, value in values.items() if value is not None}
    made: dict[str, Any] = _core.checked(kind, **given).model_dump(mode="json", exclude_unset=True)
    return made


def json_value(value: Any, what: str) -> Any:
    """What can travel as JSON. Raises InvalidRequest."""
    try:
        return json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"The {what} is not JSON: {error}.", hint="Give plain values, lists and dictionaries.") from None


class Waiter:
    """Waits for the end of one execution, which a server has told of: across its being started again."""

    def __init__(self, ref: str, timeout_s: float | None, now_s: float) -> None:
        self._ref = ref
        self._timeout_s = timeout_s
        self._until_s = None if timeout_s is None else now_s + timeout_s
        self._breaks = 0

    def next_wait_s(self, now_s: float) -> float:
        left_s = WAIT_S if self._until_s is None else min(WAIT_S, self._until_s - now_s)
        return round(max(0.0, left_s), 3)

    def next_call(self, wait_s: float) -> Call:
        return _core.get(execution_path(self._ref, "result"), wait_s=wait_s)

    def feed(self, outcome: public.ExecutionOutcome, now_s: float) -> bool:
        """Whether it has ended. Raises ExecutionRunning when there is no more time."""
        self._breaks = 0
        if not outcome.ended and self._until_s is not None and now_s >= self._until_s:
            raise ExecutionRunning(
                f"Execution {self._ref} is {outcome.status.value} after {self._timeout_s:g} s; it goes on.",
                hint="Wait for it again, or see what it waits for: perdure execution show.",
                execution_id=outcome.execution_id,
            )
        return outcome.ended

    def broke(self, error: PerdureError, now_s: float) -> float:
        """Seconds to wait before it is asked for again; raises ``error`` when that is pointless."""
        self._breaks += 1
        passes = error.code in _PASSING or isinstance(error, RateLimited)
        is_late = self._until_s is not None and now_s >= self._until_s
        if not passes or is_late or self._breaks > _core.RECONNECTS:
            raise error
        return _core.welcome_s(error) if isinstance(error, RateLimited) else _core.delay_s(self._breaks)


def result_of(outcome: public.ExecutionOutcome) -> Any:
    """What it returned. Raises ExecutionFailed, with what the function raised."""
    if outcome.status is public.ExecutionStatus.SUCCEEDED:
        return outcome.result
    told = outcome.error or public.FunctionFailure()
    kind = _ENDS.get(outcome.status, ExecutionFailed)
    what = ": ".join(part for part in (told.type, told.message) if part)
    error = kind(f"Execution {outcome.execution_id} {kind.verb}{': ' + what.rstrip('.') if what else ''}.")
    error.execution_id = outcome.execution_id
    error.error_type, error.error_message, error.error_data = told.type, told.message, told.data
    error.stack_trace = told.stack_trace or ()
    raise error
