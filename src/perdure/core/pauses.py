"""A pause between two rounds of something that a server does again and again."""

from __future__ import annotations

import asyncio
from contextlib import suppress


async def pause(seconds: float) -> None:
    """Nothing ends it early but a cancellation."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()
