"""Lambda's Runtime API, spoken by a small client in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure.wire.public.workers import FailureKind
from perdure.worker import runtime
from perdure.worker.model import Answered, Failed, Job, Outcome, Served, StartFailed
from perdure.worker.processes import Surroundings
from perdure.worker.runtime import Command, RuntimeProcess

CLIENT = str(Path(__file__).with_name("runtime_client.py"))
ARN = "arn:aws:lambda:us-east-1:000000000000:function:main:$LATEST"


def command(*argv: str) -> Command:
    return Command(argv, Served("main", "v1", True), Surroundings(dict(os.environ)))


@asynccontextmanager
async def started(kind: str = "serve") -> AsyncIterator[RuntimeProcess]:
    runner = await command(sys.executable, CLIENT, kind).start()
    try:
        yield runner
    finally:
        await runner.kill()


async def ran(runner: RuntimeProcess, **event: Any) -> Outcome:
    return await runner.run(Job("main", f"{ARN}/durable-execution/n/e", f"r-{len(event)}", event, 60))


async def test_an_invocation_has_what_lambda_says_of_one() -> None:
    async with started() as runner:
        for number in range(3):
            outcome = await ran(runner, n=number)
            assert isinstance(outcome, Answered)
            told = json.loads(outcome.body)
            assert (told["event"], told["function"]) == ({"n": number}, "main")
            assert told["headers"]["Invoked-Function-Arn"] == ARN and told["headers"]["Trace-Id"]
            assert 0 < int(told["headers"]["Deadline-Ms"]) / 1000 - time.time() <= 60


async def test_errors_are_told_as_they_are() -> None:
    async with started() as runner:
        assert await ran(runner, do="error") == Failed(FailureKind.RAISED, "Oops", "bad", ("line 1",))
        assert await ran(runner, do="odd-error") == Failed(FailureKind.RAISED, "Odd", "no json")
        assert isinstance(await ran(runner), Answered)


async def test_a_client_that_dies_fails_its_invocation() -> None:
    async with started() as runner:
        outcome = await ran(runner, do="die")
        assert isinstance(outcome, Failed) and outcome.error_type == "Runtime.ExitError" and "exit code 7" in outcome.message
        assert not runner.is_alive


async def test_a_client_that_asks_again_without_an_answer_fails_its_invocation() -> None:
    async with started() as runner:
        outcome = await ran(runner, do="forget")
        assert isinstance(outcome, Failed) and outcome.error_type == "Runtime.NoAnswer"
        assert isinstance(await ran(runner), Answered)


@pytest.mark.parametrize(("kind", "status"), [("wrong-id", b"400"), ("wrong-route", b"404")])
async def test_what_the_api_refuses(kind: str, status: bytes) -> None:
    async with started() as runner:
        assert await ran(runner, do=kind) == Answered(status)


async def test_commands_that_do_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartFailed, match="no such module"):
        await command(sys.executable, CLIENT, "init-error").start()
    with pytest.raises(StartFailed, match="exit code 5 before it asked"):
        await command(sys.executable, CLIENT, "ends").start()
    with pytest.raises(StartFailed, match="exit code 127"):
        await command("no-such-command-anywhere").start()
    monkeypatch.setattr(runtime, "START_S", 0.3)
    with pytest.raises(StartFailed, match="did not ask"):
        await command("sleep", "1000").start()


def test_the_digest_is_of_the_command_and_its_files(tmp_path: Path) -> None:
    app = tmp_path / "app.mjs"
    app.write_text("1")
    first = runtime.digest(["node", str(app)])
    assert runtime.digest(["node", "--flag", str(app)]) != first
    app.write_text("2")
    assert runtime.digest(["node", str(app)]) != first
