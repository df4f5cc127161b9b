"""What a service of durable executions promises to whoever starts them, looks at them and steers them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from perdure.core.errors import (
    AlreadyExists,
    CallbackClosed,
    Conflict,
    ExecutionEnded,
    InvalidRequest,
    NotFound,
    PerdureError,
    StaleCheckpoint,
)
from perdure.core.ids import TenantId
from perdure.runs.protocol import (
    Action,
    CheckpointRequest,
    ErrorObject,
    Event,
    EventType,
    ExecutionStatus,
    InvocationStatus,
    OperationStatus,
)
from perdure.runs.service.model import ListQuery, NewExecution
from tests.contract.runs.conftest import OTHER, TENANT, Bench, ops, token
from tests.unit.runs.driving import callback, invoke, step, wait

ERROR = ErrorObject(error_type="Broken", error_message="it broke")


async def open_callback(bench: Bench, timeout_s: int = 0, heartbeat_s: int = 0) -> tuple[str, str]:
    """An execution that waits for a callback, and the callback's id."""
    await bench.serve()
    begun = await bench.begin()
    taken = await bench.take()
    answer = await bench.send(taken, token(taken), callback("c", timeout_s, heartbeat_s))
    await bench.answer(taken)
    details = answer.new_execution_state.operations[0].callback_details
    assert details is not None and details.callback_id is not None
    return begun.execution_id, details.callback_id


async def test_a_name_makes_it_idempotent(bench: Bench) -> None:
    await bench.serve()
    first = await bench.begin(name="order-7", input="1")
    again = await bench.begin(name="order-7", input="1")
    assert (first.is_new, again.is_new) == (True, False)
    assert again == replace(first, is_new=False)
    with pytest.raises(AlreadyExists):
        await bench.begin(name="order-7", input="2")
    unnamed = {(await bench.begin(input="1")).execution_id for _ in range(2)}
    assert len(unnamed) == 2
    await bench.serve(tenant_id=OTHER)
    theirs = await bench.runs.begin(NewExecution(OTHER, "main", input="2", name="order-7"))
    assert theirs.is_new


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ({"function": "nobody"}, NotFound),
        ({"function": "not a function"}, InvalidRequest),
        ({"name": "with space"}, InvalidRequest),
        ({"name": ""}, InvalidRequest),
        ({"name": "x" * 65}, InvalidRequest),
        ({"timeout_s": 0}, InvalidRequest),
        ({"timeout_s": 10**9}, InvalidRequest),
        ({"input": "x" * (17 << 20)}, InvalidRequest),
    ],
)
async def test_what_cannot_begin(bench: Bench, parts: dict[str, object], kind: type[PerdureError]) -> None:
    await bench.serve()
    with pytest.raises(kind):
        await bench.begin(**parts)  # type: ignore[arg-type]
    assert (await bench.runs.find(TENANT, ListQuery())).executions == ()


async def test_its_end_can_be_waited_for(bench: Bench) -> None:
    await bench.serve()
    begun = await bench.begin()
    assert await bench.runs.ended(TENANT, begun.execution_id, 0) is None
    await bench.succeed(await bench.take(), "3")
    info = await bench.runs.ended(TENANT, begun.execution_id, 0)
    assert info is not None and (info.status, info.result) == (ExecutionStatus.SUCCEEDED, "3")


async def test_its_own_timeout_ends_it(bench: Bench) -> None:
    await bench.serve()
    begun = await bench.begin(timeout_s=60)
    await bench.advance(61)
    assert (await bench.runs.describe(TENANT, begun.execution_id)).status is ExecutionStatus.TIMED_OUT


async def test_a_description_with_and_without_data(bench: Bench) -> None:
    await bench.serve()
    begun = await bench.begin(input='"in"')
    await bench.succeed(await bench.take(), '"out"')
    info = await bench.runs.describe(TENANT, begun.execution_id)
    assert (info.input_payload, info.result, info.execution_data_included) == ('"in"', '"out"', True)
    bare = await bench.runs.describe(TENANT, begun.execution_id, with_data=False)
    assert (bare.input_payload, bare.result, bare.execution_data_included) == (None, None, False)


