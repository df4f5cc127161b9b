"""An execution's history as AWS's events, for GetDurableExecutionHistory. Pure: a rendering of facts, decided by nobody."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType

from perdure.runs.engine import facts
from perdure.runs.engine.facts import Entry, Recorded
from perdure.runs.protocol import (
    Action,
    Details,
    ErrorObject,
    Event,
    EventError,
    EventText,
    EventType,
    OperationStatus,
    OperationType,
    RetryDetails,
)


@dataclass(slots=True)
class _Known:
    """What an event says of its operation beside its own fact."""

    record: Recorded
    attempt: int = 0


@dataclass(slots=True)
class _Reader:
    with_data: bool
    children: Mapping[str, str]
    operations: dict[str, _Known] = field(default_factory=dict)
    invoked: facts.Invoked | None = None
    invoked_at: datetime | None = None

    def text(self, payload: str | None) -> EventText:
        return EventText(payload=payload) if self.with_data else EventText(truncated=payload is not None)

    def error(self, error: ErrorObject | None) -> EventError:
        return EventError(payload=error or ErrorObject()) if self.with_data else EventError(truncated=error is not None)


Found = tuple[EventType, Details, Recorded | None]
_KINDS = {
    OperationType.CONTEXT: "Context",
    OperationType.STEP: "Step",
    OperationType.WAIT: "Wait",
    OperationType.CALLBACK: "Callback",
    OperationType.CHAINED_INVOKE: "ChainedInvoke",
}
_ENDS = {
    OperationStatus.SUCCEEDED: "Succeeded",
    OperationStatus.FAILED: "Failed",
    OperationStatus.TIMED_OUT: "TimedOut",
    OperationStatus.STOPPED: "Stopped",
}


def events(
    history: Iterable[Entry], *, with_data: bool = True, children: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Event]:
    """All events of an execution in order. Event ids count from 1; some facts are no event, a batch is several.

    ``children``: the ARNs of the executions that chained invokes have started, by operation; the history does not know them."""
    reader = _Reader(with_data, children)
    number = 0
    for entry in history:
        for kind, details, record in _read(reader, entry):
            number += 1
            update = record.update if record else None
            yield Event(
                event_type=kind,
                event_id=number,
                event_timestamp=entry.at,
                details=details,
                id=update.id if update else None,
                parent_id=update.parent_id if update else None,
                name=update.name if update else None,
                sub_type=update.sub_type if update else None,
            )


def _read(reader: _Reader, entry: Entry) -> Iterator[Found]:
    match entry.fact:
        case facts.Invoked() as fact:
            reader.invoked, reader.invoked_at = fact, entry.at
        case facts.Checkpointed() as fact:
            for record in fact.records:
                yield from _recorded(reader, record)
        case facts.Fired() as fact:
            for firing in fact.firings:
                yield from _fired(reader, firing)
        case facts.Completed() as fact:
            known = reader.operations[fact.operation_id].record
            kind = EventType(f"{_KINDS[known.update.type]}{_ENDS[fact.status]}")
            yield kind, _outcome(reader, fact.status, fact.result, fact.error), known
        case facts.Answered() | facts.Failed() as fact:
            yield EventType.INVOCATION_COMPLETED, _invocation(reader, entry.at, fact), None
        case _:
            yield from _of_execution(reader, entry)


def _of_execution(reader: _Reader, entry: Entry) -> Iterator[Found]:
    match entry.fact:
        case facts.Started() as fact:
            yield EventType.EXECUTION_STARTED, Details(input=reader.text(fact.input), execution_timeout=fact.timeout_s), None
        case facts.Paused() as fact:
            details = Details(
                pause_request_timestamp=entry.at,
                execution_timeout_paused=fact.timeout_paused,
                reason=reader.text(fact.reason),
            )
            yield EventType.EXECUTION_PAUSED, details, None
        case facts.Resumed() as fact:
            details = Details(resume_request_timestamp=entry.at, reason=reader.text(fact.reason))
            yield EventType.EXECUTION_RESUMED, details, None
        case facts.Ended() as fact:
            status = OperationStatus(fact.status.value)
            yield EventType(f"Execution{_ENDS[status]}"), _outcome(reader, status, fact.result, fact.error), None
        case _:
            pass


def _outcome(reader: _Reader, status: OperationStatus, result: str | None, error: ErrorObject | None) -> Details:
    if status is OperationStatus.SUCCEEDED:
        return Details(result=reader.text(result))
    return Details(error=reader.error(error))


def _invocation(reader: _Reader, at: datetime, fact: facts.Answered | facts.Failed) -> Details:
    invoked = reader.invoked
    return Details(
        start_timestamp=reader.invoked_at,
        end_timestamp=at,
        request_id=invoked.request_id if invoked else None,
        error=reader.error(fact.error) if isinstance(fact, facts.Failed) else None,
    )


def _recorded(reader: _Reader, record: Recorded) -> Iterator[Found]:
    update = record.update
    if update.type is OperationType.EXECUTION:  # the fact of its end follows
        return
    known = reader.operations.setdefault(update.id, _Known(record))
    if update.action is Action.START:
        known.record = record
        yield EventType(f"{_KINDS[update.type]}Started"), _start_details(reader, record), record
        if record.refused is not None:
            yield EventType.CHAINED_INVOKE_FAILED, Details(error=reader.error(record.refused)), record
        return
    if update.action is Action.CANCEL:
        yield EventType.WAIT_CANCELLED, Details(), known.record
        return
    # A retry with an error is a failed attempt; one without is a poll that found its condition not met yet.
    has_failed = update.action is Action.FAIL or (update.action is Action.RETRY and update.error is not None)
    status = OperationStatus.FAILED if has_failed else OperationStatus.SUCCEEDED
    details = _outcome(reader, status, update.payload, update.error)
    if update.type is OperationType.STEP:
        known.attempt += 1
        delay = update.step_options.next_attempt_delay_seconds if update.step_options and update.action is Action.RETRY else None
        retry = RetryDetails(current_attempt=known.attempt, next_attempt_delay_seconds=delay)
        details = details.model_copy(update={"retry_details": retry})
    yield EventType(f"{_KINDS[update.type]}{_ENDS[status]}"), details, known.record


def _start_details(reader: _Reader, record: Recorded) -> Details:
    update = record.update
    match update.type:
        case OperationType.WAIT:
            return Details(duration=_wait_s(record), scheduled_end_timestamp=record.due)
        case OperationType.CALLBACK:
            options = update.callback_options
            return Details(
                callback_id=record.callback_id,
                timeout=options.timeout_seconds or None if options else None,
                heartbeat_timeout=options.heartbeat_timeout_seconds or None if options else None,
            )
        case OperationType.CHAINED_INVOKE:
            options_ = update.chained_invoke_options
            return Details(
                function_name=options_.function_name if options_ else None,
                tenant_id=options_.tenant_id if options_ else None,
                input=reader.text(update.payload),
                durable_execution_arn=reader.children.get(update.id),
                executed_version="$LATEST" if update.id in reader.children else None,
            )
        case _:
            return Details()


def _wait_s(record: Recorded) -> int:
    return record.update.wait_options.wait_seconds if record.update.wait_options else 1


def _fired(reader: _Reader, firing: facts.Firing) -> Iterator[Found]:
    record = reader.operations[firing.operation_id].record
    match record.update.type:
        case OperationType.WAIT:
            yield EventType.WAIT_SUCCEEDED, Details(duration=_wait_s(record)), record
        case OperationType.CALLBACK:
            yield EventType.CALLBACK_TIMED_OUT, Details(error=reader.error(firing.error)), record
        case _:  # a step may begin its next attempt: it says so itself
            pass
