"""The server as a process of its own: started in the background, asked whether it serves, ended and waited for."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from perdure.cli.output import duration
from perdure.core.config import Settings
from perdure.core.errors import Conflict, DeadlineExceeded, Forbidden, HostUnfit
from perdure.sdk import Client, ServerUnreachable
from perdure.wire import public

#: Starting includes an embedded database and the repair of whatever the last server left.
UP_DEADLINE_S = 120.0
#: How often somebody who waits for the server's end looks at how it goes.
WATCH_S = 1.0
#: Ending without putting workspaces to sleep includes killing their machines and stopping the database.
NOW_DEADLINE_S = 120.0
LOG_TAIL_BYTES = 2000
#: How ``output.complain`` begins.
COMPLAINT = "Error: "


def command() -> list[str]:
    """The server's command line."""
    return [sys.executable, "-m", "perdure.cli.main", "up"]


def local(settings: Settings) -> Client:
    """A client of this machine's socket, whatever PERDURE_URL says."""
    return Client(settings=settings.model_copy(update={"url": None}), timeout_s=30.0)


def start(settings: Settings) -> public.Health:
    """Start it in the background and wait until it serves. Raises Conflict when one runs, HostUnfit when it ends at once."""
    with local(settings) as client:
        try:
            running = client.health()
        except ServerUnreachable:
            pass
        else:
            raise Conflict(f"A Perdure server runs already (process {running.pid}).", hint="Use it, or run 'perdure down' first.")
        log = settings.home / "log" / "server.log"
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with log.open("ab") as output:
            begin = output.tell()
            process = subprocess.Popen(command(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
        return _await_health(client, process, log, begin)


def _await_health(client: Client, process: subprocess.Popen[bytes], log: Path, start: int) -> public.Health:
    """Until it answers; its end or the deadline is an error with what it said last."""
    waited = 0.0
    while waited < UP_DEADLINE_S:
        try:
            code = process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            waited += 0.2
        else:
            said = _tail(log, start)
            raise HostUnfit(f"The server ended with exit code {code} while it started{said}", hint=f"Its log is {log}.")
        try:
            return client.health()
        except ServerUnreachable:
            continue
    raise DeadlineExceeded(
        f"The server does not answer after {UP_DEADLINE_S:.0f} s; it was left running.", hint=f"Its log is {log}."
    )


def _tail(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - LOG_TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    complaints = [number for number, line in enumerate(lines) if line.startswith(COMPLAINT)]
    if complaints:  # what happened, then what to do
        return ": " + " ".join(lines[complaints[-1] :]).removeprefix(COMPLAINT)
    return f": {lines[-1]}" if lines else "."


def running(settings: Settings) -> int | None:
    """Process id of the server that has this home, also of one that takes no requests because it starts or ends."""
    try:
        lock = os.open(settings.lock_file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        written = os.read(lock, 32).strip()
        return int(written) if written.isdigit() else None
    finally:
        os.close(lock)
    return None


def end(pid: int, *, now: bool, watch: Callable[[], None]) -> None:
    """Ask it to end (``now``: insist, see ``wiring``) and wait until it has; ``watch`` is called every second meanwhile.

    There is no deadline for an orderly end: the server has its own. One that was told not to wait gets ``NOW_DEADLINE_S``.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(process, signal.SIGQUIT if now else signal.SIGTERM)
        waited = 0.0
        while not select.select([process], [], [], WATCH_S)[0]:
            waited += WATCH_S
            if now and waited >= NOW_DEADLINE_S:
                raise DeadlineExceeded(
                    f"The server (process {pid}) has not ended {duration(NOW_DEADLINE_S)} after it was told to stop at once.",
                    hint=f"It may hang: 'kill -KILL {pid}' ends it, and the next 'perdure up' repairs what it leaves.",
                )
            watch()
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise Forbidden("The server belongs to another user.", hint="Run this as the user who started it.") from error
    finally:
        os.close(process)
