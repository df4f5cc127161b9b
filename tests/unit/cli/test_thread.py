"""What 'perdure log' says of each kind of entry."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from perdure.cli.thread import line
from perdure.wire import public

CAPTURED = {"memory_bytes": 479_048, "disk_bytes": 425_984, "pause_s": 0.0805, "quiesced": True, "snapshot_id": "snp_1"}
REPORT = {"memory": "kept", "memory_reason": "", "disk": "kept", "asleep_s": 2.95, "connections_dropped": 1, "execs_lost": []}


@pytest.mark.parametrize(
    ("kind", "body", "what", "detail"),
    [
        (
            "creating",
            {"by": "local", "image": "base", "kind": "workspace", "name": "a"},
            "created",
            "as a of image base; by local",
        ),
        ("creating", {"kind": "branch", "name": "b"}, "created", "as b; a branch"),
        ("running", {"event": "started", "report": REPORT}, "awake", "memory kept, disk kept, asleep 3 s, 1 connection dropped"),
        (
            "running",
            {"event": "started", "report": REPORT | {"memory": "lost", "memory_reason": "guest-reboot", "asleep_s": 0.0}},
            "awake",
            "memory lost (it rebooted itself), disk kept, 1 connection dropped",
        ),
        ("checkpoint", {**CAPTURED, "reason": "automatic"}, "checkpoint", "automatic; paused 80 ms, 905 kB written; snp_1"),
        (
            "checkpoint",
            {**CAPTURED, "reason": "requested", "name": "x", "quiesced": False},
            "checkpoint",
            "requested; named x; paused 80 ms, 905 kB written, programs did not stand still; snp_1",
        ),
        ("checkpoint", {**CAPTURED, "reason": "fork"}, "checkpoint", "for a fork; paused 80 ms, 905 kB written; snp_1"),
        ("forked", {"branches": ["b", "c"], "by": "local", "snapshot_id": "s"}, "forked", "into b, c; by local"),
        ("fork-failed", {"branch": "c", "detail": "Not created: Full."}, "fork failed", "there is no c: Not created: Full"),
        ("hibernating", {"event": "hibernate", "cause": "requested by local"}, "falls asleep", "requested by local"),
        ("hibernated", {"event": "captured", **CAPTURED, "reason": "hibernate"}, "asleep", "paused 80 ms, 905 kB written"),
        (
            "hibernated",
            {"event": "machine-lost", "detail": "It ended. Its newer disk is kept as 'a@lost-1'.", "lost_branch": "a@lost-1"},
            "machine lost",
            "It ended. Its newer disk is kept as 'a@lost-1'",
        ),
        (
            "hibernated",
            {"event": "machine-lost", "detail": "The server ended.", "alive_until": "2026-03-01T12:00:05.123456+00:00"},
            "machine lost",
            "The server ended; last known to run at 2026-03-01T12:00:05 UTC",
        ),
        ("hibernated", {"event": "powered-off", "detail": "Off.", "lost_branch": None, "salvaged": 1}, "powered off", "Off"),
        ("waking", {"event": "guest-rebooted", "reason": "guest-reboot"}, "wakes", "generation 3; it rebooted itself"),
        ("waking", {"event": "recover", "how": "rewind"}, "wakes", "generation 3; recovery: rewind"),
        (
            "waking",
            {"event": "rewind", "snapshot_id": "snp_1", "kept_branch": "a@before-1", "by": "local"},
            "rewound",
            "generation 3; to snp_1; what it was is kept as a@before-1",
        ),
        (
            "waking",
            {"event": "promote", "branch": "b", "snapshot_id": "snp_2", "kept_branch": None},
            "takes over",
            "generation 3; the state of branch b",
        ),
        ("deleted", {"event": "promoted", "detail": "Promoted: it goes on as 'a'."}, "promoted", "Promoted: it goes on as 'a'"),
        (
            "running",
            {"event": "started", "report": REPORT | {"memory": "lost", "memory_reason": "not-quiesced", "kept_branch": "k"}},
            "awake",
            "memory lost (programs were moving when it was captured), disk kept, asleep 3 s, 1 connection dropped, "
            "what it was before is kept as k",
        ),
        ("failed", {"event": "start-failed", "detail": "No.", "lost_branch": None}, "failed", "No"),
        ("resized", {"disk_gib": 9, "was": 8}, "resized", "disk 8 → 9 GiB, at its next disk boot"),
        ("keep-awake", {"seconds": 60.0}, "kept awake", "for 60 s"),
        ("keep-awake", {"seconds": 0.0}, "kept awake", "no longer"),
        ("deleted", {"cause": "requested by local"}, "deleted", "requested by local"),
        ("hibernating", {"cause": "idle", "idle_s": 903.2}, "falls asleep", "nobody used it for 15 min"),
        ("hibernating", {"cause": "idle"}, "falls asleep", "idle"),  # of an earlier version
        ("hibernating", {"cause": "requested by local", "idle_s": 3.0}, "falls asleep", "requested by local"),
        ("wake-at", {"at": "2026-03-01T18:00:00Z", "by": "local"}, "to wake by itself", "at 2026-03-01 18:00:00 UTC; by local"),
        ("wake-at", {"at": None, "by": "local"}, "to wake by itself", "not any more; by local"),
        (
            "waking",
            {"event": "wake", "by": "wake-at", "wake_at": "2026-03-01T18:00:00Z", "late_s": 0.1},
            "wakes",
            "generation 3; to be awake at 2026-03-01 18:00:00 UTC",
        ),
        (
            "running",
            {"report": REPORT | {"connections_dropped": 0, "wake_at": "2026-03-01T18:00:00Z", "late_s": 7200.0}},
            "awake",
            "memory kept, disk kept, to be awake at 2026-03-01 18:00:00 UTC, 2 h late, asleep 3 s",
        ),
        (
            "wake-at-met",
            {"by": "wake-at", "wake_at": "2026-03-01T18:00:00Z", "late_s": 0.0},
            "awake in time",
            "it was awake already; to be awake at 2026-03-01 18:00:00 UTC",
        ),
        (
            "deletion-announced",
            {"deletes_at": "2026-03-31T18:00:00Z", "asleep_after_days": 30.0},
            "deletion announced",
            "not before 2026-03-31 18:00:00 UTC, unless it is used; 30 days asleep are its policy",
        ),
        ("archived", {"snapshots": 1}, "archived", "only the object store has its snapshot now"),
        ("archived", {"snapshots": 2}, "archived", "only the object store has its 2 snapshots now"),
        ("deleted", {"cause": "asleep for 31 days", "by": "policy"}, "deleted", "asleep for 31 days"),
        (
            "configured",
            {"asleep_after_days": 30.0, "asleep_action": "delete", "by": "local"},
            "configured",
            "asleep_after_days 30.0; asleep_action delete; by local",
        ),
        ("of-later", {"from": "x", "count": 3, "map": {}}, "of-later", "count 3"),
        ("running", {}, "awake", ""),
    ],
)
def test_an_entry_is_one_line(kind: str, body: dict[str, Any], what: str, detail: str) -> None:
    entry = public.LogEntry(seq=1, at=datetime(2026, 1, 1, tzinfo=UTC), kind=kind, generation=3, body=body, hash="")
    assert line(entry) == (what, detail)


def test_a_tools_output_is_cut() -> None:
    body = {"detail": "x" * 1000}
    entry = public.LogEntry(seq=1, at=datetime(2026, 1, 1, tzinfo=UTC), kind="failed", generation=3, body=body, hash="")
    detail = line(entry)[1]
    assert len(detail) == 200
    assert detail.endswith("x…")
