"""Warm processes of Python handlers: how an invocation ends, whatever becomes of its process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure.wire.public.workers import FailureKind
from perdure.worker import processes
from perdure.worker.model import Answered, Failed, Job, StartFailed
from perdure.worker.processes import Handlers, PythonProcess, Surroundings

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("echo", "count", "broken", "leave", "crash", "leave_a_child", "hang", "talk")
DEADLINE_S = 60


def around(**more: str) -> Surroundings:
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    return Surroundings({**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more})


@asynccontextmanager
async def started(*places: str) -> AsyncIterator[PythonProcess]:
    named = places or tuple(f"{name}=tests.unit.worker.handlers:{name}" for name in NAMES)
    runner = await Handlers(named, around(SAID="hello")).start()
    try:
        yield runner
    finally:
        await runner.kill()


def job(function: str, event: Any = None) -> Job:
    arn = f"arn:aws:lambda:us-east-1:000000000000:function:{function}:$LATEST/durable-execution/a/b"
    return Job(function, arn, "r-1", event, 60)


async def until(holds: Callable[[], bool]) -> None:
    """Other processes have no event for it."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0)


def is_gone(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def test_a_process_is_warm_and_answers_again_and_again() -> None:
    async with started() as runner:
        assert [one.name for one in runner.functions] == list(NAMES)
        assert not any(one.is_durable for one in runner.functions) and len({one.digest for one in runner.functions}) == 1
        assert [await runner.run(job("count")) for _ in range(3)] == [Answered(b"1"), Answered(b"2"), Answered(b"3")]


async def test_large_events_and_answers_go_through() -> None:
    async with started() as runner:
        text = "ü" * 3_000_000
        outcome = await runner.run(job("echo", text))
        assert isinstance(outcome, Answered) and len(outcome.body) > 3_000_000


async def test_an_error_leaves_the_process_alive() -> None:
    async with started() as runner:
        outcome = await runner.run(job("broken", "order"))
        assert isinstance(outcome, Failed) and outcome.kind is FailureKind.RAISED
        assert (outcome.error_type, outcome.message) == ("ValueError", "bad order") and "in broken" in outcome.stack[0]
        assert await runner.run(job("count")) == Answered(b"1")


@pytest.mark.parametrize(
    ("function", "how"), [("leave", "exit code 3"), ("crash", "signal SIGSEGV"), ("leave_a_child", "exit code 4")]
)
async def test_a_process_that_dies_fails_its_invocation(function: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told at once, and how; what the process has left behind is killed (peers: row 26)."""
    monkeypatch.setattr(processes, "LAST_WORDS_S", 0.2)
    async with started() as runner:
        outcome = await runner.run(job(function))
        assert isinstance(outcome, Failed) and outcome.kind is FailureKind.RAISED
        assert outcome.error_type == "Runtime.ExitError" and how in outcome.message
        assert not runner.is_alive
        if function == "crash":
            assert outcome.stack[-1] == "last words"


async def test_who_is_killed_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    """A zombie does no more, nor does anything that it has started (durable: fault 19, peers: row 26)."""
    told = tmp_path / "told"
    async with started() as runner:
        running = asyncio.ensure_future(runner.run(job("hang", {"to": str(told)})))
        await until(told.exists)
        await runner.kill()
        outcome = await running
        assert isinstance(outcome, Failed) and "SIGKILL" in outcome.message
        for pid in told.read_text().split():
            await until(lambda pid=pid: is_gone(pid))  # type: ignore[misc]


async def test_what_a_handler_prints_is_printed_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    async with started() as runner:
        assert await runner.run(job("talk")) == Answered(b'"hello"')
    said = capfd.readouterr()
    assert (said.out, said.err) == ("to stdout\n", "to stderr\n")


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("nosuchmodule:main", "ModuleNotFoundError"),
        ("tests.unit.worker.handlers:missing", "AttributeError"),
        ("this:sits", "cannot be loaded"),
    ],
)
async def test_handlers_that_cannot_be_loaded(place: str, why: str) -> None:
    with pytest.raises(StartFailed, match=why):
        async with started(f"main={place}"):
            pass


async def test_a_module_that_ends_its_process(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(9)\n")
    with pytest.raises(StartFailed, match="exit code 9"):
        await Handlers(("main=ends:main",), around(PYTHONPATH=f"{ROOT / 'src'}:{tmp_path}")).start()


async def test_an_import_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "START_S", 0.5)
    (tmp_path / "hangs.py").write_text("import threading\nthreading.Event().wait()\n")
    with pytest.raises(StartFailed, match="not imported within"):
        await Handlers(("main=hangs:main",), around(PYTHONPATH=f"{ROOT / 'src'}:{tmp_path}")).start()
