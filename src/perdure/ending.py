"""How the server is told to end, and whom it tells how that goes: its log, ``perdure down`` and systemd."""

from __future__ import annotations

import asyncio
import signal

import structlog

from perdure.core import supervisor, waits
from perdure.core.config import Settings
from perdure.core.stop import StopReport
from perdure.workspaces.shutdown import StopOrder

#: What systemd is asked for each time it hears of us; much longer than the time between two reports.
MORE_TIME_S = 300.0

log = structlog.get_logger(__name__)


def _tell_waits() -> None:
    for line in waits.of_tasks():
        log.info("waiting", task=line)


class Ending:
    """``asked`` is set by the first signal. ``order`` is for ``WorkspaceService.shutdown``; ``report`` is how it has gone."""

    def __init__(self, settings: Settings, notify_socket: str | None = None) -> None:
        self.asked = asyncio.Event()
        self.order = StopOrder(settings.shutdown_deadline_s, asyncio.Event(), self._tell)
        self.report = StopReport()
        self._file = settings.stop_file
        self._notify_socket = notify_socket

    def listen(self) -> None:
        """Take the signals; see ``wiring``. A SIGHUP that was ignored at the start (nohup) stays so. SIGUSR2 asks for nothing but
        words in the log on what all tasks wait for."""
        loop = asyncio.get_running_loop()
        asking = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            asking.append(signal.SIGHUP)
        for number in asking:
            loop.add_signal_handler(number, self.ask)
        loop.add_signal_handler(signal.SIGQUIT, self.insist)
        loop.add_signal_handler(signal.SIGUSR2, _tell_waits)

    def ask(self) -> None:
        if self.asked.is_set():
            log.warning("still putting workspaces to sleep; 'perdure down --now' gives up the memory of those that are awake")
        self.asked.set()

    def insist(self) -> None:
        log.warning("told to stop at once: whatever is not asleep loses what its memory held since its last snapshot")
        self.asked.set()
        self.order.now.set()

    def serving(self) -> None:
        self._file.unlink(missing_ok=True)
        supervisor.notify(self._notify_socket, supervisor.READY, supervisor.status("serving"))

    def _tell(self, report: StopReport) -> None:
        """Called often: every report gives us time; what is new is written where ``perdure down`` looks for it."""
        words = f"{len(report.asleep)} workspaces put to sleep, {len(report.waiting)} to come, {len(report.left)} given up"
        supervisor.notify(self._notify_socket, supervisor.STOPPING, supervisor.more_time(MORE_TIME_S), supervisor.status(words))
        if report == self.report:
            return
        self.report = report
        log.info(words, waiting=list(report.waiting))
        try:
            report.write(self._file)
        except OSError as error:
            log.warning("how the stop goes cannot be told", file=str(self._file), error=str(error))
