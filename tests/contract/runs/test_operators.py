"""What a service of durable executions tells operators beside AWS's own calls."""

from __future__ import annotations

import pytest

from perdure.core.errors import InvalidRequest, NotFound
from perdure.runs.engine import CodeRule, PauseCause, Reason
from perdure.runs.protocol import Action, ExecutionStatus, InvocationStatus, OperationStatus
from tests.contract.runs.conftest import KEEP_S, OTHER, TENANT, Bench, token
from tests.unit.runs.driving import context, invoke, step, wait


async def test_why_it_stands_where_it_does(bench: Bench) -> None:
    await bench.serve(digest="v1")
    begun = await bench.begin(priority=2, key="printer", code=CodeRule.ANY)
    told = await bench.runs.inspect(TENANT, begun.execution_id)
    assert (told.standing.reason, told.priority, told.key, told.code) == (Reason.INVOKE, 2, "printer", CodeRule.ANY)
    assert (told.invocations, told.operations, told.pause, told.last_error) == (0, 1, None, None)
    taken = await bench.take()
    running = await bench.runs.inspect(TENANT, begun.execution_id)
    assert (running.standing.reason, running.invocations, running.born, running.digest) == (Reason.ANSWER, 1, "v1", "v1")
    await bench.send(taken, token(taken), wait("w", 3600))
    await bench.answer(taken)
    waits = await bench.runs.inspect(TENANT, begun.execution_id)
    assert (waits.standing.reason, waits.operations) == (Reason.TIMER, 2)
    assert waits.standing.timer_at is not None
    assert waits.history_bytes >= told.history_bytes
    await bench.runs.pause(TENANT, begun.execution_id, None, timeout_paused=True)
    paused = await bench.runs.inspect(TENANT, begun.execution_id)
    assert (paused.standing.reason, paused.pause) == (Reason.OPERATOR, PauseCause.OPERATOR)
    await bench.runs.stop(TENANT, begun.execution_id, None)
    assert (await bench.runs.inspect(TENANT, begun.execution_id)).standing.reason is Reason.ENDED


async def test_operations_are_all_there_are_below_closed_contexts_too(bench: Bench) -> None:
    await bench.serve()
    begun = await bench.begin(input='"in"')
    taken = await bench.take()
    inner = [step("s", parent_id="c", name="look"), step("s", Action.SUCCEED, parent_id="c", payload="1")]
    await bench.send(taken, token(taken), context("c"), *inner, context("c", Action.SUCCEED, payload="2"), wait("w", 60))
    await bench.answer(taken)
    page = await bench.runs.operations(TENANT, begun.execution_id, marker=None, limit=3)
    itself, c, s = page.operations
    assert itself.execution_details is not None and itself.execution_details.input_payload == '"in"'
    assert (c.id, c.status, s.id, s.parent_id, s.name) == ("c", OperationStatus.SUCCEEDED, "s", "c", "look")
    assert s.step_details is not None and s.step_details.result == "1"
    rest = await bench.runs.operations(TENANT, begun.execution_id, marker=page.next_marker, limit=3)
    assert ([op.id for op in rest.operations], rest.next_marker) == (["w"], None)
    with pytest.raises(InvalidRequest):
        await bench.runs.operations(TENANT, begun.execution_id, marker="nonsense", limit=3)
    assert len((await bench.runs.operations(TENANT, begun.execution_id, marker=None, limit=4)).operations) == 4


async def test_an_execution_of_another_tenant_is_not_there(bench: Bench) -> None:
    await bench.serve()
    begun = await bench.begin()
    with pytest.raises(NotFound):
        await bench.runs.inspect(OTHER, begun.execution_id)
    with pytest.raises(NotFound):
        await bench.runs.operations(OTHER, begun.execution_id, marker=None, limit=10)


async def test_functions_say_what_waits_for_a_worker(bench: Bench) -> None:
    await bench.serve("main", "other")
    for _ in range(2):
        await bench.begin()
    ends = await bench.take()
    await bench.answer(ends, InvocationStatus.SUCCEEDED, result="1")
    await bench.begin()
    busy = await bench.take()
    found = {one.spec.name: one for one in await bench.runs.functions(TENANT)}
    assert (found["main"].workers, found["main"].executions, found["main"].waiting) == (1, 2, 1)
    assert found["main"].waiting_since is not None
    assert (found["other"].executions, found["other"].waiting, found["other"].waiting_since) == (0, 0, None)
    await bench.answer(busy, InvocationStatus.SUCCEEDED, result="1")
    await bench.runs.leave(TENANT, bench.worker_id)
    (main,) = [one for one in await bench.runs.functions(TENANT) if one.spec.name == "main"]
    assert (main.workers, main.executions, main.waiting) == (0, 1, 1)


async def test_what_has_ended_is_deleted_when_it_was_kept_for_long_enough(bench: Bench) -> None:
    await bench.serve()
    waiting, ended = await bench.begin(), await bench.begin(name="order-1")
    for _ in range(2):
        taken = await bench.take()
        if taken.execution_id == ended.execution_id:
            await bench.succeed(taken)
        else:
            await bench.send(taken, token(taken), wait("w", 86_400))
            await bench.answer(taken)
    await bench.advance(KEEP_S - 60)
    await bench.swept()
    assert (await bench.runs.describe(TENANT, ended.execution_id)).status is ExecutionStatus.SUCCEEDED
    await bench.advance(120)
    await bench.swept()
    with pytest.raises(NotFound):
        await bench.runs.describe(TENANT, ended.execution_id)
    assert (await bench.runs.describe(TENANT, waiting.execution_id)).status is ExecutionStatus.RUNNING, "it has not ended"
    assert (await bench.begin(name="order-1")).is_new, "its name is free"


async def test_a_child_is_kept_as_long_as_its_parent_goes_on(bench: Bench) -> None:
    await bench.serve("main", "child")
    await bench.begin()
    parent = await bench.take()
    await bench.send(parent, token(parent), invoke("call", "child"))
    await bench.answer(parent)
    child = await bench.take()
    assert child.function == "child"
    await bench.succeed(child)
    again = await bench.take()
    await bench.send(again, token(again), wait("w", 300 * 86_400))
    await bench.answer(again)
    for _ in range(4):  # nothing ends its wait but that it is invoked, and waits again
        await bench.advance(300 * 86_400)
        await bench.swept()
    assert (await bench.runs.describe(TENANT, child.execution_id)).status is ExecutionStatus.SUCCEEDED
    await bench.serve("main", "child")  # nobody has heard of the other worker for a day
    await bench.succeed(await bench.take())
    await bench.advance(60)
    await bench.swept()
    with pytest.raises(NotFound):
        await bench.runs.describe(TENANT, child.execution_id)
