"""One call over its attempts: how long its caller waits, whether there is another one, and what is said of the last."""

from __future__ import annotations

import time

from perdure.core.errors import PerdureError
from perdure.sdk import _core
from perdure.sdk._core import Call
from perdure.sdk.errors import CallTimedOut, ConnectionLost, ServerUnreachable


class Patience:
    """How long the caller of one call waits for it, attempts and pauses together: seconds, None for as long as it takes."""

    def __init__(self, limit_s: float | None) -> None:
        self._ends_at = None if limit_s is None else time.monotonic() + limit_s
        self._turn_by = time.monotonic() + _core.patience_s(limit_s)

    def left_s(self) -> float | None:
        """What an attempt may still take; at least a little, so that it fails as one that took too long."""
        return None if self._ends_at is None else max(0.001, self._ends_at - time.monotonic())

    def for_turn_s(self) -> float:
        """What is left for waiting until the rate limit lets it through."""
        return self._turn_by - time.monotonic()

    def allows(self, delay_s: float) -> bool:
        """Whether there is time for a pause and something after it."""
        return self._ends_at is None or time.monotonic() + delay_s < self._ends_at


class Attempts:
    """What is known of one call over its attempts: whether to make another, and what to say of the last."""

    def __init__(self, call: Call, limit_s: float | None) -> None:
        self.patience = Patience(limit_s)
        self._call = call
        self._count = 0
        self._may_be_done = False  # a whole request has left, and its answer is not known

    def pause_s(self, error: PerdureError, *, was_sent: bool) -> float:
        """Seconds to wait before the next attempt; raises ``error`` when there must not be one."""
        self._count += 1
        is_wire = isinstance(error, ServerUnreachable | ConnectionLost | CallTimedOut)
        self._may_be_done |= is_wire and was_sent
        delay_s = _core.retry_after_s(self._call, error, self._count, self.patience.for_turn_s(), was_sent=was_sent)
        if delay_s is None or not self.patience.allows(delay_s):
            raise qualified(error, self._call, may_be_done=self._may_be_done) if is_wire else error
        return delay_s


def qualified(error: PerdureError, call: Call, *, may_be_done: bool) -> PerdureError:
    """An error of the wire, saying what its caller may do about it."""
    error.ambiguous = may_be_done and (call.keyed or not call.repeatable)
    error.retryable = not error.ambiguous
    if error.retryable and not isinstance(error, ServerUnreachable):
        error.hint = "Make the call again; that does nothing twice."
    return error
