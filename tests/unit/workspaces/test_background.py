"""Loops that watch over workspaces outlive whatever one pass of them raises."""

from __future__ import annotations

import asyncio

import pytest

from perdure.core.errors import PerdureError, Unavailable
from perdure.workspaces.upkeep import Upkeep


@pytest.mark.parametrize(
    "error", [Unavailable("The database is away."), PerdureError("A defect."), KeyError("nobody foresaw it")]
)
async def test_a_pass_that_raises_does_not_end_the_loop(error: Exception) -> None:
    passes = 0
    again = asyncio.Event()

    async def work() -> None:
        nonlocal passes
        passes += 1
        if passes == 1:
            raise error
        again.set()

    loop = asyncio.create_task(Upkeep._every(0.001, work, None))
    try:
        async with asyncio.timeout(30):
            await again.wait()
    finally:
        loop.cancel()
