"""What a server counts while it works, for ``GET /metrics``: plain numbers here, rendered when somebody asks.

All of them are below, so that this file is the list. A label has few values, all of ours: a kind, an outcome, a route, an error's
code; never what a tenant or a user chose. What can be read from rows or live objects is no number here (``api.metrics``).
They are of this process and begin at zero with it, as Prometheus expects of counters.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from perdure.core.errors import PerdureError

Labels = tuple[str, ...]


class Counter:
    """``add`` in any task of the server's loop."""

    def __init__(self, name: str, about: str, labels: Sequence[str] = ()) -> None:
        self.name, self.about, self.labels = name, about, tuple(labels)
        self.values: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, amount: float = 1, /, **labels: str) -> None:
        key = tuple(labels[name] for name in self.labels)
        self.values[key] = self.values.get(key, 0.0) + amount


@dataclass(slots=True)
class Distribution:
    """How many observations fell into which bucket (the last one: above all bounds), and their sum."""

    buckets: list[int]
    total: float = 0.0


class Histogram:
    """``bounds`` are the buckets' inclusive upper ends."""

    def __init__(self, name: str, about: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        self.name, self.about, self.labels = name, about, tuple(labels)
        self.bounds = tuple(bounds)
        self.values: dict[Labels, Distribution] = {}

    def observe(self, value: float, /, **labels: str) -> None:
        key = tuple(labels[name] for name in self.labels)
        found = self.values.get(key)
        if found is None:
            found = self.values[key] = Distribution([0] * (len(self.bounds) + 1))
        found.buckets[bisect_left(self.bounds, value)] += 1
        found.total += value


@dataclass(frozen=True, slots=True)
class Gauge:
    """A number as it is now, by labels."""

    name: str
    about: str
    values: Mapping[Labels, float]
    labels: tuple[str, ...] = ()


#: Reads all gauges. What cannot be read just now is left out.
Gauges = Callable[[], Awaitable[Sequence[Gauge]]]

#: From a warm wake under KVM to a cold boot under emulation on a busy host.
_STARTS_S = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 30, 60, 120, 300)
_SLEEPS_S = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 30, 60)
_PAUSES_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)

WAKE_SECONDS = Histogram(
    "perdure_wake_seconds",
    "From the intent on record until a workspace is awake on record. path: pooled, unpooled, disk-boot, or store where its "
    "files had to be fetched first.",
    _STARTS_S,
    ("path",),
)
CREATE_SECONDS = Histogram(
    "perdure_create_seconds", "The same for the first start of a new workspace or branch.", _STARTS_S, ("path",)
)
HIBERNATE_SECONDS = Histogram("perdure_hibernate_seconds", "From awake until asleep on record.", _SLEEPS_S)
CHECKPOINT_SECONDS = Histogram("perdure_checkpoint_seconds", "A checkpoint from its beginning until it is on record.", _SLEEPS_S)
CHECKPOINT_PAUSE_SECONDS = Histogram(
    "perdure_checkpoint_pause_seconds", "How long the programs of a workspace stood still for a checkpoint.", _PAUSES_S
)
FORK_SECONDS = Histogram("perdure_fork_seconds", "A fork from the call until all its children have started.", _STARTS_S)
FAILURES = Counter(
    "perdure_failures", "Operations on workspaces that failed, by what was done and by the error's code.", ("operation", "code")
)
EXECS = Counter("perdure_execs", "Commands that were started in workspaces.")
EGRESS = Counter("perdure_egress_connections", "Outbound connections that workspaces asked for.", ("decision",))
EGRESS_SENT = Counter("perdure_egress_sent_bytes", "Out of workspaces, counted when a connection ends.")
EGRESS_RECEIVED = Counter("perdure_egress_received_bytes", "Into workspaces, counted when a connection ends.")
STORE_SENT = Counter("perdure_store_sent_bytes", "To the object store.")
STORE_FETCHED = Counter("perdure_store_fetched_bytes", "From the object store for wakes.")
HTTP_REQUESTS = Counter("perdure_http_requests", "Answered requests by route and class of status.", ("route", "status"))
HTTP_RECEIVED = Counter("perdure_http_received_bytes", "In bodies of requests, and in WebSocket messages.")
HTTP_SENT = Counter("perdure_http_sent_bytes", "In bodies of answers, and in WebSocket messages.")
WEBHOOK_ATTEMPTS = Counter("perdure_webhook_attempts", "Attempts to deliver an event to a webhook.", ("outcome",))

ALL: tuple[Counter | Histogram, ...] = (
    *(WAKE_SECONDS, CREATE_SECONDS, HIBERNATE_SECONDS, CHECKPOINT_SECONDS, CHECKPOINT_PAUSE_SECONDS, FORK_SECONDS),
    *(FAILURES, EXECS, EGRESS, EGRESS_SENT, EGRESS_RECEIVED, STORE_SENT, STORE_FETCHED),
    *(HTTP_REQUESTS, HTTP_RECEIVED, HTTP_SENT, WEBHOOK_ATTEMPTS),
)


@contextmanager
def failures(operation: str) -> Iterator[None]:
    """Counts what the block raises."""
    try:
        yield
    except PerdureError as error:
        FAILURES.add(operation=operation, code=error.code)
        raise


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begun
