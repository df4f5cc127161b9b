"""What is counted, timed and traced of an operation on a workspace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from perdure.core import logs, metrics, tracing
from perdure.core.metrics import Histogram
from perdure.wire.node import MemoryFate
from perdure.workspaces.model import ResumeReport
from perdure.workspaces.rows import Record


@contextmanager
def measured(operation: str, at: Record, seconds: Histogram | None = None) -> Iterator[None]:
    """The block does ``operation``: what it raises is counted, and how long it takes without that goes into ``seconds``."""
    logs.note(workspace=at.id, generation=at.generation)
    watch = metrics.Stopwatch()
    with (
        metrics.failures(operation),
        tracing.span(f"workspace.{operation}", perdure__workspace=at.id, perdure__generation=at.generation),
    ):
        yield
    if seconds is not None:
        seconds.observe(watch.seconds)


def started(report: ResumeReport, seconds: float, *, is_new: bool) -> None:
    """A machine has started."""
    histogram = metrics.CREATE_SECONDS if is_new else metrics.WAKE_SECONDS
    histogram.observe(seconds, path=_path(report))
    metrics.STORE_FETCHED.add(report.fetched_bytes)


def _path(report: ResumeReport) -> str:
    if report.restored_from == "store":
        return "store"
    if report.pooled:
        return "pooled"
    # Who boots its disk has no restore among its timings.
    has_booted = report.memory is MemoryFate.LOST or "restored" not in report.timings_ms
    return "disk-boot" if has_booted else "unpooled"
