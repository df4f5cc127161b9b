"""Handlers that a test's worker serves: each shows one way in which an invocation ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

COUNT = 0


def echo(event: Any, context: Any) -> Any:
    return {"event": event, "request": context.aws_request_id, "pid": os.getpid()}


def count(event: Any, context: Any) -> int:
    """How often this process has been used: it is warm."""
    global COUNT  # noqa: PLW0603 - what a warm process keeps
    COUNT += 1
    return COUNT


def broken(event: Any, context: Any) -> None:
    raise ValueError(f"bad {event}")


def leave(event: Any, context: Any) -> None:
    sys.exit(3)


def crash(event: Any, context: Any) -> None:
    sys.stderr.write("last words\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGSEGV)


def leave_a_child(event: Any, context: Any) -> None:
    """It ends, and a process of its own goes on with all that it had open, until it is killed."""
    if os.fork() == 0:
        threading.Event().wait()
    os._exit(4)


def hang(event: Any, context: Any) -> None:
    """For ever, with a program that it has started; says who they are."""
    program = subprocess.Popen(["sleep", "1000"])
    Path(event["to"]).with_suffix(".new").write_text(f"{os.getpid()} {program.pid}")
    Path(event["to"]).with_suffix(".new").rename(event["to"])
    threading.Event().wait()


def talk(event: Any, context: Any) -> str:
    print("to stdout")
    print("to stderr", file=sys.stderr)
    return os.environ.get("SAID", "")
