"""Starting a program so that being cancelled meanwhile leaves neither it nor a word about it behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any


async def start(*argv: str, **options: Any) -> asyncio.subprocess.Process:
    """``asyncio.create_subprocess_exec`` in a session of its own, where Ctrl-C at the terminal does not reach it. Raises OSError.

    Cancelled before it returns, asyncio would reap the child beside the watcher that waits for it, which then complains on stderr
    about an unknown process. So a start runs to its end (milliseconds), and a program that nobody wants any more is killed with
    all it started.
    """
    starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*argv, start_new_session=True, **options))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            await end(await starting)
        raise


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill what :func:`start` gave, and what that started; returns when it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
