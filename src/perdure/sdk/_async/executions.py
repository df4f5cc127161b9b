"""Durable executions from outside: start them, wait for them, look at them, stop them, and complete their callbacks."""

from __future__ import annotations

import builtins
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Unpack, cast

from perdure.core.errors import InvalidRequest, PerdureError
from perdure.sdk import _core, _runs
from perdure.sdk._acompat import apause
from perdure.sdk._core import Call
from perdure.sdk._events import histories_event
from perdure.sdk._runs import ExecutionFilters, StartOptions, Waiter, callback_path, execution_path
from perdure.wire import public

if TYPE_CHECKING:
    from perdure.sdk._async.client import AsyncClient


class AsyncExecution:
    """One execution. ``info`` is what the server said last; ``refresh`` asks again.

    >>> order = await client.executions.get("order-1")
    >>> order.info.function, order.info.status.value
    ('greet', 'SUCCEEDED')
    """

    def __init__(self, client: AsyncClient, execution_id: str, arn: str, info: public.ExecutionInfo | None = None) -> None:
        self._client = client
        self._info = info
        self.id = execution_id
        self.arn = arn
        self.is_new = False  # this handle's start made it

    @property
    def info(self) -> public.ExecutionInfo:
        if self._info is None:
            raise InvalidRequest("Nothing is known of this execution yet.", hint="Call refresh() first.")
        return self._info

    async def refresh(self) -> public.ExecutionInfo:
        """How it is now: what it was given, what became of it, and why it will move again.

        >>> order = await client.executions.start("greet", {"name": "Ada"})
        >>> (await order.refresh()).standing.reason.value
        'invoke'
        """
        self._info = await self._client.fetch(_core.get(execution_path(self.id)), public.ExecutionInfo)
        return self._info

    async def wait(self, timeout_s: float | None = None) -> public.ExecutionOutcome:
        """Until it has ended, however long that takes and whatever the server does meanwhile; says how. Raises ExecutionRunning
        after ``timeout_s`` (None: never); the execution goes on then.

        >>> order = await client.executions.get("order-1")
        >>> (await order.wait()).status.value
        'SUCCEEDED'
        """
        waiter = Waiter(self.id, timeout_s, time.monotonic())
        while True:
            wait_s = waiter.next_wait_s(time.monotonic())
            try:
                limit_s = wait_s + _core.PATIENCE_S
                outcome = await self._client.fetch(waiter.next_call(wait_s), public.ExecutionOutcome, timeout_s=limit_s)
            except PerdureError as error:
                await apause(waiter.broke(error, time.monotonic()))
                continue
            if waiter.feed(outcome, time.monotonic()):
                return outcome

    async def result(self, timeout_s: float | None = None) -> Any:
        """What its function returns, once it has. Raises ExecutionFailed, with the function's error, ExecutionTimedOut or
        ExecutionStopped where it ends without a result, and ExecutionRunning after ``timeout_s``.

        >>> order = await client.executions.get("order-1")
        >>> await order.result()
        {'hello': 'Ada'}
        """
        return _runs.result_of(await self.wait(timeout_s))

    async def history(self, *, newest_first: bool = False, data: bool = True) -> AsyncIterator[dict[str, Any]]:
        """Its events as AWS has them, with AWS's names; times are ISO 8601. Without ``data``: no inputs, results and errors.

        >>> order = await client.executions.get("order-1")
        >>> [event["EventType"] async for event in order.history()]
        ['ExecutionStarted', 'InvocationCompleted', 'ExecutionSucceeded']
        """
        call = _core.get(execution_path(self.id, "history"), newest_first=newest_first, data=data, limit=_core.PAGE)
        async for page in self._client.pages(call, public.ExecutionHistory):
            for event in page.events:
                yield event

    async def operations(self) -> builtins.list[public.OperationInfo]:
        """All its operations as they are now, in order of their creation; the first one is the execution itself.

        >>> review = await client.executions.get("review-1")
        >>> [(one.type.value, one.name, one.status.value) for one in await review.operations()][1:]
        [('CALLBACK', 'approval', 'STARTED')]
        """
        pages = self._client.pages(_core.get(execution_path(self.id, "operations"), limit=_core.PAGE), public.OperationList)
        return [operation async for page in pages for operation in page.operations]

    async def stop(self, message: str | None = None, *, error_type: str | None = None) -> public.StoppedExecution:
        """End it now; ``message`` and ``error_type`` are told as its error. Raises ExecutionEnded for one that has ended.

        >>> order = await client.executions.start("greet")
        >>> stopped = await order.stop("nobody wants it")
        >>> (await order.wait()).error.message
        'nobody wants it'
        """
        body = _runs.body_of(public.StopExecution, {"error_message": message, "error_type": error_type})
        return await self._client.fetch(_core.post(execution_path(self.id, "stop"), body), public.StoppedExecution)

    async def pause(self, reason: str | None = None, *, timeout_paused: bool = True) -> public.ExecutionInfo:
        """Have it invoked no more until it is resumed. Timers and callbacks go on; its own timeout does unless it is paused too.

        >>> order = await client.executions.start("greet")
        >>> (await order.pause("the printer is broken")).status.value
        'PAUSED'
        """
        body = _runs.body_of(public.PauseExecution, {"reason": reason, "timeout_paused": timeout_paused})
        return await self._changed("pause", body)

    async def resume(self, reason: str | None = None, *, code: str | None = None) -> public.ExecutionInfo:
        """Let a paused one go on. ``code``: any or exact, from now on.

        >>> order = await client.executions.start("greet")
        >>> paused = await order.pause()
        >>> (await order.resume()).status.value
        'RUNNING'
        """
        return await self._changed("resume", _runs.body_of(public.ResumeExecution, {"reason": reason, "code": code}))

    async def retry(self, *, name: str | None = None) -> AsyncExecution:
        """Resume a paused one, which is returned; of one that has ended, start another with the same function and input.

        >>> order = await client.executions.get("order-1")
        >>> again = await order.retry()
        >>> again.id == order.id, (await again.refresh()).input
        (False, {'name': 'Ada'})
        """
        body = _runs.body_of(public.RetryExecution, {"name": name})
        told = await self._client.fetch(_core.post(execution_path(self.id, "retry"), body), public.RetriedExecution)
        again = AsyncExecution(self._client, told.execution_id, told.arn)
        again.is_new = not told.resumed
        return again

    async def delete(self) -> None:
        """Delete it with its history. Raises Conflict for one that has not ended.

        >>> order = await client.executions.get("order-1")
        >>> await order.delete()
        """
        await self._client.request(Call("DELETE", execution_path(self.id)))

    async def _changed(self, verb: str, body: dict[str, Any]) -> public.ExecutionInfo:
        self._info = await self._client.fetch(_core.post(execution_path(self.id, verb), body), public.ExecutionInfo)
        return self._info


