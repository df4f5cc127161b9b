"""What tasks wait for, as a hanging server tells it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from perdure.core import waits


async def _inner(never: asyncio.Event) -> AsyncIterator[int]:
    await never.wait()
    yield 1


async def _outer(never: asyncio.Event) -> None:
    async with asyncio.timeout(60):
        async for _ in _inner(never):
            pass


async def test_a_task_is_followed_to_what_it_waits_for() -> None:
    never = asyncio.Event()
    task = asyncio.create_task(_outer(never), name="stuck")
    await asyncio.sleep(0)
    (line,) = [line for line in waits.of_tasks() if line.startswith("stuck: ")]
    calls = line.removeprefix("stuck: ").split(" > ")
    assert [call.split(" (")[0] for call in calls] == ["_outer", "_inner", "Event.wait"]
    assert calls[-1].startswith("Event.wait (locks.py:")
    task.cancel()


async def _follow(task: asyncio.Task[bool]) -> None:
    await task


async def test_a_task_that_waits_for_another_names_it() -> None:
    other = asyncio.create_task(asyncio.Event().wait(), name="other")
    task = asyncio.create_task(_follow(other), name="waiting")
    await asyncio.sleep(0)
    (line,) = [line for line in waits.of_tasks() if line.startswith("waiting: ")]
    assert line.startswith("waiting: _follow (test_waits.py:") and line.endswith(" > task other")
    other.cancel()
    task.cancel()
