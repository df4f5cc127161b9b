"""Functions that are not durable."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any


def note(name: str, what: object) -> None:
    """Write it down where the test sees it, in one write."""
    with (Path(os.environ["NOTES"]) / name).open("a") as file:
        file.write(f"{what}\n")


def double(event: Any, context: Any) -> Any:
    print("doubling")
    return {"doubled": event["n"] * 2, "request": bool(context.aws_request_id), "arn": context.invoked_function_arn}


def refuse(event: Any, context: Any) -> None:
    raise ValueError("not this one")


def leave(event: Any, context: Any) -> None:
    note("left", os.getpid())
    sys.exit(3)


def hang(event: Any, context: Any) -> None:
    note("hung", os.getpid())
    threading.Event().wait()


def until_told(event: Any, context: Any) -> str:
    """It goes on when the test opens the pipe too."""
    note("hung", os.getpid())
    return (Path(os.environ["NOTES"]) / "go").read_text()


def hang_once(event: Any, context: Any) -> str:
    """It hangs where it runs first."""
    path = Path(os.environ["NOTES"]) / "hung"
    is_first = not path.exists()
    note("hung", os.getpid())
    if is_first:
        threading.Event().wait()
    return "done"
