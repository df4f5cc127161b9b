"""AWS Lambda's Runtime API on loopback, for runtime clients of any language: each process of the command has a port of its own.

Source: AWS Lambda's documentation of the runtime API, version 2018-06-01: ``GET …/runtime/invocation/next``,
``POST …/runtime/invocation/{id}/response``, ``POST …/runtime/invocation/{id}/error``, ``POST …/runtime/init/error``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perdure.core.clock import SystemClock
from perdure.wire.public.workers import FailureKind
from perdure.worker import launch
from perdure.worker.http import HOST, Loopback, Request, Response
from perdure.worker.model import Answered, Failed, Job, Outcome, Served, StartFailed
from perdure.worker.processes import START_S, Process, Surroundings

ROOT = "/2018-06-01/runtime"
OF_INVOCATION = re.compile(rf"^{ROOT}/invocation/([^/]+)/(response|error)$")
#: A handler of Node's, run by the bootstrap that is shipped.
NODE_PLACE = re.compile(r"^(.+\.[cm]?js):([\w$]+)$")
BOOTSTRAP = Path(__file__).with_name("bootstrap.mjs")


@dataclass(frozen=True, slots=True)
class Command:
    """A runtime client that serves one function: ``argv`` is run once for each process."""

    argv: tuple[str, ...]
    served: Served
    around: Surroundings

    async def start(self) -> RuntimeProcess:
        """A process that asks for its first invocation. Raises StartFailed."""
        runner = RuntimeProcess(self.served)
        try:
            await runner.start(self.argv, self.around)
        except BaseException:
            await runner.kill()
            raise
        return runner


class RuntimeProcess:
    """A process of the command with the four routes that it speaks to."""

    def __init__(self, served: Served) -> None:
        self.functions = (served,)
        self._served = served
        self._loopback = Loopback(self._answer)
        self._process: Process | None = None
        self._asked = asyncio.Event()
        self._waiting: asyncio.Future[Job | None] | None = None  # of the request for the next invocation
        self._running: tuple[Job, asyncio.Future[Outcome]] | None = None
        self._init_error: Failed | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive

    async def start(self, argv: Sequence[str], around: Surroundings) -> None:
        await self._loopback.open()
        environment = {
            **around.environment,
            "AWS_LAMBDA_RUNTIME_API": f"{HOST}:{self._loopback.port}",
            "AWS_LAMBDA_FUNCTION_NAME": self._served.name,
            "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
            "LAMBDA_TASK_ROOT": str(Path.cwd()),
        }
        command = (sys.executable, "-I", "-S", launch.__file__, *argv)
        self._process = await Process.launch(command, replace(around, environment=environment))
        is_ready = await self._before_its_end(self._asked.wait(), START_S)
        if self._init_error is not None:
            raise StartFailed(f"{argv[0]} could not load its handler: {self._init_error.message}.")
        if is_ready is None:
            why = f"did not ask for an invocation within {START_S:.0f} s" if self.is_alive else await self._how_it_ended()
            raise StartFailed(f"{argv[0]} {why}.", hint="The command must speak AWS Lambda's Runtime API.")

    async def _how_it_ended(self) -> str:
        assert self._process is not None
        await self._process.end()
        return f"ended with exit code {self._process.process.returncode} before it asked for an invocation"

    async def run(self, job: Job) -> Outcome:
        assert self._process is not None
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._running = (job, answer)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(job)
        else:
            self._asked.clear()  # it has answered the one before and will ask in a moment
        try:
            outcome = await self._before_its_end(answer, None)
        finally:
            self._running = None
        return outcome or await self._process.end()

    async def _before_its_end(self, what: Any, limit_s: float | None) -> Any:
        """What the process does, or None when it ends before that or takes too long."""
        assert self._process is not None
        doing = asyncio.ensure_future(what)
        ending = asyncio.ensure_future(self._process.process.wait())
        try:
            await asyncio.wait({doing, ending}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            return doing.result() if doing.done() else None
        finally:
            doing.cancel()
            ending.cancel()
            await asyncio.gather(doing, ending, return_exceptions=True)

    async def kill(self) -> None:
        if self._process is not None:
            await self._process.kill()
        await self._loopback.close()

    # ----------------------------------------------------------------------------------------------------------------- routes

    async def _answer(self, request: Request) -> Response:
        if request.method == "GET" and request.path == f"{ROOT}/invocation/next":
            return await self._next()
        if request.method == "POST" and request.path == f"{ROOT}/init/error":
            self._init_error = _failed(request)
            self._asked.set()
            return _accepted()
        told = OF_INVOCATION.match(request.path)
        if request.method != "POST" or told is None:
            return _refused(404, "NotFound", "The runtime API has no such route.")
        if self._running is None or self._running[0].request_id != told[1] or self._running[1].done():
            return _refused(400, "InvalidRequestID", "This is not the invocation that runs.")
        self._running[1].set_result(_failed(request) if told[2] == "error" else Answered(request.body or b"null"))
        return _accepted()

    async def _next(self) -> Response:
        """The next invocation, however long that takes. Who asks again has given up the question before."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        self._waiting = waiting = asyncio.get_running_loop().create_future()
        if self._running is not None and not self._running[1].done():
            if self._asked.is_set():
                said = "The runtime client asked for the next invocation before it answered this one."
                self._running[1].set_result(Failed(FailureKind.RAISED, "Runtime.NoAnswer", said))
            else:
                waiting.set_result(self._running[0])
        self._asked.set()
        job = await waiting
        if job is None:
            return _refused(410, "Superseded", "Another request for the next invocation came after this one.")
        deadline_ms = int(SystemClock().now().timestamp() * 1000 + job.timeout_s * 1000)
        headers = {
            "content-type": "application/json",
            "lambda-runtime-aws-request-id": job.request_id,
            "lambda-runtime-deadline-ms": str(deadline_ms),
            "lambda-runtime-invoked-function-arn": job.function_arn,
            "lambda-runtime-trace-id": f"Root={job.request_id}",
        }
        return Response(200, json.dumps(job.event).encode(), headers)


def _failed(request: Request) -> Failed:
    """As runtime clients tell an error; one that cannot be read is an error all the same."""
    kind = request.header(b"lambda-runtime-function-error-type")
    try:
        told = json.loads(request.body)
        stack = told.get("stackTrace") or []
        lines = tuple(str(line) for line in stack) if isinstance(stack, list) else (str(stack),)
        return Failed(FailureKind.RAISED, str(told.get("errorType") or kind), str(told.get("errorMessage") or ""), lines)
    except (ValueError, AttributeError):
        return Failed(FailureKind.RAISED, kind or "Runtime.UnknownError", request.body[:1000].decode(errors="replace"))


def _accepted() -> Response:
    return Response(202, b'{"status":"OK"}', {"content-type": "application/json"})


def _refused(status: int, kind: str, why: str) -> Response:
    body = json.dumps({"errorType": kind, "errorMessage": why}).encode()
    return Response(status, body, {"content-type": "application/json"})


def digest(argv: Sequence[str]) -> str:
    """Of the command, and of the files that it names: what else it loads nobody can tell."""
    parts = hashlib.sha256()
    for word in argv:
        path = Path(word)
        parts.update(f"{word}\0".encode(errors="surrogateescape"))
        if path.is_file():
            parts.update(hashlib.sha256(path.read_bytes()).digest())
    return parts.hexdigest()
