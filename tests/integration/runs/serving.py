"""``python -m tests.integration.runs.serving HOME URL``: a server of durable executions that starts quickly, again and again.

This process imports everything once and forks a server for each line on stdin; what becomes of each is told on stdout: ``serving
PID``, then ``ended CODE``. A file ``crash`` in HOME kills at a named point (``core.crashpoints``): the server, or the process
whose id the file ``victim`` names.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from perdure.api.server import ApiServer
from perdure.core import crashpoints
from perdure.core.clock import SystemClock
from perdure.core.config import Settings
from perdure.db.database import Database
from perdure.runs.engine import Failure, Rules
from perdure.runs.service import rows, working
from perdure.runs.service.service import ExecutionService
from tests.fakes.workspaces import fake_services

#: A lease that ends while somebody waits for it.
LEASE_S = 4.0
#: Here everything dies all the time, and that is no fault of the functions.
RULES = Rules(
    attempts={Failure.RAISED: 200, Failure.TIMED_OUT: 200, Failure.LOST: 500, Failure.EMPTY: 3}, backoff_s=0.2, backoff_max_s=1.0
)


def say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def kill(home: Path, own: int) -> None:
    """In place of ``crashpoints._kill``."""
    victim = home / "victim"
    pid = int(victim.read_text()) if victim.exists() else own
    victim.unlink(missing_ok=True)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def serve(home: Path, url: str) -> None:
    crashpoints.arm(home / "crash")
    crashpoints._kill = partial(kill, home)
    database = Database(url)
    await database.open()
    executions = ExecutionService(database, SystemClock(), RULES)
    services, _ = fake_services(Settings(home=home, listen_port=0, url=None, api_key=None))
    await executions.start()
    await ApiServer(replace(services, executions=executions)).start()
    say(f"serving {os.getpid()}")
    await asyncio.Event().wait()


def main() -> None:
    home, url = Path(sys.argv[1]), sys.argv[2]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.WARNING)
    rows.LEASE_S = working.LEASE_S = LEASE_S  # type: ignore[attr-defined]
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                asyncio.run(serve(home, url))
            finally:
                sys.stderr.flush()
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        say(f"ended {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
