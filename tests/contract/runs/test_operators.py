"""What a service of durable executions tells operators beside AWS's own calls."""

from __future__ import annotations

import pytest

from perdure.core.errors import InvalidRequest, NotFound
from perdure.runs.engine import CodeRule, PauseCause, Reason
from perdure.runs.protocol import Action, InvocationStatus, OperationStatus
from tests.contract.runs.conftest import OTHER, TENANT, Bench, token
from tests.unit.runs.driving import context, step, wait


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
