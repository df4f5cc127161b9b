"""Programs whose start is given up: nothing of them stays, and nobody complains."""

from __future__ import annotations

import asyncio
import logging
import os
import select
from pathlib import Path

import pytest

from perdure.core.programs import end, start


async def test_a_cancelled_start_leaves_no_process_and_no_complaint(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Cancelled at each of many moments, programs that end at once among them: asyncio alone complains in some."""
    caplog.set_level(logging.WARNING, logger="asyncio")
    for turn in range(40):
        program = ("true",) if turn % 2 else ("sh", "-c", f"echo $$ > {tmp_path}/{turn}; exec sleep 100")
        task = asyncio.create_task(start(*program))
        for _ in range(turn // 2 % 5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not caplog.records
    for file in tmp_path.iterdir():
        if pid := file.read_text().strip():
            assert not Path("/proc", pid).exists()


async def test_a_program_that_is_missing_raises_also_when_nobody_waits() -> None:
    with pytest.raises(FileNotFoundError):
        await start("/no/such/program")
    task = asyncio.create_task(start("/no/such/program"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_ending_takes_what_the_program_started_along() -> None:
    process = await start("sh", "-c", "sleep 100 & echo $!; wait", stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    child = int(await process.stdout.readline())
    gone = select.poll()
    pidfd = os.pidfd_open(child)
    gone.register(pidfd, select.POLLIN)
    await end(process)
    assert gone.poll(30_000)
    os.close(pidfd)
    await end(process)  # safe twice
