"""A worker's calls to the server, and what it says while that is away."""

from __future__ import annotations

import random
from collections.abc import Iterable

from perdure.core.errors import PerdureError, RateLimited, Unavailable
from perdure.sdk import AsyncClient, _core
from perdure.sdk._core import Call
from perdure.wire import public
from perdure.wire.public.workers import (
    BeatAnswer,
    FailWork,
    FlightRef,
    RegisteredWorker,
    RegisterWorker,
    TakenWork,
    TakeWork,
    Work,
    WorkerBeat,
    WorkerFunction,
)
from perdure.worker.model import Failed, Plan, Served, Tell

#: For an answer beyond what the server was asked to wait.
ANSWER_S = 15.0
BACKOFF_S = 0.2
BACKOFF_MAX_S = 5.0
#: Limits of the body that tells a failure, in characters and lines.
TYPE_CHARS, TEXT_CHARS, LINES = 256, 4096, 200


def may_pass(error: PerdureError) -> bool:
    """Whether the same call may be answered later: the server is away, or starts, or has too much to do."""
    return isinstance(error, Unavailable | RateLimited) or error.retryable or error.status >= 500


class Contact:
    """One call each, made once. ``failed`` and ``reached`` tell people when the server goes away and comes back, once each."""

    def __init__(self, client: AsyncClient, tell: Tell) -> None:
        self._client = client
        self._tell = tell
        self._failures = 0

    def failed(self, error: PerdureError) -> float:
        """Seconds to wait before the next try. Raises ``error`` when that is of no use."""
        if not may_pass(error):
            raise error
        if self._failures == 0:
            self._tell("server-away", message=error.message)
        self._failures += 1
        delay_s = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(self._failures, 8))
        return delay_s * random.uniform(0.5, 1.0)  # noqa: S311 - so that many workers do not come back at once

    def reached(self) -> None:
        if self._failures:
            self._tell("server-back")
        self._failures = 0

    async def register(self, plan: Plan, functions: Iterable[Served]) -> RegisteredWorker:
        told = [
            WorkerFunction(
                name=one.name, digest=one.digest, timeout_s=plan.timeout_s, durable=one.is_durable, concurrency=plan.limit
            )
            for one in functions
        ]
        body = RegisterWorker(name=plan.name, functions=told)
        return await self._client.fetch(_post("/v1/workers", body), RegisteredWorker, timeout_s=ANSWER_S)

    async def leave(self, worker_id: str) -> None:
        await self._client.request(Call("DELETE", f"/v1/workers/{worker_id}", repeatable=True), timeout_s=ANSWER_S)

    async def take(self, worker_id: str, wait_s: float) -> Work | None:
        call = _post(f"/v1/workers/{worker_id}/take", TakeWork(wait_s=wait_s))
        return (await self._client.fetch(call, TakenWork, timeout_s=wait_s + ANSWER_S)).work

    async def beat(self, worker_id: str, flights: Iterable[FlightRef], timeout_s: float) -> set[tuple[str, int]]:
        """Those that are over."""
        call = _post(f"/v1/workers/{worker_id}/beat", WorkerBeat(flights=list(flights)), repeatable=True)
        found = await self._client.fetch(call, BeatAnswer, timeout_s=timeout_s)
        return {(one.execution_id, one.invocation) for one in found.over}

    async def answer(self, work: Work, body: bytes, *, is_durable: bool) -> None:
        headers, query = (("content-type", "application/json"),), () if is_durable else (("durable", "false"),)
        call = Call("POST", _flight_path(work, "answer"), query, content=body, repeatable=True, headers=headers)
        await self._client.request(call, timeout_s=ANSWER_S)

    async def fail(self, work: Work, failed: Failed) -> None:
        body = FailWork(
            failure=failed.kind,
            error_type=_clean(failed.error_type, TYPE_CHARS) or None,
            error_message=_clean(failed.message, TEXT_CHARS) or None,
            stack_trace=[_clean(line, TEXT_CHARS) for line in failed.stack[-LINES:]],
        )
        await self._client.request(_post(_flight_path(work, "fail"), body, repeatable=True), timeout_s=ANSWER_S)


def _post(path: str, body: public.Body, *, repeatable: bool = False) -> Call:
    return _core.post(path, body.model_dump(mode="json"), repeatable=repeatable)


def _flight_path(work: Work, what: str) -> str:
    return f"/v1/executions/{work.execution_id}/invocations/{work.invocation}/{what}"


def _clean(text: str, limit: int) -> str:
    """What a body can hold: no zero character and no half of a surrogate pair, and not more than the server reads."""
    return text.replace("\0", "").encode(errors="replace").decode()[:limit]
