"""The one error tree.

    PerdureError
    ├── InvalidRequest        the caller's input is wrong; the same call will fail again
    │   ├── PathEscape        a path or name that would leave the place it belongs to
    │   └── PayloadTooLarge   one payload or error of an execution is over its limit; ``details`` say which
    ├── Unauthenticated       no key, or one that is not known
    │   └── SignatureRefused  an AWS signature that does not count: of another secret, another time, another request
    ├── Forbidden             known, but not allowed (Host or Origin included)
    │   └── MissingScope      the key is for less than that; ``details`` say what it needs
    ├── RateLimited           too many calls of one key; ``details`` say after how many seconds the next one is welcome
    ├── QuotaExceeded         it would pass a limit of the tenant; ``details`` say which, what is used and what was asked for
    ├── NotFound              nothing of that name for this caller
    │   ├── Shredded          the key of what was stored has been thrown away on purpose
    │   └── Forgotten         it was asked for before, and what became of it is not known any more
    ├── Conflict              the thing exists or is in a state that refuses the call
    │   ├── AlreadyExists
    │   ├── KeyReused         the idempotency key stands for another request
    │   ├── StaleGeneration   the caller acts on an incarnation that is gone
    │   ├── StaleCheckpoint   another invocation, or another checkpoint of this one, has come since that token
    │   ├── StaleInvocation   the invocation that is spoken of is over
    │   ├── NotDue            nothing asks for an invocation of that execution now
    │   ├── CodeChanged       the execution is bound to the code it began with, and the worker has other code
    │   ├── CallbackClosed    the callback was completed before, timed out, or its execution has ended
    │   └── ExecutionEnded    the execution has ended, so it takes no such call any more
    ├── Unavailable           may work later, nothing was done
    │   ├── Busy              an inbox or queue with a named limit is full
    │   ├── DeadlineExceeded  the wait ended before the answer; ``ambiguous`` when work had begun
    │   └── NoSpace           the disk is full
    ├── HostUnfit             this host lacks something (QEMU, rights, memory); says which command mends it
    ├── BuildFailed           an image build's command failed; carries its output's tail
    ├── MachineFailed         the VMM or the guest broke
    │   ├── MachineDied
    │   ├── GuestUnresponsive
    │   └── RestoreFailed
    ├── PortFailed            a program in a workspace did not answer as HTTP; ``details`` say how far it came
    │   ├── PortRefused       nothing listens there; nothing was sent
    │   ├── PortClosed        it ended the connection before or within its answer
    │   ├── PortSilent        it took longer than was waited for
    │   └── PortMalformed     what it sent is not HTTP, or more than a head may hold
    ├── ProgramNotReady       a workspace's program cannot be invoked now; ``details`` have the reason and its last lines
    │   ├── ProgramMissing    there is none
    │   ├── ProgramFailing    it ended, and nobody can expect it to be there soon
    │   └── ProgramSilent     it runs and does not answer its /ping
    ├── PythonFailed          a workspace's Python did not do what was asked of it
    │   ├── PythonMissing     it has none, or none with ipykernel
    │   ├── KernelDied        the kernel ended while a cell ran; the next one gets a new kernel
    │   └── CellStuck         a cell that had its time was interrupted and goes on
    └── CorruptData           a checksum did not hold; names the file
        └── CorruptSnapshot

Every error has a stable ``code``, an HTTP status, a public sentence (what happened and why), a ``hint`` (what to
do) and three booleans that a caller's retry loop can trust: ``retryable`` (nothing was done, the same call may
succeed), ``ambiguous`` (it may have been done), ``gone`` (the thing will not come back). ``internal`` is for logs
only and is never rendered to a caller. ``details`` are facts that a program may act on, by name; most errors have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self


class PerdureError(Exception):
    """Base of all errors that Perdure raises on purpose."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: bool = False
    ambiguous: bool = False
    gone: bool = False
    default_hint: ClassVar[str] = ""
    details: Mapping[str, str] = MappingProxyType({})
    request_id: str = ""  # in a client: of the request that it ended, for whoever reads the server's log

    def __init__(self, message: str, *, hint: str | None = None, internal: str = "", ambiguous: bool | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        self.internal = internal
        if ambiguous is not None:
            self.ambiguous = ambiguous

    def twin(self) -> Self:
        """The same error for another caller: one object would gather the tracebacks of all that raise it."""
        twin = type(self).__new__(type(self), *self.args)  # not by its constructor, which may want other things
        vars(twin).update({name: value for name, value in vars(self).items() if name != "__notes__"})
        return twin

    def public(self) -> dict[str, Any]:
        """The ``error`` object of an API answer or of the CLI's stderr."""
        told: dict[str, Any] = {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "retryable": self.retryable,
            "ambiguous": self.ambiguous,
            "gone": self.gone,
        }
        if self.details:
            told["details"] = dict(self.details)
        if self.request_id:
            told["request_id"] = self.request_id
        return told


class InvalidRequest(PerdureError):
    code = "invalid_request"
    status = 422


class PathEscape(InvalidRequest):
    code = "path_escape"


class PayloadTooLarge(InvalidRequest):
    """``details``: ``limit`` names the setting, ``limit_bytes`` its value, ``size_bytes`` what came."""

    code = "payload_too_large"
    default_hint = "Put the data into a file or an object store and hand its name on, or raise the limit."


class RangeNotSatisfiable(InvalidRequest):
    code = "range_not_satisfiable"
    status = 416


class Unauthenticated(PerdureError):
    code = "unauthenticated"
    status = 401
    default_hint = "Send 'Authorization: Bearer KEY'; 'perdure up' wrote the key to its key file."


class SignatureRefused(Unauthenticated):
    code = "signature_refused"


class Forbidden(PerdureError):
    code = "forbidden"
    status = 403


class MissingScope(Forbidden):
    """``details``: ``needs`` is the scope that is missing, ``has`` those the key was made with, ``tenant`` the one tenant whose
    keys may do this, where that matters."""

    code = "missing_scope"


class RateLimited(PerdureError):
    """``details``: ``retry_after_s``. Nothing was looked at, let alone done."""

    code = "rate_limited"
    status = 429
    retryable = True


class QuotaExceeded(PerdureError):
    """``details``: ``quota`` names the limit as ``GET /v1/quota`` does; ``limit``, ``used`` and ``asked`` are in its unit;
    ``awake`` are workspaces that use memory now. Nothing was done. ``retryable`` where it may pass by itself."""

    code = "quota_exceeded"
    status = 429


class NotFound(PerdureError):
    code = "not_found"
    status = 404


class Shredded(NotFound):
    code = "shredded"
    status = 410
    gone = True


class Forgotten(NotFound):
    """Never raised for what was not begun: whoever gets it must not simply ask again under another key."""

    code = "forgotten"
    status = 410
    ambiguous = True
    gone = True


class Conflict(PerdureError):
    code = "conflict"
    status = 409


class AlreadyExists(Conflict):
    code = "already_exists"


class KeyReused(Conflict):
    code = "idempotency_key_reused"
    default_hint = "A key stands for one request for a week: use a new one for another."


class StaleGeneration(Conflict):
    code = "stale_generation"
    gone = True
    default_hint = "Look the workspace up again; it has been woken, rewound or forked since."


class StaleCheckpoint(Conflict):
    code = "stale_checkpoint"
    default_hint = "End this invocation; another one has begun or will begin."


class StaleInvocation(Conflict):
    code = "stale_invocation"
    gone = True


class NotDue(Conflict):
    code = "not_due"


class CodeChanged(Conflict):
    """``details``: ``expected`` and ``found`` are digests of code."""

    code = "code_changed"
    default_hint = "Start a worker with the code that the execution began with, or resume it with code='any'."


class CallbackClosed(Conflict):
    code = "callback_closed"
    gone = True


class ExecutionEnded(Conflict):
    code = "execution_ended"
    gone = True


class Unavailable(PerdureError):
    code = "unavailable"
    status = 503
    retryable = True


class Busy(Unavailable):
    code = "busy"
    default_hint = "Try again in a moment."


class DeadlineExceeded(Unavailable):
    code = "deadline_exceeded"
    status = 504


class NoSpace(Unavailable):
    code = "no_space"
    status = 507
    default_hint = "Free some disk space (perdure rm, perdure image rm) and try again; nothing was lost."


class HostUnfit(PerdureError):
    code = "host_unfit"
    status = 503
    default_hint = "Run 'perdure doctor' to see what this host lacks."


class BuildFailed(PerdureError):
    code = "build_failed"
    status = 422


class MachineFailed(PerdureError):
    code = "machine_failed"
    status = 502


class MachineDied(MachineFailed):
    code = "machine_died"
    retryable = True


class GuestUnresponsive(MachineFailed):
    code = "guest_unresponsive"
    status = 504


class RestoreFailed(MachineFailed):
    code = "restore_failed"


class PortFailed(PerdureError):
    """``details``: ``phase`` is one of connecting, sending (of the request), waiting (for the answer's head), answering (in its
    body)."""

    code = "port_failed"
    status = 502

    def __init__(self, message: str, *, phase: str = "", hint: str | None = None, internal: str = "") -> None:
        super().__init__(message, hint=hint, internal=internal)
        if phase:
            self.details = {"phase": phase}


class PortRefused(PortFailed):
    code = "port_refused"
    retryable = True
    default_hint = "Start the program in the workspace, and let it listen on 127.0.0.1 or on all addresses."


class PortClosed(PortFailed):
    code = "port_closed"
    ambiguous = True
    default_hint = "Look at the program's own log in the workspace; it may have done what was asked."


class PortSilent(PortFailed):
    code = "port_silent"
    status = 504
    ambiguous = True
    default_hint = "The program may still be at it; look in the workspace."


class PortMalformed(PortFailed):
    code = "port_malformed"
    ambiguous = True
    default_hint = "The program must speak HTTP/1.1 on this port."


class ProgramNotReady(PerdureError):
    """``details``: ``reason`` (no-program, stopped, ended, crashed, not-listening, no-answer) and, where it wrote something,
    ``log``, the last lines of that. Nothing was sent to the program."""

    code = "program_not_ready"
    status = 502
    retryable = True
    default_hint = "See what it does and what it wrote: perdure program show NAME, perdure logs NAME."

    def __init__(self, message: str, *, reason: str = "", hint: str | None = None, internal: str = "") -> None:
        super().__init__(message, hint=hint, internal=internal)
        if reason:
            self.details = {"reason": reason}


class ProgramMissing(ProgramNotReady):
    code = "program_missing"
    retryable = False
    default_hint = "Name one: perdure program set NAME -- COMMAND …, or [program] in the image's recipe."


class ProgramFailing(ProgramNotReady):
    code = "program_failing"
    retryable = False


class ProgramSilent(ProgramNotReady):
    code = "program_silent"
    status = 504


class PythonFailed(PerdureError):
    """``details``: ``log``, the last lines of what Python wrote, where it wrote something."""

    code = "python_failed"
    status = 502
    default_hint = "Start the kernel anew (perdure python NAME --restart), or look at 'perdure exec NAME -- python3 --version'."


class PythonMissing(PythonFailed):
    code = "python_missing"
    status = 409
    default_hint = (
        "Make the workspace from the image python-data (perdure image build python-data, perdure create --image python-data), "
        "or install ipykernel in this one."
    )


class KernelDied(PythonFailed):
    """``details``: ``reason`` is out-of-memory or ended."""

    code = "kernel_died"
    ambiguous = True
    default_hint = "The next cell gets a new kernel, without the variables of this one."


class CellStuck(PythonFailed):
    code = "cell_stuck"
    status = 504
    ambiguous = True
    default_hint = "Start the kernel anew, which loses its variables: perdure python NAME --restart."


class CorruptData(PerdureError):
    """``file`` is the damaged or missing file by its name below the store or the image directory, where it is known."""

    code = "corrupt_data"

    def __init__(self, message: str, *, file: str = "", hint: str | None = None, internal: str = "") -> None:
        super().__init__(message, hint=hint, internal=internal)
        self.file = file
        if file:
            self.details = {"file": file}


class CorruptSnapshot(CorruptData):
    """The control plane adds to ``details``: ``snapshot_id`` (the damaged one), ``ancestor`` (the newest intact one before it,
    by its id) and ``disk`` (``intact`` or ``damaged``: of the damaged one's disk)."""

    code = "corrupt_snapshot"
    default_hint = (
        "Wake the workspace from an earlier snapshot (perdure recover NAME --how rewind) or boot its disk without its memory "
        "(--how disk-boot)."
    )


def error_classes() -> dict[str, type[PerdureError]]:
    """Every class of the tree by its code, for clients that rebuild an error from its public form."""

    def walk(cls: type[PerdureError]) -> list[type[PerdureError]]:
        return [cls, *(found for child in cls.__subclasses__() for found in walk(child))]

    # A subclass that keeps its parent's code is a detail of the server; a client rebuilds the parent.
    return {cls.code: cls for cls in walk(PerdureError) if "code" in vars(cls)}
