"""When a workspace sleeps, and when it is checkpointed by itself. Pure: every time is an argument, in seconds from now.

Idle is a conjunction (DESIGN D9): no inbound request or stream, no open exec, no outbound stream, no ``keep_awake``, and all of
that for ``idle_timeout_s``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from perdure.wire.node import Activity


class Decision(StrEnum):
    KEEP = "keep"
    CHECKPOINT = "checkpoint"
    HIBERNATE = "hibernate"


@dataclass(frozen=True, slots=True)
class Policy:
    idle_timeout_s: float  # 0: never sleeps by itself
    checkpoint_interval_s: float  # 0: never checkpointed by itself


@dataclass(frozen=True, slots=True)
class Observation:
    """What the control plane knows beside the node's ``Activity``."""

    held: int  # callers inside ``awake``
    idle_for_s: float  # since the last of them left, or since the wake
    keep_awake_for_s: float  # left of ``keep_awake``; 0 or less: nothing asked for
    captured_s_ago: float  # since the last capture, or since the wake


def unused_s(activity: Activity, observation: Observation) -> float:
    """For how long nobody has used it; 0 while a caller, a command or a connection does."""
    busy = activity.open_execs or activity.open_streams or activity.open_outbound or observation.held
    return 0.0 if busy else min(activity.idle_for_s, observation.idle_for_s)


def decide(activity: Activity, observation: Observation, policy: Policy) -> Decision:
    """What to do with an awake workspace."""
    kept = observation.keep_awake_for_s > 0
    if policy.idle_timeout_s > 0 and not kept and unused_s(activity, observation) >= policy.idle_timeout_s:
        return Decision.HIBERNATE
    due = policy.checkpoint_interval_s > 0 and observation.captured_s_ago >= policy.checkpoint_interval_s
    if due and activity.changed:
        return Decision.CHECKPOINT
    return Decision.KEEP
