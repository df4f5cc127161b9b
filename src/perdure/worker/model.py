"""What the parts of a worker tell each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from perdure.core.errors import PerdureError
from perdure.wire.public.workers import FailureKind

#: Hears what happens: its kind, and fields that JSON can carry.
Tell = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Served:
    """A function as its process has told it. ``digest``: of its code."""

    name: str
    digest: str
    is_durable: bool


@dataclass(frozen=True, slots=True)
class Job:
    """One invocation, for a process. ``arn`` is the execution's; ``event`` is JSON; ``timeout_s`` counts from now."""

    function: str
    arn: str
    request_id: str
    event: Any
    timeout_s: float

    @property
    def function_arn(self) -> str:
        return self.arn.partition("/durable-execution/")[0]


@dataclass(frozen=True, slots=True)
class Answered:
    """What the handler returned, as JSON."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """How an invocation ended without an answer."""

    kind: FailureKind
    error_type: str = ""
    message: str = ""
    stack: tuple[str, ...] = ()


Outcome = Answered | Failed


class Runner(Protocol):
    """A warm process, which runs one invocation at a time."""

    @property
    def functions(self) -> tuple[Served, ...]: ...

    @property
    def is_alive(self) -> bool: ...

    async def run(self, job: Job) -> Outcome:
        """Until it answers, fails or dies; who has waited too long kills it, which ends this too."""
        ...

    async def kill(self) -> None:
        """With all that it has started; returns when it is gone."""
        ...


class StartFailed(PerdureError):
    """A process of handlers could not be made ready."""

    code = "worker_start_failed"
    status = 500
    default_hint = "What it printed is above; mend that and start the worker again."


@dataclass(frozen=True, slots=True)
class Plan:
    """How a worker serves. ``limit``: invocations of each function in flight, over all workers. ``recycle_after``: invocations
    after which a process is replaced; 0: never. ``once``: it ends when there is nothing left to take."""

    name: str = ""
    concurrency: int = 1
    timeout_s: int = 900
    limit: int | None = None
    recycle_after: int = 1000
    drain_s: float = 30.0
    once: bool = False
