"""Durable executions over a real database: one invocation at a time, nothing lost between servers, timers and leases."""

from __future__ import annotations

import asyncio
from collections import Counter

import psycopg
import pytest

from perdure.core.errors import (
    AlreadyExists,
    CallbackClosed,
    Conflict,
    ExecutionEnded,
    InvalidRequest,
    NotFound,
    StaleCheckpoint,
)
from perdure.runs.engine import Failure
from perdure.runs.protocol import ErrorObject, ExecutionStatus, InvocationOutput, InvocationStatus, OperationStatus
from perdure.runs.service.model import Flight, FunctionSpec, ListQuery, NewExecution
from perdure.runs.service.verify import verify
from tests.integration.runs.stage import MAIN, OTHER, TENANT, Stage, asks, invokes, stage, update, waits

# ---------------------------------------------------------------------------------------------------- from begin to end


async def test_a_step_from_its_start_to_the_end() -> None:
    async with stage() as on:
        execution_id = await on.begin(input='{"a": 1}')
        run = await on.take()
        assert run.work.execution_id == execution_id
        first = run.work.event.initial_execution_state.operations[0]  # type: ignore[union-attr]
        assert first.execution_details is not None and first.execution_details.input_payload == '{"a": 1}'
        answer = await run.checkpoint(update("STEP", "START", "s1"), update("STEP", "SUCCEED", "s1", payload='"done"'))
        assert [op.status for op in answer.new_execution_state.operations] == [OperationStatus.SUCCEEDED]
        await run.answer("SUCCEEDED", '"end"')
        info = await on.second.ended(TENANT, execution_id, 0)
        assert info is not None and (info.status, info.result) == (ExecutionStatus.SUCCEEDED, '"end"')
        page = await on.first.history(TENANT, execution_id, marker=None, limit=100, newest_first=False, with_data=True)
        kinds = [event.event_type.value for event in page.events]
        assert kinds == ["ExecutionStarted", "StepStarted", "StepSucceeded", "InvocationCompleted", "ExecutionSucceeded"]
        assert await on.first.take(TENANT, on.worker, 0) is None


async def test_a_history_in_pages_is_the_whole_history() -> None:
    async with stage() as on:
        execution_id = await on.begin()
        run = await on.take()
        for number in range(5):
            await run.checkpoint(update("STEP", "SUCCEED", f"s{number}"))
        for newest_first in (False, True):
            ids, marker = [], None
            while True:
                page = await on.first.history(
                    TENANT, execution_id, marker=marker, limit=2, newest_first=newest_first, with_data=False
                )
                ids += [event.event_id for event in page.events]
                marker = page.next_marker
                if marker is None:
                    break
            assert ids == sorted(range(1, 7), reverse=newest_first)


async def test_the_same_name_is_the_same_execution() -> None:
    async with stage() as on:
        first = await on.first.begin(NewExecution(TENANT, "main", "1", name="order-1"))
        again = await on.second.begin(
            NewExecution(TENANT, "arn:aws:lambda:us-east-1:000000000000:function:main", "1", name="order-1")
        )
        assert (first.is_new, again.is_new, first.execution_id, first.arn) == (True, False, again.execution_id, again.arn)
        with pytest.raises(AlreadyExists, match="another input"):
            await on.first.begin(NewExecution(TENANT, "main", "2", name="order-1"))
        begun = await asyncio.gather(
            *(service.begin(NewExecution(TENANT, "main", name="race")) for service in (on.first, on.second) * 10)
        )
        assert len({one.execution_id for one in begun}) == 1
        assert sum(one.is_new for one in begun) == 1


async def test_bad_starts() -> None:
    async with stage() as on:
        for name in ("", "a b", "x" * 65, "ü"):
            with pytest.raises(InvalidRequest):
                await on.begin(name=name)
        with pytest.raises(InvalidRequest, match="is no text"):
            await on.begin(input="\ud800")
        with pytest.raises(NotFound, match="no function 'nobody'"):
            await on.begin("nobody")
        with pytest.raises(InvalidRequest):
            await on.begin("a/b")
        with pytest.raises(NotFound):
            await on.first.begin(NewExecution(OTHER, "main"))


# ---------------------------------------------------------------------------------------------------- several servers


async def test_each_invocation_is_given_to_one_worker() -> None:
    async with stage() as on:
        others = [await on.second.register(TENANT, "w", (MAIN,)) for _ in range(3)]
        begun = {await on.begin() for _ in range(40)}

        async def work(service: object, worker: str) -> list[str]:
            found = []
            while (work := await service.take(TENANT, worker, 0)) is not None:  # type: ignore[attr-defined]
                found.append(work.execution_id)
            return found

        workers = [(on.first, on.worker), *((on.second, other.id) for other in others)] * 3
        taken = await asyncio.gather(*(work(service, worker) for service, worker in workers))
        counts = Counter(one for found in taken for one in found)
        assert counts == dict.fromkeys(begun, 1)


