"""Commands of a build: their output's tail is in the error, and a cancelled one is gone with its children."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from perdure.core.errors import HostUnfit
from perdure.images.command import CommandFailed, require, run


async def test_lines_are_passed_on_and_returned() -> None:
    seen: list[str] = []
    assert await run(["sh", "-c", "echo a; echo b >&2"], what="It", on_line=seen.append) == "a\nb"
    assert seen == ["a", "b"]


async def test_a_failure_says_the_status_and_the_tail() -> None:
    with pytest.raises(CommandFailed) as caught:
        await run(["sh", "-c", "for i in $(seq 1 100); do echo line $i; done; exit 7"], what="The step")
    assert caught.value.message.startswith("The step failed with exit status 7. Its output ends with:\n")
    assert "line 100" in caught.value.message
    assert "line 50\n" not in caught.value.message


async def test_a_silent_failure_says_so() -> None:
    with pytest.raises(CommandFailed, match=r"The step failed with exit status 1\. It printed nothing\."):
        await run(["false"], what="The step")


async def test_a_signal_is_named() -> None:
    with pytest.raises(CommandFailed, match="was ended by signal 9"):
        await run(["sh", "-c", "kill -9 $$"], what="The step")


async def test_output_that_is_no_text_does_not_hurt() -> None:
    assert "\ufffd" in await run(["printf", r"\377\n"], what="It")


async def test_cancelling_ends_the_children_too(tmp_path: Path) -> None:
    started = asyncio.Event()
    pids: list[int] = []

    def on_line(line: str) -> None:
        pids.extend(int(pid) for pid in line.split())
        started.set()

    task = asyncio.create_task(run(["sh", "-c", "sleep 300 & echo $$ $!; wait"], what="It", on_line=on_line))
    await asyncio.wait_for(started.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(pids) == 2
    assert not _alive(pids[0])
    assert not _alive(pids[1])


def _alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped yet does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_a_missing_tool_names_its_package() -> None:
    with pytest.raises(HostUnfit, match="needs no-such-tool") as caught:
        require("no-such-tool", "no-such-package")
    assert "apt-get install no-such-package" in caught.value.hint
