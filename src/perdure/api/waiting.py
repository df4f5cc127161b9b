"""Answers that wait for something: for no longer than somebody wants them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


async def while_asked(work: Coroutine[Any, Any, T], receive: Receive, closing: asyncio.Event) -> T | None:
    """What ``work`` returns; None when the client leaves or the server stops before. Then it is cancelled, and has ended when
    this returns. The request's body must have been read."""
    doing = asyncio.create_task(work)
    others = {asyncio.create_task(_left(receive)), asyncio.create_task(closing.wait())}
    try:
        await asyncio.wait({doing, *others}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (doing, *others):
            task.cancel()
        await asyncio.wait({doing, *others})
    return None if doing.cancelled() else doing.result()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