async def test_another_tenants_is_not_there(bench: Bench) -> None:
    execution_id, callback_id = await open_callback(bench)
    runs = bench.runs
    request = CheckpointRequest(checkpoint_token="x", updates=())

    async def refused(tenant_id: TenantId, execution_id: str, callback_id: str) -> list[str]:
        calls = (
            lambda: runs.ended(tenant_id, execution_id, 0),
            lambda: runs.describe(tenant_id, execution_id),
            lambda: runs.history(tenant_id, execution_id, marker=None, limit=1, newest_first=False, with_data=True),
            lambda: runs.stop(tenant_id, execution_id, None),
            lambda: runs.pause(tenant_id, execution_id, None, timeout_paused=True),
            lambda: runs.resume(tenant_id, execution_id, None),
            lambda: runs.delete(tenant_id, execution_id),
            lambda: runs.callbacks(tenant_id, execution_id),
            lambda: runs.checkpoint(tenant_id, execution_id, request),
            lambda: runs.state(tenant_id, execution_id, "x", None, None),
            lambda: runs.complete_callback(tenant_id, callback_id, "1"),
            lambda: runs.heartbeat(tenant_id, callback_id),
        )
        said = []
        for call in calls:
            with pytest.raises(NotFound) as raised:
                await call()
            said.append(f"{raised.value.message} {raised.value.hint}".replace(execution_id, "ID"))
        return said

    theirs = await refused(OTHER, execution_id, callback_id)
    assert theirs == await refused(TENANT, "exn_none", "bm90aGluZw=="), "nobody can tell it from one that never was"
    assert (await runs.describe(TENANT, execution_id)).status is ExecutionStatus.RUNNING
    assert await runs.callbacks(OTHER) == []
    assert (await runs.find(OTHER, ListQuery())).executions == ()


async def test_finding_them(bench: Bench) -> None:
    await bench.serve("main", "other")
    ids = []
    for number in range(5):
        ids.append((await bench.begin(name=f"n{number}")).arn)
        await bench.advance(1)
    await bench.begin("other")
    found = await bench.runs.find(TENANT, ListQuery(function="main"))
    assert [one.durable_execution_arn for one in found.executions] == ids[::-1]
    first = await bench.runs.find(TENANT, ListQuery(function="main", oldest_first=True, limit=3))
    assert [one.durable_execution_arn for one in first.executions] == ids[:3] and first.next_marker
    rest = await bench.runs.find(TENANT, ListQuery(function="main", oldest_first=True, limit=3, marker=first.next_marker))
    assert [one.durable_execution_arn for one in rest.executions] == ids[3:] and rest.next_marker is None
    named = await bench.runs.find(TENANT, ListQuery(name="n2"))
    assert [one.durable_execution_name for one in named.executions] == ["n2"]
    at = named.executions[0].start_timestamp
    late = await bench.runs.find(TENANT, ListQuery(function="main", started_after=at + timedelta(milliseconds=1)))
    assert [one.durable_execution_name for one in late.executions] == ["n4", "n3"]
    early = await bench.runs.find(TENANT, ListQuery(function="main", started_before=at - timedelta(milliseconds=1)))
    assert [one.durable_execution_name for one in early.executions] == ["n1", "n0"]
    with pytest.raises(InvalidRequest):
        await bench.runs.find(TENANT, ListQuery(marker="nonsense"))


async def test_finding_them_by_what_they_are(bench: Bench) -> None:
    await bench.serve()
    await bench.begin(name="ended")
    await bench.succeed(await bench.take())
    await bench.begin(name="stopped")
    await bench.runs.stop(TENANT, (await bench.take()).execution_id, None)
    await bench.begin(name="running")
    query = ListQuery(statuses=(ExecutionStatus.SUCCEEDED, ExecutionStatus.STOPPED))
    found = await bench.runs.find(TENANT, query)
    assert [one.durable_execution_name for one in found.executions] == ["stopped", "ended"]


