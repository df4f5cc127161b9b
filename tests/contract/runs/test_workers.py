"""What a service of durable executions promises to workers."""

from __future__ import annotations

import asyncio

import pytest

from perdure.core.errors import Conflict, InvalidRequest, NotFound, StaleCheckpoint
from perdure.runs.engine import CodeRule, Failure
from perdure.runs.protocol import ErrorObject, ExecutionStatus, InvocationStatus, OperationStatus
from perdure.runs.service.model import LEASE_S, Flight, FunctionSpec
from tests.contract.runs.conftest import OTHER, RULES, TENANT, Bench, flight, ops, token
from tests.unit.runs.driving import callback, step, wait

IN_TIME_S = 30


async def test_a_worker_registers_and_leaves(bench: Bench) -> None:
    assert await bench.runs.functions(TENANT) == []
    worker = await bench.runs.register(TENANT, "one", (FunctionSpec("b", "v1"), FunctionSpec("a", "v2", 60, False, 3)))
    assert worker.lease_s == LEASE_S
    found = await bench.runs.functions(TENANT)
    assert [(one.spec.name, one.workers) for one in found] == [("a", 1), ("b", 1)]
    assert found[0].spec == FunctionSpec("a", "v2", 60, False, 3)
    assert await bench.runs.functions(OTHER) == []
    await bench.runs.leave(TENANT, worker.id)
    assert [one.workers for one in await bench.runs.functions(TENANT)] == [0, 0]
    with pytest.raises(Conflict):
        await bench.runs.take(TENANT, worker.id, 0)


async def test_the_last_registration_of_a_function_counts(bench: Bench) -> None:
    await bench.serve(digest="v1")
    await bench.serve(digest="v2", timeout_s=5)
    (found,) = await bench.runs.functions(TENANT)
    assert (found.spec.digest, found.spec.timeout_s, found.workers) == ("v2", 5, 2)


async def test_a_worker_that_nobody_hears_of_is_not_counted(bench: Bench) -> None:
    await bench.serve()
    await bench.advance(LEASE_S + 1)
    assert [one.workers for one in await bench.runs.functions(TENANT)] == [0]


async def test_a_worker_serves_something_and_nothing_twice(bench: Bench) -> None:
    for functions in ((), (FunctionSpec("a", "v1"), FunctionSpec("a", "v2"))):
        with pytest.raises(InvalidRequest):
            await bench.runs.register(TENANT, "one", functions)


async def test_a_worker_that_is_not_known(bench: Bench) -> None:
    mine = await bench.serve()
    for tenant, worker in ((TENANT, "wrk_none"), (OTHER, mine)):
        with pytest.raises(NotFound):
            await bench.runs.take(tenant, worker, 0)
        with pytest.raises(NotFound):
            await bench.runs.beat(tenant, worker, ())
        with pytest.raises(NotFound):
            await bench.runs.leave(tenant, worker)


async def test_a_worker_takes_and_answers(bench: Bench) -> None:
    await bench.serve()
    assert await bench.offered() is None
    begun = await bench.begin(input='{"n": 1}')
    taken = await bench.take()
    assert (taken.execution_id, taken.arn, taken.function, taken.invocation) == (begun.execution_id, begun.arn, "main", 1)
    assert await bench.offered() is None, "it is in flight"
    await bench.succeed(taken, "[2]")
    info = await bench.runs.describe(TENANT, begun.execution_id)
    assert (info.status, info.result) == (ExecutionStatus.SUCCEEDED, "[2]")


async def test_who_waits_is_told_of_the_first_one(bench: Bench) -> None:
    await bench.serve()
    waiting = asyncio.ensure_future(bench.runs.take(TENANT, bench.worker_id, IN_TIME_S))
    await asyncio.sleep(0)
    begun = await bench.begin()
    taken = await asyncio.wait_for(waiting, IN_TIME_S)
    assert taken is not None and taken.execution_id == begun.execution_id


