"""What is known of an awake workspace's use: by callers here, by commands and connections on its node.

Use is counted in this process and reaches the row when the workspace stops being awake; until then this is what knows.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from perdure.core.errors import PerdureError
from perdure.workspaces import hibernation
from perdure.workspaces.hibernation import Observation, Policy
from perdure.workspaces.model import Idleness, Workspace
from perdure.workspaces.owner import Live, Owner
from perdure.workspaces.rows import Record
from perdure.workspaces.tools import Tools


def observe(tools: Tools, owner: Owner, live: Live, *, program_busy: bool | None = None) -> Observation:
    now = tools.clock.monotonic()
    used_at = max(owner.touched_at, live.busy_at or 0.0, live.done_at or 0.0)
    return Observation(owner.held, now - used_at, live.keep_awake_until - now, now - live.captured_at, program_busy)


def policy_of(workspace: Workspace) -> Policy:
    return Policy(workspace.idle_timeout_s, workspace.checkpoint_interval_s)


def unused_s(tools: Tools, owner: Owner | None) -> float | None:
    """Seconds since anybody used an awake workspace, 0 while somebody does; None for one that this process has not awake."""
    live = owner.live if owner is not None else None
    if owner is None or live is None:
        return None
    observation = observe(tools, owner, live)
    try:
        activity = tools.node(live.record).activity(owner.id, live.generation)
    except PerdureError:  # its machine has just gone: what the callers did is still known
        return 0.0 if observation.held else observation.idle_for_s
    return hibernation.unused_s(activity, observation)


def running_execs(tools: Tools, at: Record) -> int:
    """Commands that have not ended, in an awake workspace; none of one whose machine has just gone."""
    try:
        return tools.node(at).activity(at.id, at.generation).open_execs
    except PerdureError:
        return 0


def spent(tools: Tools, at: Record) -> dict[str, Any]:
    """For the body of an entry: what the machine's meters say. Nothing when it is gone; what is known is in an entry before."""
    try:
        reading = tools.node(at).reading(at.id, at.generation)
    except PerdureError:
        return {}
    return {"spent": {**asdict(reading), "generation": at.generation}}


def idled(at: Record, idle_s: float | None) -> dict[str, Any]:
    """For the body of an entry: for how long nobody had used it, and what its timeout was."""
    return {} if idle_s is None else {"idle_s": round(idle_s, 1), "idle_timeout_s": at.workspace.idle_timeout_s}


def as_used(tools: Tools, owner: Owner | None, record: Record) -> Workspace:
    """The workspace with ``last_active_at`` as of now, and with what keeps it awake."""
    workspace = record.workspace
    idle_s = unused_s(tools, owner)
    if idle_s is None or owner is None or owner.live is None or owner.live.generation != record.generation:
        return workspace
    used_at = max(workspace.last_active_at, record.now - timedelta(seconds=idle_s))
    return replace(workspace, last_active_at=used_at, idleness=_idleness(tools, owner, owner.live, workspace))


def _idleness(tools: Tools, owner: Owner, live: Live, workspace: Workspace) -> Idleness | None:
    try:
        activity = tools.node(live.record).activity(owner.id, live.generation)
    except PerdureError:  # its machine has just gone
        return None
    # What its program said last holds until somebody else has used it: it is asked again only when all else says idle.
    is_busy = live.busy_at is not None and live.busy_at >= owner.touched_at
    observation, policy = observe(tools, owner, live, program_busy=is_busy), policy_of(workspace)
    return Idleness(
        hibernation.unused_s(activity, observation),
        hibernation.reasons(activity, observation, policy),
        hibernation.sleeps_in_s(activity, observation, policy),
    )