async def test_what_another_server_was_told_is_not_missed() -> None:
    """The first server keeps the state of what it runs; the second changes it meanwhile."""
    async with stage() as on:
        execution_id = await on.begin()
        run = await on.take()
        answer = await run.checkpoint(asks())
        callback = answer.new_execution_state.operations[0].callback_details
        assert callback is not None and callback.callback_id is not None
        await on.second.complete_callback(TENANT, callback.callback_id, '"yes"')
        (told,) = (await run.checkpoint()).new_execution_state.operations
        assert told.callback_details is not None and (told.status, told.callback_details.result) == (
            OperationStatus.SUCCEEDED,
            '"yes"',
        )
        with pytest.raises(CallbackClosed):
            await on.first.complete_callback(TENANT, callback.callback_id, '"no"')
        await on.second.stop(TENANT, execution_id, None)
        with pytest.raises(StaleCheckpoint):
            await run.checkpoint(update("STEP", "START", "s1"))


async def test_completions_through_two_servers_at_once_are_all_recorded() -> None:
    async with stage() as on:
        execution_id = await on.begin()
        run = await on.take()
        await run.checkpoint(*(asks(f"ask{number}") for number in range(24)))
        await run.answer("PENDING")
        open_ones = await on.first.callbacks(TENANT, execution_id)
        assert len(open_ones) == 24
        await asyncio.gather(
            *(
                (on.first, on.second)[number % 2].complete_callback(TENANT, one.callback_id, str(number))
                for number, one in enumerate(open_ones)
            )
        )
        assert await on.second.callbacks(TENANT) == []
        run = await on.take(on.second)
        operations = run.work.event.initial_execution_state.operations  # type: ignore[union-attr]
        results = {op.callback_details.result for op in operations if op.callback_details}
        assert results == {str(number) for number in range(24)}


async def test_a_checkpoint_whose_answer_was_lost_is_recorded_once_by_whichever_server() -> None:
    async with stage() as on:
        await on.begin()
        run = await on.take()
        token = run.token
        await run.checkpoint(update("STEP", "START", "s1"), key="once")
        after = run.token
        run.token, run.service = token, on.second
        await run.checkpoint(update("STEP", "START", "s1"), key="once")
        assert run.token == after
        run.token = token
        with pytest.raises(StaleCheckpoint):
            await run.checkpoint(update("STEP", "START", "s2"), key="twice")


# ---------------------------------------------------------------------------------------------------- timers and leases


async def test_a_wait_ends_when_its_time_has_come_and_not_before() -> None:
    async with stage() as on:
        execution_id = await on.begin()
        run = await on.take()
        await run.checkpoint(waits(3600))
        await run.answer("PENDING")
        await on.pass_time(3500)
        assert await on.first.take(TENANT, on.worker, 0) is None
        await on.pass_time(101)
        run = await on.take(on.second)
        assert run.work.invocation == 2 and run.work.event.updated_operation_ids == ("wait",)  # type: ignore[union-attr]
        await run.answer("SUCCEEDED", "1")
        assert await on.status(execution_id) == "SUCCEEDED"


async def test_a_zombie_cannot_write() -> None:
    """Its lease ended while it stood still; another worker has gone on."""
    async with stage() as on:
        other = await on.second.register(TENANT, "w", (MAIN,))
        execution_id = await on.begin()
        zombie = await on.take()
        await on.pass_time(31)
        await on.pass_time(2)  # the pause after a lost worker
        run = await on.take(on.second, other.id)
        assert run.work.invocation == 2
        with pytest.raises(StaleCheckpoint, match="Invalid checkpoint token"):
            await zombie.checkpoint(update("STEP", "SUCCEED", "s1"))
        assert await on.first.beat(TENANT, on.worker, (zombie.flight,)) == (zombie.flight,)
        await zombie.answer("SUCCEEDED", '"of a zombie"')
        assert await on.second.beat(TENANT, other.id, (run.flight, Flight("exn_nobody", 1))) == (Flight("exn_nobody", 1),)
        await run.answer("SUCCEEDED", '"mine"')
        info = await on.first.describe(TENANT, execution_id)
        assert info.result == '"mine"'


async def test_a_worker_that_is_heard_of_keeps_its_lease() -> None:
    async with stage() as on:
        await on.begin()
        run = await on.take()
        for _ in range(3):
            await on.pass_time(20)
            assert await on.first.beat(TENANT, on.worker, (run.flight,)) == ()
        await on.pass_time(20)
        await run.checkpoint(update("STEP", "START", "s1"))  # a checkpoint is a word too
        await on.pass_time(20)
        await run.checkpoint(update("STEP", "SUCCEED", "s1"))