async def test_whoever_stops_waiting_leaves_nothing_taken(bench: Bench) -> None:
    await bench.serve()
    waiting = asyncio.ensure_future(bench.runs.take(TENANT, bench.worker_id, IN_TIME_S))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    begun = await bench.begin()
    assert (await bench.take()).execution_id == begun.execution_id


async def test_only_what_it_serves_is_offered(bench: Bench) -> None:
    other = await bench.serve("other")
    mine = await bench.serve("main")
    theirs = await bench.serve("main", tenant_id=OTHER)
    await bench.begin()
    assert await bench.runs.take(OTHER, theirs, 0) is None
    assert await bench.offered(other) is None
    assert (await bench.take(mine)).function == "main"


async def test_a_function_that_is_not_durable(bench: Bench) -> None:
    await bench.serve(is_durable=False)
    begun = await bench.begin(input='{"n": 1}')
    taken = await bench.take()
    assert taken.event == '{"n": 1}'
    await bench.succeed(taken, "2")
    assert (await bench.runs.describe(TENANT, begun.execution_id)).result == "2"


async def test_a_function_that_is_not_durable_and_raises_is_not_run_again(bench: Bench) -> None:
    await bench.serve(is_durable=False)
    begun = await bench.begin()
    taken = await bench.take()
    await bench.runs.fail(TENANT, flight(taken), Failure.RAISED, ErrorObject(error_type="Oh", error_message="no"))
    info = await bench.runs.describe(TENANT, begun.execution_id)
    assert info.status is ExecutionStatus.FAILED and info.error is not None and info.error.error_type == "Oh"


async def test_a_durable_one_that_raises_is_invoked_again_in_a_while(bench: Bench) -> None:
    await bench.serve()
    await bench.begin()
    await bench.runs.fail(TENANT, flight(await bench.take()), Failure.RAISED)
    assert await bench.offered() is None
    await bench.advance(RULES.backoff_s)
    assert (await bench.take()).invocation == 2


async def test_what_is_given_back_is_offered_at_once(bench: Bench) -> None:
    await bench.serve()
    await bench.begin()
    await bench.runs.fail(TENANT, flight(await bench.take()), Failure.RETURNED)
    assert (await bench.take()).invocation == 2


async def test_what_is_no_answer_ends_it(bench: Bench) -> None:
    await bench.serve()
    begun = await bench.begin()
    await bench.runs.fail(TENANT, flight(await bench.take()), Failure.INVALID)
    assert (await bench.runs.describe(TENANT, begun.execution_id)).status is ExecutionStatus.FAILED


async def test_a_lease_is_kept_by_beats_and_ends_without(bench: Bench) -> None:
    await bench.serve()
    await bench.begin()
    taken = await bench.take()
    for _ in range(3):
        await bench.advance(LEASE_S * 0.8)
        assert await bench.runs.beat(TENANT, bench.worker_id, (flight(taken),)) == ()
    await bench.advance(LEASE_S + 1)
    assert await bench.runs.beat(TENANT, bench.worker_id, (flight(taken),)) == (flight(taken),)
    await bench.advance(RULES.backoff_s)
    again = await bench.take()
    assert again.invocation == 2
    with pytest.raises(StaleCheckpoint):
        await bench.send(taken, token(taken), step("s"))


async def test_a_beat_tells_of_whatever_is_not_its_own(bench: Bench) -> None:
    other = await bench.serve()
    mine = await bench.serve()
    begun = await bench.begin()
    taken = await bench.take(mine)
    flights = (flight(taken), Flight(begun.execution_id, 7), Flight("exn_none", 1))
    assert await bench.runs.beat(TENANT, mine, flights) == flights[1:]
    assert await bench.runs.beat(TENANT, other, flights) == flights
    await bench.runs.stop(TENANT, begun.execution_id, None)
    assert await bench.runs.beat(TENANT, mine, flights) == flights


