"""Commands that a build runs: output read line by line, kept as a tail for the error, ended with all their children on cancel."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections import deque
from collections.abc import Callable, Sequence

from perdure.core import programs
from perdure.core.errors import BuildFailed, HostUnfit

TAIL_LINES = 25
#: A build tool that gets SIGTERM unmounts and removes what it made; after this it is killed.
GRACE_S = 20.0
_LINE_LIMIT = 1 << 20

LineSink = Callable[[str], None]


class CommandFailed(BuildFailed):
    """A command ended with a status other than 0. ``tail`` has its last lines of output."""

    def __init__(self, what: str, status: int, tail: Sequence[str]) -> None:
        ending = f"was ended by signal {-status}" if status < 0 else f"failed with exit status {status}"
        text = "\n".join(tail)
        super().__init__(
            f"{what} {ending}." + (f" Its output ends with:\n{text}" if tail else " It printed nothing."),
            hint="Nothing was kept of this build; correct the cause and build again.",
        )
        self.exit_status = status
        self.tail = tuple(tail)


def require(tool: str, package: str) -> str:
    """Path of a tool, or HostUnfit with the command that installs it."""
    found = shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")
    if found is None:
        raise HostUnfit(
            f"Building an image needs {tool}, which is not installed.",
            hint=f"Run 'sudo apt-get install {package}' and try again.",
        )
    return found


async def run(
    argv: Sequence[str], *, what: str, on_line: LineSink | None = None, env: dict[str, str] | None = None, tail: int = TAIL_LINES
) -> str:
    """Run a command to its end; returns the last ``tail`` lines of its output (stdout and stderr together).

    Raises CommandFailed when it fails. Cancelled, it ends the command's whole process group before it returns.
    """
    process = await programs.start(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=env,
        limit=_LINE_LIMIT,
    )
    last: deque[str] = deque(maxlen=tail)
    try:
        await _read_lines(process, last, on_line)
        status = await process.wait()
    except BaseException:
        await asyncio.shield(_end(process))
        raise
    if status != 0:
        raise CommandFailed(what, status, list(last)[-TAIL_LINES:])
    return "\n".join(last)


async def _read_lines(process: asyncio.subprocess.Process, tail: deque[str], on_line: LineSink | None) -> None:
    assert process.stdout is not None
    while raw := await process.stdout.readline():
        line = raw.decode(errors="replace").rstrip()
        if line:
            tail.append(line)
            if on_line is not None:
                on_line(line)


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM to the process group, SIGKILL after the grace; returns when the process is gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            async with asyncio.timeout(GRACE_S):
                await process.wait()
        except TimeoutError:
            continue
        return
