"""One line for each entry of a workspace's thread: what happened, and what matters about it. The rest is in ``--json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure.cli.output import duration, size
from perdure.wire import public

Body = Mapping[str, Any]
#: Of an entry that says where a machine went: event -> what happened.
_EVENTS = {
    "captured": "asleep",
    "powered-off": "powered off",
    "machine-lost": "machine lost",
    "unresponsive": "unresponsive",
    "files-missing": "files missing",
    "capture-failed": "stays awake",
    "start-refused": "not started",
    "rewind": "rewound",
    "promote": "takes over",
    "promoted": "promoted",
}
_KINDS = {
    **{"creating": "created", "hibernating": "falls asleep", "waking": "wakes", "running": "awake", "keep-awake": "kept awake"},
    **{"fork-failed": "fork failed", "wake-at": "to wake by itself", "wake-at-met": "awake in time"},
    **{"deletion-announced": "deletion announced", "webhook-failed": "webhook fails"},
}
_CONFIGURABLE = ("keep_snapshots", "idle_timeout_s", "checkpoint_interval_s", "asleep_after_days", "asleep_action")
#: Seconds after the time to wake at that are worth telling.
_LATE_S = 10
_REASONS = {"guest-reboot": "it rebooted itself", "not-quiesced": "programs were moving when it was captured"}
_LONGEST = 200  # characters of a detail: some carry a tool's output


def line(entry: public.LogEntry) -> tuple[str, str]:
    """What, and detail; plain text."""
    body = entry.body
    what = _EVENTS.get(str(body.get("event"))) or _KINDS.get(entry.kind, entry.kind)
    tell = _TELLERS.get(entry.kind, _anything)
    detail = "; ".join(part for part in tell(entry, body) if part)
    return what, detail if len(detail) <= _LONGEST else detail[: _LONGEST - 1] + "…"


def woke(report: Body) -> str:
    """What a wake kept, of a report as JSON values."""
    reason = report.get("memory_reason")
    parts = [f"memory {report.get('memory')}" + (f" ({_REASONS.get(reason, reason)})" if reason else "")]
    parts.append(f"disk {report.get('disk')}")
    if report.get("restored_from") == "store":
        parts.append("fetched from the object store")
    if report.get("wake_at"):
        parts.append(_in_time(report))
    if report.get("asleep_s"):
        parts.append(f"asleep {duration(report['asleep_s'])}")
    if dropped := report.get("connections_dropped"):
        parts.append("1 connection dropped" if dropped == 1 else f"{dropped} connections dropped")
    if lost := report.get("execs_lost"):
        parts.append("1 command lost" if len(lost) == 1 else f"{len(lost)} commands lost")
    if report.get("kept_branch"):
        parts.append(f"what it was before is kept as {report['kept_branch']}")
    if report.get("lost_branch"):
        parts.append(f"what the snapshot lacks is in {report['lost_branch']}")
    parts += [f"problem: {problem}" for problem in report.get("problems") or ()]
    parts += [hook(run) for run in report.get("hooks") or () if run.get("outcome") != "ok"]
    return ", ".join(parts)


def hook(run: Body) -> str:
    """How one of the workspace's own programs for wakes ended."""
    outcome, seconds = run.get("outcome"), duration(float(run.get("seconds") or 0))
    ways = {
        "ok": f"done in {seconds}",
        "failed": f"failed with exit code {run.get('exit_code')}",
        "timeout": f"killed after {seconds}: it ran into its limit",
    }
    return f"hook {run.get('name')} {ways.get(str(outcome), f'did not run ({outcome})')}"


def _by(body: Body) -> str:
    return f"by {body['by']}" if body.get("by") else ""


def _created(_entry: public.LogEntry, body: Body) -> list[str]:
    kind = body.get("kind")
    made = f"as {body.get('name')} of image {body['image']}" if body.get("image") else f"as {body.get('name')}"
    return [made, f"a {kind}" if kind not in {None, "workspace"} else "", _by(body)]


def _moved(entry: public.LogEntry, body: Body) -> list[str]:
    """An entry about a state: why it was left, and what is new there."""
    parts = [_why(body)]
    if entry.kind == "waking":
        parts = [f"generation {entry.generation}", _REASONS.get(str(body.get("reason")), str(body.get("reason") or "")), *parts]
    if body.get("event") == "rewind":
        parts.append(f"to {body.get('snapshot_id')}")
    if body.get("event") == "promote":
        parts.append(f"the state of branch {body.get('branch')}")
    if body.get("kept_branch"):
        parts.append(f"what it was is kept as {body['kept_branch']}")
    if body.get("how"):
        parts.append(f"recovery: {body['how']}")
    if isinstance(body.get("report"), dict):
        parts.append(woke(body["report"]))
    if "pause_s" in body:
        parts.append(_captured(body))
    if (branch := body.get("lost_branch")) and not any(str(branch) in part for part in parts):
        parts.append(f"newer disk kept as {branch}")
    if body.get("alive_until"):
        parts.append(f"last known to run at {str(body['alive_until'])[:19]} UTC")
    return [part.removesuffix(".") for part in parts]