async def test_history_in_pages_and_backwards(bench: Bench) -> None:
    await bench.serve()
    begun = await bench.begin(input="1")
    taken = await bench.take()
    await bench.send(taken, token(taken), step("a"), step("a", Action.SUCCEED, payload="5"))
    await bench.succeed(taken)
    runs, execution_id = bench.runs, begun.execution_id
    whole = await runs.history(TENANT, execution_id, marker=None, limit=100, newest_first=False, with_data=True)
    kinds = [event.event_type for event in whole.events]
    assert kinds[:3] == [EventType.EXECUTION_STARTED, EventType.STEP_STARTED, EventType.STEP_SUCCEEDED]
    assert whole.next_marker is None
    back = await runs.history(TENANT, execution_id, marker=None, limit=100, newest_first=True, with_data=True)
    assert back.events == whole.events[::-1]
    pieces: list[Event] = []
    marker: str | None = None
    while True:
        page = await runs.history(TENANT, execution_id, marker=marker, limit=2, newest_first=False, with_data=True)
        assert len(page.events) <= 2
        pieces += page.events
        if (marker := page.next_marker) is None:
            break
    assert tuple(pieces) == whole.events
    bare = await runs.history(TENANT, execution_id, marker=None, limit=100, newest_first=False, with_data=False)
    assert '"5"' not in str(bare) and [event.event_type for event in bare.events] == kinds


async def test_stopping(bench: Bench) -> None:
    await bench.serve()
    begun = await bench.begin()
    at = await bench.runs.stop(TENANT, begun.execution_id, ERROR)
    info = await bench.runs.describe(TENANT, begun.execution_id)
    assert (info.status, info.error, info.end_timestamp) == (ExecutionStatus.STOPPED, ERROR, at)
    assert await bench.offered() is None
    with pytest.raises(ExecutionEnded):
        await bench.runs.stop(TENANT, begun.execution_id, None)
    with pytest.raises(ExecutionEnded):
        await bench.runs.pause(TENANT, begun.execution_id, None, timeout_paused=True)


async def test_pausing_and_resuming(bench: Bench) -> None:
    await bench.serve()
    begun = await bench.begin(timeout_s=60)
    for _ in range(2):
        await bench.runs.pause(TENANT, begun.execution_id, "a look", timeout_paused=True)
    info = await bench.runs.describe(TENANT, begun.execution_id)
    assert info.status is ExecutionStatus.PAUSED and info.pause_details is not None and info.pause_details.reason == "a look"
    assert await bench.offered() is None
    await bench.advance(100)
    for _ in range(2):
        await bench.runs.resume(TENANT, begun.execution_id, None)
    assert (await bench.runs.describe(TENANT, begun.execution_id)).status is ExecutionStatus.RUNNING
    await bench.succeed(await bench.take())


async def test_deleting(bench: Bench) -> None:
    await bench.serve()
    begun = await bench.begin(name="once")
    with pytest.raises(Conflict):
        await bench.runs.delete(TENANT, begun.execution_id)
    await bench.succeed(await bench.take())
    await bench.runs.delete(TENANT, begun.execution_id)
    with pytest.raises(NotFound):
        await bench.runs.describe(TENANT, begun.execution_id)
    assert (await bench.begin(name="once")).is_new


@pytest.mark.parametrize("fails", [False, True])
async def test_a_callback_from_outside(bench: Bench, fails: bool) -> None:
    execution_id, callback_id = await open_callback(bench)
    (found,) = await bench.runs.callbacks(TENANT)
    assert (found.callback_id, found.execution_id, found.operation_id, found.due) == (callback_id, execution_id, "c", None)
    assert await bench.runs.callbacks(TENANT, execution_id) == [found]
    await bench.runs.complete_callback(TENANT, callback_id, None if fails else "[7]", ERROR if fails else None)
    told = ops(await bench.take())["c"]
    assert told.callback_details is not None
    assert told.status is (OperationStatus.FAILED if fails else OperationStatus.SUCCEEDED)
    assert (told.callback_details.result, told.callback_details.error) == ((None, ERROR) if fails else ("[7]", None))
    assert await bench.runs.callbacks(TENANT) == []
    with pytest.raises(CallbackClosed):
        await bench.runs.complete_callback(TENANT, callback_id, "[8]")
    with pytest.raises(CallbackClosed):
        await bench.runs.heartbeat(TENANT, callback_id)


