"""``perdure bench runs``: durable executions, beside DBOS on the same PostgreSQL with the same work.

A *step* is begun and succeeds with 200 characters. In process: the engine and its commit, without HTTP. Over HTTP: keep-alive
connections that sign each request with SigV4, as AWS's clients do. AWS's SDK runs in a process of its own, and so does DBOS,
which comes with ``pip install 'perdure[bench]'``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import httpx2

from perdure.core import programs
from perdure.core.clock import SystemClock
from perdure.core.errors import HostUnfit
from perdure.core.ids import DEFAULT_TENANT
from perdure.db.database import Database, connect_migrated
from perdure.db.embedded import EmbeddedPostgres
from perdure.demo import observe
from perdure.demo.server import Server, temporary_server
from perdure.demo.stats import Baseline, Goal, Row, rows
from perdure.demo.steps import expect
from perdure.demo.suite import Progress
from perdure.runs.protocol import CheckpointRequest, InvocationInput
from perdure.runs.service.model import Assignment, FunctionSpec, NewExecution
from perdure.runs.service.service import ExecutionService

SAMPLES = 20
CLIENTS = 16
#: For each sample: steps of each client, of a history, executions that wait.
STEPS = 20
HISTORY = 250
WAITING = 500
IDLE_S = 10.0
RESULT = json.dumps("x" * 200)
#: What DBOS is measured with, by the names that its program prints.
DBOS = {"alone_ms": "DBOS: one step after another", "together_ms": "DBOS: 16 workflows at a time", "replay_ms": "DBOS: the same"}


async def run(say: Progress, count: int = SAMPLES) -> list[Row]:
    """The whole suite, about five minutes. Raises PerdureError when something does not work at all."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with temporary_server(listen_port=port, pool_size=0, idle_timeout_s=0.0, rate_limit_per_s=0.0) as server:
        bench = await _Bench.of(server, say, count)
        dbos = await bench.dbos()
        sdk = await bench.sdk()
        together_ms = await bench.in_process()
        async with bench.driver() as driver:
            http_ms = await driver.together()
            callback_ms = await driver.callbacks()
            waiting = await driver.waiting()
    return [
        _beside("step in process, engine and commit, 16 at a time", together_ms, dbos, "together_ms", 1 / 8),
        _beside("step over HTTP with SigV4, 16 at a time", http_ms, dbos, "together_ms", 1 / 1.5),
        _beside("step with AWS's SDK, one after another", sdk["alone_ms"], dbos, "alone_ms", 3),
        _beside(f"replay of {bench.history:,} steps to the next new one", sdk["replay_ms"], dbos, "replay_ms", 1 / 15),
        *rows("callback completed to its function invoked", callback_ms, "ms", goal=Goal(at_most=20)),
        *waiting,
    ]


def _beside(name: str, value: float, dbos: dict[str, float], figure: str, times: float) -> Row:
    baseline = Baseline(DBOS[figure], dbos[figure]) if figure in dbos else None
    note = "" if baseline else "DBOS is not there: pip install 'perdure[bench]'"
    return Row(name, value, "ms", baseline, Goal(times=times) if baseline else None, note)