class AsyncExecutions:
    """All executions of the tenant: ``client.executions``.

    >>> order = await client.executions.start("greet", {"name": "Ada"}, name="order-7")
    >>> order.is_new
    True
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def start(self, function: str, input: Any = None, **options: Unpack[StartOptions]) -> AsyncExecution:
        """Start one; it goes on without this program. ``input`` is JSON; None: none at all. With a ``name`` it is idempotent: the
        same name and input again is the same execution. Raises NotFound for a function that no worker has ever served, and
        AlreadyExists for a name that is taken by one with another input.

        >>> first = await client.executions.start("greet", {"name": "Ada"}, name="order-7")
        >>> second = await client.executions.start("greet", {"name": "Ada"}, name="order-7")
        >>> first.id == second.id, second.is_new
        (True, False)
        """
        told = await self._client.fetch(_runs.start(function, input, options), public.StartedExecution)
        started = AsyncExecution(self._client, told.execution_id, told.arn)
        started.is_new = told.is_new
        return started

    async def get(self, ref: str) -> AsyncExecution:
        """One by its id, its ARN or a name (then the newest that has it). Raises NotFound.

        >>> (await client.executions.get("order-1")).info.result
        {'hello': 'Ada'}
        """
        info = await self._client.fetch(_core.get(execution_path(ref)), public.ExecutionInfo)
        return AsyncExecution(self._client, info.execution_id, info.arn, info)

    async def list(self, **filters: Unpack[ExecutionFilters]) -> AsyncIterator[public.ExecutionItem]:
        """Newest first, fetched in pages as they are needed.

        >>> [one.name async for one in client.executions.list(status="RUNNING")]
        ['review-1']
        """
        async for page in self._client.pages(_runs.find(filters), public.ExecutionList):
            for one in page.executions:
                yield one

    async def functions(self) -> builtins.list[public.FunctionInfo]:
        """The functions that workers have served, with how many serve each now, and what waits for one.

        >>> [(one.name, one.workers, one.executions) for one in await client.executions.functions()]
        [('greet', 1, 1)]
        """
        return (await self._client.fetch(_core.get("/v1/functions"), public.FunctionList)).functions


class AsyncCallbacks:
    """Open callbacks of all executions: ``client.callbacks``.

    >>> [one.name for one in await client.callbacks.list()]
    ['approval']
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def list(self, execution: str | None = None) -> builtins.list[public.CallbackInfo]:
        """Those that may still be completed, oldest first; with ``execution`` (id, ARN or name) only of that one.

        >>> [one.function for one in await client.callbacks.list("review-1")]
        ['greet']
        """
        return (await self._client.fetch(_core.get("/v1/callbacks", execution=execution), public.CallbackList)).callbacks

    async def succeed(self, callback_id: str, result: Any = None) -> None:
        """Complete one with a result, which is JSON; None: none at all. Raises CallbackClosed for one that was completed before
        or has timed out.

        >>> (approval,) = await client.callbacks.list()
        >>> await client.callbacks.succeed(approval.callback_id, {"approved": True})
        """
        body = {} if result is None else {"result": _runs.json_value(result, "result")}
        await self._client.request(_core.post(callback_path(callback_id, "succeed"), body))

    async def fail(self, callback_id: str, message: str | None = None, *, error_type: str | None = None) -> None:
        """Complete one with an error, which its function sees. Raises CallbackClosed.

        >>> (approval,) = await client.callbacks.list()
        >>> await client.callbacks.fail(approval.callback_id, "refused")
        """
        body = _runs.body_of(public.FailCallback, {"error_message": message, "error_type": error_type})
        await self._client.request(_core.post(callback_path(callback_id, "fail"), body))

    async def heartbeat(self, callback_id: str) -> None:
        """Say that somebody still works on it: its heartbeat's timeout begins anew.

        >>> (approval,) = await client.callbacks.list()
        >>> await client.callbacks.heartbeat(approval.callback_id)
        """
        await self._client.request(_core.post(callback_path(callback_id, "heartbeat"), repeatable=True))


