"""What an installation allows, and how long the engine waits before it tries again. Configuration: no fold depends on it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType

from perdure.runs.engine.facts import Failure

MIB = 1 << 20

#: How many times in a row an invocation may end so before its execution is given up. Those that are absent never count: a worker
#: that drains is no fault of the function, and the two that are left end it the first time.
ATTEMPTS: Mapping[Failure, int] = MappingProxyType({Failure.RAISED: 5, Failure.TIMED_OUT: 5, Failure.LOST: 20, Failure.EMPTY: 3})
#: These end an execution the first time: the same call would fail again.
HOPELESS = frozenset({Failure.NOT_FOUND, Failure.INVALID})


@dataclass(frozen=True, slots=True)
class Rules:
    """``operations_max`` and ``history_bytes_max`` park an execution that passes them: the checkpoint that does is kept, and it
    is paused until somebody raises them or stops it. ``payload_bytes_max`` and ``error_bytes_max`` refuse a checkpoint, the
    result of a callback or an answer. ``warn_share``: from which share of the first two on somebody is told."""

    operations_max: int = 50_000
    history_bytes_max: int = 512 * MIB
    payload_bytes_max: int = 16 * MIB
    error_bytes_max: int = 256 << 10
    warn_share: float = 0.8
    page_items_max: int = 1000
    page_bytes_max: int = 5 * MIB
    attempts: Mapping[Failure, int] = field(default_factory=lambda: ATTEMPTS)
    backoff_s: float = 1.0
    backoff_max_s: float = 300.0
    recheck_s: float = 60.0


def backoff(execution_id: str, failures: int, rules: Rules) -> timedelta:
    """How long to wait after so many failures in a row: doubled each time, up to the most, and between half and all of that.

    Where in between follows from the id, so that a thousand executions that fail together do not come back together, and a
    history that is decided again comes out the same.
    """
    most_s = min(rules.backoff_max_s, rules.backoff_s * 2.0 ** min(failures - 1, 40))
    digest = hashlib.sha256(f"{execution_id} {failures}".encode()).digest()
    share = 0.5 + int.from_bytes(digest[:4]) / (1 << 33)
    return timedelta(seconds=most_s * share)