@dataclass(slots=True)
class _Bench:
    server: Server
    say: Progress
    count: int
    key: str
    access: dict[str, str]
    port: int

    @classmethod
    async def of(cls, server: Server, say: Progress, count: int) -> _Bench:
        key = server.settings.api_key_file.read_text().strip()
        port = server.settings.listen_port
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}) as http:
            access = (await http.get(f"http://127.0.0.1:{port}/v1/keys/aws")).json()
        return cls(server, say, count, key, access, port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def history(self) -> int:
        return self.count * HISTORY

    async def _program(self, name: str, *words: object) -> dict[str, float]:
        path = files("perdure.demo") / "programs" / name
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        process = await programs.start(sys.executable, str(path), *map(str, words), **pipes)
        try:
            out, err = await process.communicate()
        except asyncio.CancelledError:
            await programs.end(process)
            raise
        if process.returncode:
            raise HostUnfit(f"{name} failed: {err.decode(errors='replace').strip()[-500:]}")
        found: dict[str, float] = json.loads(out.splitlines()[-1])
        return found

    async def dbos(self) -> dict[str, float]:
        if importlib.util.find_spec("dbos") is None:
            return {}
        self.say("steps on DBOS")
        url = await self._new_database("dbos")
        found = await self._program("dbos_steps.py", "steps", url, self.count * STEPS, CLIENTS)
        await self._program("dbos_steps.py", "die", url, self.history, 1)
        return found | await self._program("dbos_steps.py", "replay", url, self.history, 1)

    async def sdk(self) -> dict[str, float]:
        self.say("steps with AWS's SDK")
        pair = (self.access["aws_access_key_id"], self.access["aws_secret_access_key"])
        return await self._program("durable_steps.py", self.url, self.key, *pair, self.count * STEPS, self.history)

    async def _new_database(self, name: str) -> str:
        postgres = EmbeddedPostgres(self.server.settings.home)
        database = Database(postgres.url(), max_connections=1)
        await database.open()
        try:
            await database.run(f"bench.new_{name}")
        finally:
            await database.close()
        return postgres.url(f"bench_{name}")

    async def in_process(self) -> float:
        """Milliseconds for each step of ``CLIENTS`` executions at a time."""
        self.say("steps in process")
        database = await connect_migrated(await self._new_database("runs"))
        service = ExecutionService(database, SystemClock())
        try:
            await service.start()
            worker = await service.register(DEFAULT_TENANT, "bench", (FunctionSpec("bench", "1"),))
            players = [await _Player.begin(service, worker.id) for _ in range(CLIENTS)]
            steps = self.count * STEPS
            begun = time.perf_counter()
            await asyncio.gather(*(player.play(steps) for player in players))
            return (time.perf_counter() - begun) * 1000 / (steps * CLIENTS)
        finally:
            await service.close()
            await database.close()

    @asynccontextmanager
    async def driver(self) -> AsyncIterator[_Driver]:
        limits = httpx2.Limits(max_connections=CLIENTS * 2, max_keepalive_connections=CLIENTS * 2)
        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=300, limits=limits) as http:
            functions = [{"name": "bench", "digest": "1", "timeout_s": 3600}]
            worker = (await http.post("/v1/workers", json={"functions": functions})).json()["worker_id"]
            yield _Driver(self, http, worker)


def _step(number: int) -> list[dict[str, Any]]:
    of = {"Id": f"s{number}", "Type": "STEP", "Name": f"s{number}", "SubType": "Step"}
    return [{**of, "Action": "START"}, {**of, "Action": "SUCCEED", "Payload": RESULT}]


@dataclass(slots=True)
class _Player:
    """One execution in process, step after step."""

    service: ExecutionService
    work: Assignment
    token: str

    @classmethod
    async def begin(cls, service: ExecutionService, worker_id: str) -> _Player:
        await service.begin(NewExecution(DEFAULT_TENANT, "bench"))
        work = await service.take(DEFAULT_TENANT, worker_id, 60)
        assert work is not None and isinstance(work.event, InvocationInput)
        return cls(service, work, work.event.checkpoint_token)

    async def play(self, steps: int) -> None:
        for number in range(steps):
            body = {"CheckpointToken": self.token, "Updates": _step(number), "ClientToken": f"c{number}"}
            request = CheckpointRequest.model_validate(body)
            answer = await self.service.checkpoint(DEFAULT_TENANT, self.work.execution_id, request)
            self.token = answer.checkpoint_token or ""