def _why(body: Body) -> str:
    if body.get("cause") == "idle" and "idle_s" in body:
        return f"nobody used it for {duration(float(body['idle_s']))}"
    if body.get("by") == "wake-at":
        return _in_time(body)
    return str(body.get("cause") or body.get("detail") or body.get("error") or "")


def _captured(body: Body) -> str:
    written = size(int(body.get("memory_bytes") or 0) + int(body.get("disk_bytes") or 0))
    still = "" if body.get("quiesced", True) else ", programs did not stand still"
    return f"paused {duration(float(body['pause_s']))}, {written} written{still}"


def _checkpoint(_entry: public.LogEntry, body: Body) -> list[str]:
    why = {"fork": "for a fork"}.get(str(body.get("reason")), str(body.get("reason") or ""))
    named = f"named {body['name']}" if body.get("name") else ""
    return [why, named, _captured(body) if "pause_s" in body else "", str(body.get("snapshot_id") or body.get("snapshot") or "")]


def _forked(_entry: public.LogEntry, body: Body) -> list[str]:
    return ["into " + ", ".join(map(str, body.get("branches") or ())), _by(body)]


def _fork_failed(_entry: public.LogEntry, body: Body) -> list[str]:
    return [f"there is no {body.get('branch')}: {body.get('detail')}".removesuffix(".")]


def _resized(_entry: public.LogEntry, body: Body) -> list[str]:
    return [f"disk {body.get('was')} → {body.get('disk_gib')} GiB, at its next disk boot"]


def _in_time(body: Body) -> str:
    """Of a wake, or of an entry: it was to be at a time."""
    late_s = float(body.get("late_s") or 0)
    late = f", {duration(late_s)} late" if late_s > _LATE_S else ""
    return f"to be awake at {_utc(body.get('wake_at'))}{late}"


def _utc(at: object) -> str:
    return f"{str(at)[:19].replace('T', ' ')} UTC"


def _wake_at(_entry: public.LogEntry, body: Body) -> list[str]:
    return [f"at {_utc(body['at'])}" if body.get("at") else "not any more", _by(body)]


def _met(_entry: public.LogEntry, body: Body) -> list[str]:
    return ["it was awake already", _in_time(body)]


def _announced(_entry: public.LogEntry, body: Body) -> list[str]:
    days = f"{float(body.get('asleep_after_days') or 0):g}"
    return [f"not before {_utc(body.get('deletes_at'))}, unless it is used", f"{days} days asleep are its policy"]


def _archived(_entry: public.LogEntry, body: Body) -> list[str]:
    count = body.get("snapshots")
    return [f"only the object store has its {'snapshot' if count == 1 else f'{count} snapshots'} now"]


def _kept(_entry: public.LogEntry, body: Body) -> list[str]:
    return [f"for {duration(float(body['seconds']))}" if body.get("seconds") else "no longer"]


def _configured(_entry: public.LogEntry, body: Body) -> list[str]:
    return [*(f"{name} {body[name]}" for name in _CONFIGURABLE if name in body), _by(body)]


def _named(_entry: public.LogEntry, body: Body) -> list[str]:
    name, was = body.get("name"), body.get("was")
    return [str(body.get("snapshot_id")), f"is {name}" if name else "has no name", f"was {was}" if was else "", _by(body)]


def _removed(_entry: public.LogEntry, body: Body) -> list[str]:
    return [str(body.get("snapshot_id")), f"was {body['name']}" if body.get("name") else "", _by(body)]


def _webhook_failed(_entry: public.LogEntry, body: Body) -> list[str]:
    return [f"{body.get('webhook_id')}", f"event {body.get('event_seq')} was given up", str(body.get("error")).removesuffix(".")]


def _shared(_entry: public.LogEntry, body: Body) -> list[str]:
    until = f"by a link for {duration(float(body['expires_s']))}" if body.get("expires_s") else ""
    return [f"port {body.get('port')}", "to everybody" if body.get("public") else until, str(body.get("link") or ""), _by(body)]


def _anything(_entry: public.LogEntry, body: Body) -> list[str]:
    """Of a kind that this version does not know: what is short."""
    known = {"event", "from", "to", "alive_until"}
    return [f"{key} {value}" for key, value in body.items() if key not in known and isinstance(value, str | int) and value != ""]


_TELLERS = {
    "creating": _created,
    "checkpoint": _checkpoint,
    "forked": _forked,
    "fork-failed": _fork_failed,
    "resized": _resized,
    "keep-awake": _kept,
    "wake-at": _wake_at,
    "wake-at-met": _met,
    "deletion-announced": _announced,
    "archived": _archived,
    "configured": _configured,
    "snapshot-named": _named,
    "snapshot-removed": _removed,
    "webhook-failed": _webhook_failed,
    **dict.fromkeys(("port-shared", "port-unshared", "link-revoked"), _shared),
    **dict.fromkeys(("running", "hibernating", "hibernated", "waking", "failed", "deleted", "salvaged", "detail"), _moved),
}
