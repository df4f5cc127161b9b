"""The freeze watchdog: a node that cannot prove that it still holds its lease stops its machines (DESIGN D11).

Nobody fences a host that is cut off, so it fences itself. The lease is renewed by the event loop; the watchdog is a thread of its
own and uses signals, so that neither a stalled loop nor a hanging VMM keeps a machine running past its right. Time counts from
*before* the last successful renewal was asked for: the answer may have been long on its way.

A frozen machine loses nothing. When the lease is renewed it goes on; when it was lost, every write of the old generation changes
no row, and the reconciler kills the machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable

from perdure.core.clock import Clock

#: Called from the watchdog's thread with True when the machines were frozen, False when they were thawed.
OnChange = Callable[[bool], None]


class FreezeWatchdog:
    """Stops every VMM process ``freeze_s`` after the last sure renewal and continues them at the next one."""

    def __init__(self, clock: Clock, freeze_s: float, pids: Callable[[], Iterable[int]], on_change: OnChange) -> None:
        self._clock = clock
        self._freeze_s = freeze_s
        self._pids = pids
        self._on_change = on_change
        self._wakeup = threading.Condition()
        self._sure_until: float | None = None
        self._frozen = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="freeze-watchdog", daemon=True)

    @property
    def frozen(self) -> bool:
        return self._frozen

    def start(self, asked_at: float) -> None:
        """Begin watching; ``asked_at`` is the monotonic time before the first successful renewal."""
        self._sure_until = asked_at + self._freeze_s
        self._thread.start()

    def renewed(self, asked_at: float) -> None:
        """The lease was renewed by a request sent at ``asked_at``. An answer that overtook a later one changes nothing."""
        with self._wakeup:
            self._sure_until = max(self._sure_until or asked_at, asked_at + self._freeze_s)
            self._wakeup.notify()

    def close(self) -> None:
        """Stop watching; frozen machines are continued, because their owner is about to end them properly."""
        with self._wakeup:
            self._closed = True
            self._wakeup.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        with self._wakeup:
            while not self._closed:
                assert self._sure_until is not None
                left_s = self._sure_until - self._clock.monotonic()
                if left_s > 0:
                    self._set(frozen=False)
                    self._wakeup.wait(left_s)
                else:
                    self._set(frozen=True)
                    # A machine that started since is stopped too: look again until the lease is back.
                    self._signal(signal.SIGSTOP)
                    self._wakeup.wait(1.0)
            self._set(frozen=False)

    def _set(self, *, frozen: bool) -> None:
        if frozen == self._frozen:
            return
        self._frozen = frozen
        self._signal(signal.SIGSTOP if frozen else signal.SIGCONT)
        self._on_change(frozen)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
