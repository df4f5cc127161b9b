"""What is asked of executions from outside: start, look, stop, pause, callbacks."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter, ValidationError

from perdure.core.clock import Clock, epoch_ms
from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import AlreadyExists, InvalidRequest, NotFound
from perdure.core.ids import TenantId, mint
from perdure.db.database import Database
from perdure.runs.engine import (
    FACT,
    CodeRule,
    Command,
    CompleteCallback,
    Decision,
    Delete,
    Entry,
    Heartbeat,
    Op,
    Parent,
    Pause,
    Resume,
    Start,
    Stop,
    description,
    events,
    operation,
    standing,
    start,
)
from perdure.runs.protocol import (
    ErrorObject,
    Event,
    ExecutionArn,
    ExecutionInfo,
    ExecutionName,
    ExecutionStatus,
    ExecutionSummary,
    ExecutionTimeout,
    OperationPage,
    marker_of,
    parse_arn,
    parse_callback_id,
    parse_function,
    parse_marker,
)
from perdure.runs.service.actors import actor
from perdure.runs.service.deciding import Decider
from perdure.runs.service.model import Begun, EventPage, Found, Insight, ListQuery, NewExecution, OpenCallback
from perdure.runs.service.names import REGION, account_of
from perdure.runs.service.news import work
from perdure.runs.service.rows import Place, beginning, digest_of
from perdure.runs.service.signals import Signals

_NAME: TypeAdapter[str] = TypeAdapter(ExecutionName)
_TIMEOUT: TypeAdapter[int] = TypeAdapter(ExecutionTimeout)
_OP: TypeAdapter[Op] = TypeAdapter(Op)
_PAGE = 1000
_LIST_MAX = 1000
#: How often somebody who waits for an end looks for himself: another server may bring it about.
_LOOK_S = 1.0


class Outside:
    def __init__(self, database: Database, clock: Clock, decider: Decider, ends: Signals) -> None:
        self._database = database
        self._clock = clock
        self._decider = decider
        self._ends = ends

    # ----------------------------------------------------------------------------------------------------------------- beginning

    async def begin(self, new: NewExecution, parent: Parent | None = None) -> tuple[Begun, Decision | None]:
        function = parse_function(new.function).name
        if not await self._database.all("runs.known_functions", tenant_id=new.tenant_id, names=[function]):
            raise NotFound(
                f"There is no function {function!r}.", hint="A worker that serves it registers it: perdure worker MODULE:HANDLER."
            )
        timeout_s = None if new.timeout_s is None else _checked_timeout_s(new.timeout_s)
        execution_id = mint("exn", now_ms=epoch_ms(self._clock))
        name = _checked_name(new.name) if new.name is not None else execution_id
        arn = str(ExecutionArn(REGION, account_of(new.tenant_id), function, name, execution_id))
        command = Start(
            execution_id=execution_id,
            arn=arn,
            name=name,
            function=function,
            secret=secrets.token_hex(16),
            input=new.input,
            timeout_s=timeout_s,
            code=new.code,
            parent=parent,
        )
        now = await self._database.one("runs.clock")
        assert now is not None, "a clock always answers"
        decision = start(command, self._decider.time.told(now["now"]), self._decider.rules)
        place = Place(new.tenant_id, digest_of(new.input), new.priority, new.key)
        by = actor("outside") if parent is None else "parent"
        outcome = await self._decider.committer.commit(
            "runs.begin", beginning(decision, place, by), (work(new.tenant_id, function),)
        )
        if outcome.is_done:
            return Begun(execution_id, arn, is_new=True), decision
        return await self._there(place, function, name, parent), None

    async def _there(self, place: Place, function: str, name: str, parent: Parent | None) -> Begun:
        """The one that has the name, or is that chained invoke's."""
        if parent is not None:
            row = await self._database.one("runs.by_parent", parent_id=parent.execution_id, parent_operation=parent.operation_id)
        else:
            row = await self._database.one("runs.by_name", tenant_id=place.tenant_id, function=function, name=name)
        if row is None or row["input_digest"] != place.input_digest:
            raise AlreadyExists(
                f"There is an execution {name!r} of {function!r} with another input already.",
                hint="Choose another name, or start it with the same input to get the one that is there.",
            )
        return Begun(row["id"], row["arn"], is_new=False)

    # ------------------------------------------------------------------------------------------------------------------- looking

    async def ended(self, tenant_id: TenantId, execution_id: str, wait_s: float) -> ExecutionInfo | None:
        until = self._clock.monotonic() + wait_s
        while True:
            with self._ends.listen([execution_id]) as listening:
                state = (await self._decider.read(tenant_id, execution_id)).state
                if state.has_ended:
                    return description(state)
                left = until - self._clock.monotonic()
                if left <= 0:
                    return None
                await listening.wait(min(left, _LOOK_S))

    async def describe(self, tenant_id: TenantId, execution_id: str, *, with_data: bool = True) -> ExecutionInfo:
        return description((await self._decider.read(tenant_id, execution_id)).state, with_data=with_data)

    async def history(
        self, tenant_id: TenantId, execution_id: str, *, marker: str | None, limit: int, newest_first: bool, with_data: bool
    ) -> EventPage:
        await self._decider.read(tenant_id, execution_id)
        rows = await self._database.all("runs.children", id=execution_id)
        children = {row["parent_operation"]: row["arn"] for row in rows}
        found = list(events(await self._entries(execution_id), with_data=with_data, children=children))
        if newest_first:
            found.reverse()
        return _event_page(found, parse_marker(marker), max(1, min(limit, _PAGE)))

    async def _entries(self, execution_id: str) -> list[Entry]:
        entries: list[Entry] = []
        while True:
            after = entries[-1].seq if entries else 0
            rows = await self._database.all("runs.entries", id=execution_id, after=after, limit=_PAGE)
            entries += [Entry(row["seq"], row["at"], FACT.validate_json(row["fact"])) for row in rows if row["fact"] is not None]
            if len(rows) < _PAGE:
                return entries

    async def inspect(self, tenant_id: TenantId, execution_id: str) -> Insight:
        state = (await self._decider.read(tenant_id, execution_id)).state
        place = await self._database.one("runs.place", id=execution_id)
        return Insight(
            standing=standing(state),
            code=state.code,
            priority=place["priority"] if place else 0,
            key=place["key"] if place else None,
            invocations=state.invocations,
            operations=len(state.operations),
            history_bytes=state.history_bytes,
            pause=state.pause.cause if state.pause else None,
            last_error=state.last_error,
            born=state.born,
            digest=state.digest,
        )

    async def operations(self, tenant_id: TenantId, execution_id: str, *, marker: str | None, limit: int) -> OperationPage:
        ops = list((await self._decider.read(tenant_id, execution_id)).state.operations.values())
        begin = parse_marker(marker)
        shown = ops[begin : begin + max(1, min(limit, _PAGE))]
        end = begin + len(shown)
        return OperationPage(operations=tuple(map(operation, shown)), next_marker=marker_of(end) if end < len(ops) else None)

    async def find(self, tenant_id: TenantId, query: ListQuery) -> Found:
        limit = max(1, min(query.limit, _LIST_MAX))
        edge_at, edge_id = _edge(query.marker)
        rows = await self._database.all(
            "runs.list_oldest" if query.oldest_first else "runs.list",
            tenant_id=tenant_id,
            function=None if query.function is None else parse_function(query.function).name,
            name=query.name,
            statuses=[status.value for status in query.statuses],
            after=query.started_after,
            until=query.started_before,
            edge_at=edge_at,
            edge_id=edge_id,
            limit=limit + 1,
        )
        page = rows[:limit]
        more = _marker(page[-1]["started_at"], page[-1]["id"]) if len(rows) > limit else None
        return Found(tuple(map(_summary, page)), more)

    # ----------------------------------------------------------------------------------------------------------------- operators

    async def stop(self, tenant_id: TenantId, execution_id: str, error: ErrorObject | None) -> datetime:
        decision = await self._decider.decide(tenant_id, execution_id, Stop(error), actor("operator"))
        crashpoint(CrashPoint.RUNS_STOP_COMMITTED)
        return decision.state.ended_at or decision.state.at

    async def pause(self, tenant_id: TenantId, execution_id: str, reason: str | None, *, timeout_paused: bool) -> None:
        await self._decider.decide(tenant_id, execution_id, Pause(reason, timeout_paused), actor("operator"))

    async def resume(self, tenant_id: TenantId, execution_id: str, reason: str | None, code: CodeRule | None = None) -> None:
        await self._decider.decide(tenant_id, execution_id, Resume(reason, code), actor("operator"))

    async def delete(self, tenant_id: TenantId, execution_id: str) -> datetime:
        at = (await self._decider.decide(tenant_id, execution_id, Delete(), actor("operator"))).state.at
        crashpoint(CrashPoint.RUNS_DELETE_COMMITTED)
        return at

    # ----------------------------------------------------------------------------------------------------------------- callbacks

    async def complete_callback(
        self, tenant_id: TenantId, callback_id: str, result: str | None, error: ErrorObject | None = None
    ) -> None:
        await self._of_callback(tenant_id, callback_id, CompleteCallback(callback_id, result, error))
        crashpoint(CrashPoint.RUNS_CALLBACK_COMPLETED)

    async def heartbeat(self, tenant_id: TenantId, callback_id: str) -> None:
        await self._of_callback(tenant_id, callback_id, Heartbeat(callback_id))

    async def _of_callback(self, tenant_id: TenantId, callback_id: str, command: Command) -> None:
        name = parse_callback_id(callback_id)
        try:
            await self._decider.decide(tenant_id, name.execution_id, command, actor("outside"))
        except NotFound as error:
            raise NotFound(
                "There is no such callback.", hint="Use the id that the function was given when it made the callback."
            ) from error

    async def callbacks(self, tenant_id: TenantId, execution_id: str | None = None) -> list[OpenCallback]:
        if execution_id is not None:
            await self._decider.read(tenant_id, execution_id)
        return [
            _callback(row) for row in await self._database.all("runs.callbacks", tenant_id=tenant_id, execution_id=execution_id)
        ]