async def test_an_answer_that_comes_too_late_changes_nothing(bench: Bench) -> None:
    await bench.serve()
    begun = await bench.begin()
    late = await bench.take()
    await bench.advance(LEASE_S + 1)
    await bench.succeed(late, "1")
    await bench.runs.fail(TENANT, flight(late), Failure.INVALID)
    assert (await bench.runs.describe(TENANT, begun.execution_id)).status is ExecutionStatus.RUNNING
    await bench.advance(RULES.backoff_s)
    await bench.succeed(await bench.take(), "2")
    await bench.succeed(late, "1")
    assert (await bench.runs.describe(TENANT, begun.execution_id)).result == "2"


async def test_a_function_that_takes_too_long_is_ended(bench: Bench) -> None:
    await bench.serve(timeout_s=5)
    await bench.begin()
    taken = await bench.take()
    await bench.advance(6)
    assert await bench.runs.beat(TENANT, bench.worker_id, (flight(taken),)) == (flight(taken),)
    await bench.advance(RULES.backoff_s)
    assert (await bench.take()).invocation == 2


async def test_an_answer_to_what_never_was(bench: Bench) -> None:
    await bench.serve()
    begun = await bench.begin()
    taken = await bench.take()
    for tenant, execution in ((TENANT, "exn_none"), (OTHER, begun.execution_id)):
        with pytest.raises(NotFound):
            await bench.runs.fail(tenant, Flight(execution, taken.invocation), Failure.RAISED)


async def test_priority_and_then_age(bench: Bench) -> None:
    await bench.serve()
    first, second = await bench.begin(), await bench.begin()
    urgent = await bench.begin(priority=5)
    taken = [(await bench.take()).execution_id for _ in range(3)]
    assert taken == [urgent.execution_id, first.execution_id, second.execution_id]


async def test_one_after_the_other_by_their_key(bench: Bench) -> None:
    await bench.serve()
    first, second = await bench.begin(key="k"), await bench.begin(key="k")
    free = await bench.begin(key="another")
    one = await bench.take()
    assert one.execution_id == first.execution_id
    assert (await bench.take()).execution_id == free.execution_id
    assert await bench.offered() is None
    await bench.succeed(one)
    assert (await bench.take()).execution_id == second.execution_id


async def test_a_function_has_no_more_in_flight_than_it_may(bench: Bench) -> None:
    await bench.serve(concurrency=1)
    await bench.begin()
    await bench.begin()
    one = await bench.take()
    assert await bench.offered() is None
    await bench.answer(one, InvocationStatus.FAILED)
    assert (await bench.take()).invocation == 1


async def test_what_is_bound_to_its_code_waits_for_it(bench: Bench) -> None:
    old = await bench.serve(digest="v1")
    await bench.begin(code=CodeRule.EXACT)
    taken = await bench.take(old)
    await bench.send(taken, token(taken), wait("w", 5))
    await bench.answer(taken)
    new = await bench.serve(digest="v2")
    await bench.advance(6)
    assert await bench.offered(new) is None
    assert ops(await bench.take(old))["w"].status is OperationStatus.SUCCEEDED


async def test_a_worker_that_waits_sees_a_completion(bench: Bench) -> None:
    await bench.serve()
    await bench.begin()
    taken = await bench.take()
    answer = await bench.send(taken, token(taken), callback("c"))
    await bench.answer(taken)
    details = answer.new_execution_state.operations[0].callback_details
    assert details is not None and details.callback_id is not None
    waiting = asyncio.ensure_future(bench.runs.take(TENANT, bench.worker_id, IN_TIME_S))
    await asyncio.sleep(0)
    await bench.runs.complete_callback(TENANT, details.callback_id, "7")
    again = await asyncio.wait_for(waiting, IN_TIME_S)
    assert again is not None
    after = ops(again)["c"].callback_details
    assert after is not None and after.result == "7"