async def test_a_callback_is_kept_by_heartbeats(bench: Bench) -> None:
    _, callback_id = await open_callback(bench, heartbeat_s=1000)
    for _ in range(3):
        await bench.advance(800)
        await bench.runs.heartbeat(TENANT, callback_id)
    await bench.advance(1100)
    with pytest.raises(CallbackClosed):
        await bench.runs.heartbeat(TENANT, callback_id)
    assert ops(await bench.take())["c"].status is OperationStatus.TIMED_OUT


async def test_a_wait_ends_by_itself(bench: Bench) -> None:
    await bench.serve()
    await bench.begin()
    taken = await bench.take()
    await bench.send(taken, token(taken), wait("w", 3600))
    await bench.answer(taken)
    await bench.advance(3000)
    assert await bench.offered() is None
    await bench.advance(700)
    assert ops(await bench.take())["w"].status is OperationStatus.SUCCEEDED


async def test_a_checkpoint_that_comes_again_and_one_that_is_stale(bench: Bench) -> None:
    await bench.serve()
    begun = await bench.begin()
    taken = await bench.take()
    first = token(taken)
    answer = await bench.send(taken, first, step("a"), client="one")
    assert await bench.send(taken, first, step("a"), client="one") == answer, "its answer was lost"
    with pytest.raises(StaleCheckpoint):
        await bench.send(taken, first, step("b"), client="two")
    with pytest.raises(StaleCheckpoint):
        await bench.runs.state(TENANT, begun.execution_id, first, None, None)
    assert answer.checkpoint_token is not None
    page = await bench.runs.state(TENANT, begun.execution_id, answer.checkpoint_token, None, 1)
    assert len(page.operations) == 1 and page.next_marker is not None
    rest = await bench.runs.state(TENANT, begun.execution_id, answer.checkpoint_token, page.next_marker, 10)
    assert [op.id for op in rest.operations] == ["a"]
    with pytest.raises(InvalidRequest):
        await bench.runs.state(TENANT, begun.execution_id, answer.checkpoint_token, "nonsense", None)


async def test_a_batch_is_recorded_whole_or_not_at_all(bench: Bench) -> None:
    await bench.serve()
    await bench.begin()
    taken = await bench.take()
    with pytest.raises(InvalidRequest):
        await bench.send(taken, token(taken), step("a"), step("a"))
    answer = await bench.send(taken, token(taken), step("b"))
    assert [op.id for op in answer.new_execution_state.operations] == ["b"]


async def test_a_chained_invoke(bench: Bench) -> None:
    await bench.serve("main", "other")
    await bench.begin()
    parent = await bench.take()
    await bench.send(parent, token(parent), invoke("i", "other", payload="[1]"))
    await bench.answer(parent)
    child = await bench.take()
    assert child.function == "other"
    await bench.succeed(child, "[2]")
    told = ops(await bench.take())["i"]
    assert told.status is OperationStatus.SUCCEEDED
    assert told.chained_invoke_details is not None and told.chained_invoke_details.result == "[2]"


async def test_a_chained_invoke_of_nobody(bench: Bench) -> None:
    await bench.serve()
    await bench.begin()
    taken = await bench.take()
    answer = await bench.send(taken, token(taken), invoke("i", "nobody"))
    (told,) = answer.new_execution_state.operations
    assert told.status is OperationStatus.FAILED and told.chained_invoke_details is not None
    assert told.chained_invoke_details.error is not None
    assert told.chained_invoke_details.error.error_type == "ResourceNotFoundException"


async def test_a_handler_that_fails(bench: Bench) -> None:
    await bench.serve()
    begun = await bench.begin()
    await bench.answer(await bench.take(), InvocationStatus.FAILED, error=ERROR)
    info = await bench.runs.describe(TENANT, begun.execution_id)
    assert (info.status, info.error) == (ExecutionStatus.FAILED, ERROR)