def _checked_timeout_s(seconds: int) -> int:
    try:
        return _TIMEOUT.validate_python(seconds)
    except ValidationError:
        raise InvalidRequest(
            f"An execution cannot have {seconds} s.", hint="Give it 1 second to 366 days, or no limit."
        ) from None


def _checked_name(name: str) -> str:
    try:
        return _NAME.validate_python(name)
    except ValidationError:
        raise InvalidRequest(
            f"{name[:100]!r} is not the name of an execution.",
            hint="Names have letters, digits, dashes and underscores; at most 64.",
        ) from None


def _event_page(found: list[Event], begin: int, limit: int) -> EventPage:
    page = found[begin : begin + limit]
    end = begin + len(page)
    return EventPage(tuple(page), marker_of(end) if end < len(found) else None)


def _summary(row: Mapping[str, Any]) -> ExecutionSummary:
    return ExecutionSummary(
        durable_execution_arn=row["arn"],
        durable_execution_name=row["name"],
        function_arn=parse_arn(row["arn"]).function_arn,
        start_timestamp=row["started_at"],
        status=ExecutionStatus(row["status"]),
        end_timestamp=row["ended_at"],
    )


def _callback(row: Mapping[str, Any]) -> OpenCallback:
    op = _OP.validate_json(row["op"])
    assert op.callback_id is not None, "an open callback has its id"
    return OpenCallback(
        op.callback_id, row["execution_id"], row["arn"], row["function"], op.id, op.name, op.started_at, op.due, op.heartbeat_due
    )


def _marker(at: datetime, execution_id: str) -> str:
    return base64.urlsafe_b64encode(f"{at.isoformat()} {execution_id}".encode()).decode()


def _edge(marker: str | None) -> tuple[datetime | None, str | None]:
    if not marker:
        return None, None
    try:
        at, execution_id = base64.urlsafe_b64decode(marker.encode()).decode().split(" ")
        moment = datetime.fromisoformat(at)
        if moment.tzinfo is not None and execution_id.isprintable():  # else the database would stumble over it
            return moment, execution_id
    except (ValueError, binascii.Error):
        pass
    raise InvalidRequest("This marker is not one of ours.", hint="Take it from the answer before, unchanged.")
