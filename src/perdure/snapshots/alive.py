"""Whether the process of a live record is still that process."""

from __future__ import annotations

from pathlib import Path

from perdure.snapshots.manifest import LiveRecord


def process_started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is none, or it has ended and waits to be reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may contain anything
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(record: LiveRecord) -> bool:
    """Whether the process of a live record still runs."""
    return record.pid is not None and process_started(record.pid) == record.pid_started is not None
