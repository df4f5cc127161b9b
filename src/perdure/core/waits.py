"""What every task of an event loop waits for: how a server that hangs says where."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any


def of_tasks() -> list[str]:
    """A line for each task of the running loop: its name, and from the outermost call to the innermost where it stands."""
    return sorted(f"{task.get_name()}: {' > '.join(_calls(task.get_coro()))}" for task in asyncio.all_tasks())


def _calls(awaited: Any) -> Iterator[str]:
    """A task's own stack ends at its outermost call, so what that awaits is followed."""
    while awaited is not None:
        match awaited:
            case CoroutineType():
                frame, awaited = awaited.cr_frame, awaited.cr_await
            case AsyncGeneratorType():
                frame, awaited = awaited.ag_frame, awaited.ag_await
            case GeneratorType():
                frame, awaited = awaited.gi_frame, awaited.gi_yieldfrom
            case _:  # what stands between two of them names neither; the collector knows what it holds
                held = gc.get_referents(awaited)
                if task := next((one for one in held if isinstance(one, asyncio.Task)), None):
                    yield f"task {task.get_name()}"
                awaited = next((one for one in held if isinstance(one, CoroutineType | AsyncGeneratorType)), None)
                continue
        if frame is not None:
            code = frame.f_code
            yield f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})"