async def test_a_function_that_takes_too_long_is_invoked_again() -> None:
    async with stage(FunctionSpec("main", "v1", timeout_s=60)) as on:
        await on.begin()
        run = await on.take()
        for _ in range(3):
            await on.first.beat(TENANT, on.worker, (run.flight,))
            await on.pass_time(21)
        assert await on.first.beat(TENANT, on.worker, (run.flight,)) == (run.flight,)
        await on.pass_time(2)
        assert (await on.take()).work.invocation == 2


async def test_failures_in_a_row_end_it_with_the_last_error() -> None:
    async with stage() as on:
        execution_id = await on.begin()
        for number in range(5):
            run = await on.take()
            await on.first.fail(TENANT, run.flight, Failure.RAISED, ErrorObject(error_type="Boom", error_message=str(number)))
            await on.pass_time(300)
        info = await on.first.describe(TENANT, execution_id)
        assert info.status is ExecutionStatus.FAILED
        assert info.error is not None and (info.error.error_type, info.error.error_message) == ("Boom", "4")


async def test_whoever_waits_for_an_end_is_told() -> None:
    async with stage() as on:
        execution_id = await on.begin()
        assert await on.first.ended(TENANT, execution_id, 0) is None
        waiting = [asyncio.create_task(service.ended(TENANT, execution_id, 60)) for service in (on.first, on.second)]
        run = await on.take()
        await run.answer("SUCCEEDED", "7")
        for info in await asyncio.gather(*waiting):
            assert info is not None and info.result == "7"


async def test_a_worker_that_waits_is_given_what_comes() -> None:
    async with stage() as on:
        taking = asyncio.create_task(on.first.take(TENANT, on.worker, 60))
        await asyncio.sleep(0)
        execution_id = await on.begin()
        work = await taking
        assert work is not None and work.execution_id == execution_id


# ---------------------------------------------------------------------------------------------------- chained invokes


CHILD = FunctionSpec("child", "v1", is_durable=False)


async def settle(on: Stage) -> None:
    await on.first.settled()
    await on.second.settled()


async def test_a_chained_invoke_comes_back() -> None:
    async with stage(MAIN, CHILD) as on:
        parent = await on.begin()
        run = await on.take()
        await run.checkpoint(invokes("child", '{"x": 2}'), invokes("nobody", op="lost"))
        await run.answer("PENDING")
        await settle(on)
        work = await on.first.take(TENANT, on.worker, 0)
        assert work is not None and (work.function, work.event) == ("child", '{"x": 2}')
        child = work.execution_id
        await on.second.stop(TENANT, child, ErrorObject(error_type="Enough"))
        await settle(on)
        run = await on.take()
        statuses = {op.id: op.status for op in run.work.event.initial_execution_state.operations}  # type: ignore[union-attr]
        assert (run.work.execution_id, statuses["invoke"], statuses["lost"]) == (
            parent,
            OperationStatus.STOPPED,
            OperationStatus.FAILED,
        )


async def test_a_server_that_dies_before_it_starts_a_child_or_tells_a_parent_leaves_it_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with stage(MAIN, CHILD) as on:
        for service in (on.first, on.second):
            monkeypatch.setattr(service, "_follow", lambda coroutine: coroutine.close())
        await on.begin()
        run = await on.take()
        await run.checkpoint(invokes("child"))
        await run.answer("PENDING")
        assert await on.first.take(TENANT, on.worker, 0) is None
        await on.pass_time(6)
        await asyncio.gather(on.first.clockwork.sweep(), on.second.clockwork.sweep())
        work = await on.first.take(TENANT, on.worker, 0)
        assert work is not None and work.function == "child"
        await on.first.fail(TENANT, Flight(work.execution_id, work.invocation), Failure.INVALID)
        assert await on.first.take(TENANT, on.worker, 0) is None
        await on.pass_time(1)
        assert (await on.take()).work.event.updated_operation_ids == ("invoke",)  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------------------- operators


async def test_a_pause_holds_invocations_back_and_timers_go_on() -> None:
    async with stage() as on:
        execution_id = await on.begin()
        run = await on.take()
        await run.checkpoint(waits(10))
        await on.second.pause(TENANT, execution_id, "look", timeout_paused=True)
        assert await on.status(execution_id) == "PAUSING"
        assert (await run.checkpoint()).checkpoint_token is None
        await run.answer("PENDING")
        await on.pass_time(11)
        assert await on.status(execution_id) == "PAUSED"
        assert await on.first.take(TENANT, on.worker, 0) is None
        await on.first.resume(TENANT, execution_id, None)
        assert (await on.take()).work.event.updated_operation_ids == ("wait",)  # type: ignore[union-attr]
        with pytest.raises(Conflict):
            await on.first.delete(TENANT, execution_id)
        await on.first.stop(TENANT, execution_id, None)
        with pytest.raises(ExecutionEnded):
            await on.first.stop(TENANT, execution_id, None)