class AsyncDurable:
    """The part of ``AsyncClient`` that leads to durable executions, and to what is recorded of everything.

    >>> client.executions, client.callbacks
    (<perdure.sdk...Executions object at ...>, <perdure.sdk...Callbacks object at ...>)
    """

    @property
    def executions(self) -> AsyncExecutions:
        return AsyncExecutions(cast("AsyncClient", self))

    @property
    def callbacks(self) -> AsyncCallbacks:
        return AsyncCallbacks(cast("AsyncClient", self))

    async def verify_histories(self) -> AsyncIterator[public.HistoriesEvent]:
        """Check every hash of every workspace's thread and every execution's history. Yields the progress, ``violation`` for each
        history in which something is wrong, last ``done``. Changes nothing; only the operator may.

        >>> async for event in client.verify_histories():
        ...     print(event.type, event.executions, event.violations)
        done 0 0
        """
        async for line in cast("AsyncClient", self).ndjson(_core.post("/v1/histories/verify")):
            event = histories_event(line)
            if event.type != "heartbeat":
                yield event

    async def aws_access(self) -> public.AwsAccess:
        """What AWS's clients (boto3, the durable SDKs) are configured with, to call this server as whoever calls this.

        >>> access = await client.aws_access()
        >>> access.aws_access_key_id[:4]
        'key_'
        """
        return await cast("AsyncClient", self).fetch(_core.get("/v1/keys/aws"), public.AwsAccess)