@dataclass(slots=True)
class _Driver:
    """Raw clients over HTTP: what a function's SDK sends, without the SDK."""

    bench: _Bench
    http: httpx2.AsyncClient
    worker: str
    signer: Any = field(init=False)

    def __post_init__(self) -> None:
        from botocore.auth import SigV4Auth  # type: ignore[import-untyped]
        from botocore.credentials import Credentials  # type: ignore[import-untyped]

        access = self.bench.access
        pair = Credentials(access["aws_access_key_id"], access["aws_secret_access_key"])
        self.signer = SigV4Auth(pair, "lambda", "us-east-1")

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self.http.post(path, json=body)
        expect(answer.is_success, f"{path} answered {answer.status_code}: {answer.text[:300]}")
        found: dict[str, Any] = answer.json()
        return found

    async def take(self) -> dict[str, Any]:
        await self._post("/v1/executions", {"function": "bench"})
        work: dict[str, Any] = (await self._post(f"/v1/workers/{self.worker}/take", {"wait_s": 60}))["work"]
        return work

    async def checkpoint(self, work: dict[str, Any], token: str, updates: list[dict[str, Any]], key: str) -> dict[str, Any]:
        """Signed as AWS's clients do it."""
        from urllib.parse import quote

        from botocore.awsrequest import AWSRequest  # type: ignore[import-untyped]

        url = f"{self.bench.url}/2025-12-01/durable-executions/{quote(work['arn'], safe='')}/checkpoint"
        data = json.dumps({"CheckpointToken": token, "Updates": updates, "ClientToken": key}).encode()
        request = AWSRequest("POST", url, headers={"content-type": "application/json"}, data=data)
        self.signer.add_auth(request)
        answer = await self.http.post(url, content=data, headers=dict(request.headers.items()))
        expect(answer.is_success, f"A checkpoint was answered {answer.status_code}: {answer.text[:300]}")
        found: dict[str, Any] = answer.json()
        return found

    async def _play(self, work: dict[str, Any], steps: int) -> None:
        token = work["event"]["CheckpointToken"]
        for number in range(steps):
            token = (await self.checkpoint(work, token, _step(number), f"c{number}"))["CheckpointToken"]

    async def _pending(self, work: dict[str, Any]) -> None:
        await self._post(f"/v1/executions/{work['execution_id']}/invocations/{work['invocation']}/answer", {"Status": "PENDING"})

    async def together(self) -> float:
        self.bench.say("steps over HTTP")
        works = [await self.take() for _ in range(CLIENTS)]
        steps = self.bench.count * STEPS // 2
        begun = time.perf_counter()
        await asyncio.gather(*(self._play(work, steps) for work in works))
        return (time.perf_counter() - begun) * 1000 / (steps * CLIENTS)

    async def callbacks(self) -> list[float]:
        """Milliseconds from the completion's request to the worker that waits having the next invocation."""
        self.bench.say("callbacks")
        samples = []
        for number in range(self.bench.count * 2):
            work = await self.take()
            update = {"Id": "ask", "Type": "CALLBACK", "Action": "START"}
            answer = await self.checkpoint(work, work["event"]["CheckpointToken"], [update], f"k{number}")
            callback_id = answer["NewExecutionState"]["Operations"][0]["CallbackDetails"]["CallbackId"]
            await self._pending(work)
            waiting = asyncio.create_task(self._post(f"/v1/workers/{self.worker}/take", {"wait_s": 60}))
            await self.http.get("/v1/health")  # sent after it, so the worker waits
            begun = time.perf_counter()
            done = await self.http.post(f"/2025-12-01/durable-execution-callbacks/{callback_id}/succeed", content=b'"yes"')
            expect(done.is_success, f"A callback was answered {done.status_code}.")
            await waiting
            samples.append((time.perf_counter() - begun) * 1000)
        return samples

    async def waiting(self) -> list[Row]:
        """What the server takes for executions that wait for a day."""
        count, pid = self.bench.count * WAITING, self.bench.server.pid
        self.bench.say(f"{count:,} executions that wait")
        before = observe.resident_bytes(pid)
        todo = iter(range(count))
        await asyncio.gather(*(self._wait_all(todo) for _ in range(CLIENTS)))
        await asyncio.sleep(IDLE_S)
        grown = (observe.resident_bytes(pid) - before) / 1e6
        return [
            Row(
                f"memory of {count:,} waiting executions",
                grown,
                "MB",
                goal=Goal(at_most=20),
                note="RSS of the server over before",
            ),
            Row(f"commits while {count:,} wait", await self._commits(), "/s", goal=Goal(at_most=5), note="all of the database"),
        ]

    async def _wait_all(self, todo: Any) -> None:
        update = {"Id": "day", "Type": "WAIT", "Action": "START", "WaitOptions": {"WaitSeconds": 86_400}}
        for number in todo:
            work = await self.take()
            await self.checkpoint(work, work["event"]["CheckpointToken"], [update], f"w{number}")
            await self._pending(work)

    async def _commits(self) -> float:
        database = Database(EmbeddedPostgres(self.bench.server.settings.home).url(), max_connections=1)
        await database.open()
        try:
            first = await database.one("metrics.commits")
            await asyncio.sleep(IDLE_S)
            second = await database.one("metrics.commits")
        finally:
            await database.close()
        assert first is not None and second is not None, "the database counts its commits"
        return float(second["commits"] - first["commits"]) / IDLE_S