async def test_what_is_deleted_leaves_its_chain_and_none_of_its_facts() -> None:
    async with stage() as on:
        execution_id = await on.begin(input='"secret"')
        await on.first.stop(TENANT, execution_id, None)
        await on.first.delete(TENANT, execution_id)
        await on.first.clockwork.sweep()
        async with await psycopg.AsyncConnection.connect(on.database.url) as connection:
            cursor = await connection.execute("select count(*), count(fact) from execution_entries")
            assert await cursor.fetchone() == (3, 0)
            cursor = await connection.execute("select count(*) from execution_operations")
            assert await cursor.fetchone() == (0,)
        assert (await on.first.find(TENANT, ListQuery())).executions == ()


async def test_text_that_postgresql_cannot_look_into_is_kept_and_spoils_nothing() -> None:
    text = "a\0b \N{GRINNING FACE} \\u0000"
    async with stage(MAIN, CHILD) as on:
        execution_id = await on.begin(input=text)
        run = await on.take()
        step = update("STEP", "SUCCEED", "s1", payload=text)
        await run.checkpoint(step, asks(), invokes("child", text))
        await run.answer("PENDING")
        await on.first.settled()
        await on.pass_time(6)
        await on.first.clockwork.sweep()
        assert len(await on.first.callbacks(TENANT, execution_id)) == 1
        assert len((await on.first.find(TENANT, ListQuery())).executions) == 2
        work = await on.second.take(TENANT, on.worker, 0)
        assert work is not None and work.event == text
        await on.second.answer(TENANT, Flight(work.execution_id, work.invocation), _succeeded(text))
        await on.second.settled()
        told = {op.id: op for op in (await on.take()).work.event.initial_execution_state.operations}  # type: ignore[union-attr]
        assert told["s1"].step_details is not None and told["s1"].step_details.result == text
        assert told["invoke"].chained_invoke_details is not None and told["invoke"].chained_invoke_details.result == text
        assert await verify(on.database) == (2, [])


async def test_pages_of_a_list_have_each_execution_once() -> None:
    async with stage() as on:
        begun = [await on.begin(name=f"n{number}") for number in range(7)]
        await on.first.stop(TENANT, begun[0], None)
        for oldest_first in (False, True):
            names, marker = [], None
            while True:
                query = ListQuery(function="main", oldest_first=oldest_first, marker=marker, limit=3)
                found = await on.first.find(TENANT, query)
                names += [one.durable_execution_name for one in found.executions]
                marker = found.next_marker
                if marker is None:
                    break
            assert names == sorted((f"n{number}" for number in range(7)), reverse=not oldest_first)
        found = await on.first.find(TENANT, ListQuery(statuses=(ExecutionStatus.STOPPED,)))
        assert [one.durable_execution_name for one in found.executions] == ["n0"]
        for marker in ("x", "AAAA", "!"):
            with pytest.raises(InvalidRequest):
                await on.first.find(TENANT, ListQuery(marker=marker))


async def test_another_tenant_finds_nothing() -> None:
    async with stage() as on:
        execution_id = await on.begin()
        run = await on.take()
        await run.checkpoint(asks())
        (callback,) = await on.first.callbacks(TENANT, execution_id)
        for service in (on.first, on.second):  # one of them has the state in memory
            for call in (
                service.describe(OTHER, execution_id),
                service.stop(OTHER, execution_id, None),
                service.complete_callback(OTHER, callback.callback_id, "1"),
                service.inspect(OTHER, execution_id),
                service.callbacks(OTHER, execution_id),
                service.take(OTHER, on.worker, 0),
                service.answer(OTHER, run.flight, _succeeded()),
            ):
                with pytest.raises(NotFound):
                    await call
        assert await on.first.callbacks(OTHER) == []
        assert await on.status(execution_id) == "RUNNING"


def _succeeded(result: str | None = None) -> InvocationOutput:
    return InvocationOutput(status=InvocationStatus.SUCCEEDED, result=result)


async def test_a_worker_that_has_left_takes_nothing_and_may_still_answer() -> None:
    async with stage() as on:
        execution_id = await on.begin()
        run = await on.take()
        await on.begin()
        waiting = asyncio.create_task(on.second.take(TENANT, (await on.second.register(TENANT, "w", (CHILD,))).id, 60))
        await on.first.leave(TENANT, on.worker)
        with pytest.raises(Conflict, match="has left"):
            await on.first.take(TENANT, on.worker, 0)
        await run.answer("SUCCEEDED", "1")
        assert await on.status(execution_id) == "SUCCEEDED"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        with pytest.raises(NotFound):
            await on.first.take(TENANT, "wrk_nobody", 0)
