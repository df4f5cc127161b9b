"""Errors that only a client can have. All others are those of ``perdure.core.errors``, rebuilt from the server's answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from perdure.core.errors import Conflict, CorruptData, DeadlineExceeded, PerdureError, Unavailable, error_classes


class ServerUnreachable(Unavailable):
    """Nobody answers; nothing was done."""

    code = "server_unreachable"
    default_hint = "Run 'perdure up', or set PERDURE_URL and PERDURE_API_KEY."


class ConnectionLost(Unavailable):
    """The connection ended before the answer did.

    ``ambiguous``: the whole request had left, and doing it twice would not be the same as doing it once, so look before you
    repeat the call. Otherwise ``retryable``: nothing was done, or it may be done again.
    """

    code = "connection_lost"
    retryable = False
    ambiguous = True
    default_hint = "Look at the workspace before repeating the call: it may have been done."


class ForeignAnswer(ConnectionLost):
    """What answered was not the server: a proxy in front of it that has nobody behind, or something else at its address. Flags
    as of ``ConnectionLost``: nobody knows whether the request went through."""

    code = "foreign_answer"
    default_hint = "Check PERDURE_URL, and whether the server runs; then look before repeating the call: it may have been done."


class CallTimedOut(DeadlineExceeded):
    """The caller's own timeout ran out. The server goes on with what it was asked, and so do commands and workspaces. Flags as of
    ``ConnectionLost``."""

    code = "call_timed_out"
    retryable = False
    ambiguous = True


class StillRunning(DeadlineExceeded):
    """The wait for a command ended before the command did. It was not stopped; attach to ``exec_id`` to go on."""

    code = "still_running"
    retryable = False

    def __init__(self, message: str, *, exec_id: str = "", **details: Any) -> None:
        super().__init__(message, **details)
        self.exec_id = exec_id


class ExecutionRunning(DeadlineExceeded):
    """The wait for an execution ended before the execution did. It goes on; wait for ``execution_id`` again."""

    code = "execution_running"
    retryable = False

    def __init__(self, message: str, *, execution_id: str = "", **details: Any) -> None:
        super().__init__(message, **details)
        self.execution_id = execution_id


class ExecutionFailed(PerdureError):
    """An execution whose result was asked for has ended without one. ``error_type`` and ``error_message`` are of what its
    function raised, where it said so."""

    code = "execution_failed"
    default_hint = "See what it did: perdure execution show, or start it once more: perdure execution retry."
    verb: ClassVar[str] = "failed"
    execution_id: str = ""
    error_type: str | None = None
    error_message: str | None = None
    error_data: str | None = None
    stack_trace: Sequence[str] = ()


class ExecutionTimedOut(ExecutionFailed):
    code = "execution_timed_out"
    verb = "timed out"


class ExecutionStopped(ExecutionFailed):
    code = "execution_stopped"
    verb = "was stopped"


class SpecConflict(Conflict):
    """There is a workspace of that name, of another image or size than was asked for. ``details``: what differs, by name."""

    code = "spec_conflict"
    default_hint = "Connect to it as it is, or choose another name."


class TransferMismatch(CorruptData):
    """What arrived is not what was sent."""

    code = "transfer_mismatch"


def rebuild(answer: object, status: int, request_id: str = "") -> PerdureError:
    """The error that a server's JSON answer stands for; an unknown code becomes a plain PerdureError that keeps its flags."""
    error = _rebuilt(answer, status)
    error.request_id = error.request_id or request_id
    return error


def _rebuilt(answer: object, status: int) -> PerdureError:
    public = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(public, dict):
        if status >= 500:
            return ForeignAnswer(f"The answer has HTTP status {status} and is not one of a Perdure server.")
        return PerdureError(f"The server answered with HTTP status {status} and no explanation.")
    kind = error_classes().get(str(public.get("code")), PerdureError)
    error = kind(str(public.get("message", "")), hint=str(public.get("hint", "")))
    error.retryable = bool(public.get("retryable"))
    error.ambiguous = bool(public.get("ambiguous"))
    error.gone = bool(public.get("gone"))
    details = public.get("details")
    if isinstance(details, dict):
        error.details = {str(name): str(value) for name, value in details.items()}
    error.request_id = str(public.get("request_id") or "")
    return error
