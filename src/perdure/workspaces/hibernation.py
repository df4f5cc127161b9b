"""When a workspace sleeps, and when it is checkpointed by itself. Pure: every time is an argument, in seconds from now.

Idle is a conjunction (DESIGN D9): no inbound request or stream, no open exec, no outbound stream, no ``keep_awake``, a program
that does not say that it is busy, and all of that for ``idle_timeout_s``. What stands against it is a list of reasons, and that
list is what people are shown: there is no reason that they do not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from perdure.wire.node import Activity


class Decision(StrEnum):
    KEEP = "keep"
    CHECKPOINT = "checkpoint"
    HIBERNATE = "hibernate"


class Use(StrEnum):
    """What keeps a workspace awake."""

    REQUEST = "request"  # callers inside ``awake``
    COMMAND = "command"  # commands that have not ended, watched or not
    STREAM = "stream"  # tunnels and transfers into it
    OUTBOUND = "outbound"  # its own connections to the outside
    PROGRAM = "program"  # its agent program says that it is busy
    KEEP_AWAKE = "keep-awake"  # somebody asked for it, until a time
    POLICY = "policy"  # it never sleeps by itself


@dataclass(frozen=True, slots=True)
class Reason:
    """``count``: how many of them. ``left_s``: for how long yet, where that is known."""

    use: Use
    count: int = 1
    left_s: float | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    idle_timeout_s: float  # 0: never sleeps by itself
    checkpoint_interval_s: float  # 0: never checkpointed by itself


@dataclass(frozen=True, slots=True)
class Observation:
    """What the control plane knows beside the node's ``Activity``."""

    held: int  # callers inside ``awake``
    idle_for_s: float  # since the last of them left, since the wake, or since the program was last busy by its own word
    keep_awake_for_s: float  # left of ``keep_awake``; 0 or less: nothing asked for
    captured_s_ago: float  # since the last capture, or since the wake
    program_busy: bool | None = None  # what the agent program says; None: it was not asked, or there is none that answers


@dataclass(frozen=True, slots=True)
class Said:
    """What an agent program answers to ``/ping``. ``for_s``: for how long that has been so, by its own word; None: it says
    nothing of it."""

    is_busy: bool
    for_s: float | None = None


class Word(StrEnum):
    """What an answer is worth."""

    BUSY = "busy"
    DONE = "done"  # it is not busy, and was until so long ago
    QUIET = "quiet"  # it is not busy, and how long that has been so is not known
    AGAIN = "again"  # so fresh that only the next answer tells: done just now, or with the time of the asking in it


#: A word that is younger than this may have been made for whoever asked: programs exist that put the time into every answer.
FRESH_S = 2.0


def heard(said: Said | None, fresh_for_s: float | None) -> Word:
    """``fresh_for_s``: since its answers began to be fresh, one after the other; None: the last one was not."""
    if said is not None and said.is_busy:
        return Word.BUSY
    if said is None or said.for_s is None:
        return Word.QUIET
    if said.for_s >= FRESH_S:
        return Word.DONE
    return Word.QUIET if fresh_for_s is not None and fresh_for_s >= FRESH_S else Word.AGAIN


#: These use it, so nobody has left it alone while they are there. The others only keep it from sleeping.
USING = frozenset({Use.REQUEST, Use.COMMAND, Use.STREAM, Use.OUTBOUND, Use.PROGRAM})
_NO_POLICY = Policy(0.0, 0.0)


def reasons(activity: Activity, observation: Observation, policy: Policy) -> tuple[Reason, ...]:
    """Why a workspace may not sleep, however long nobody has used it. Empty: only for how long that is counts."""
    counts = {
        Use.REQUEST: observation.held,
        Use.COMMAND: activity.open_execs,
        Use.STREAM: activity.open_streams,
        Use.OUTBOUND: activity.open_outbound,
        Use.PROGRAM: int(observation.program_busy is True),
    }
    found = [Reason(use, count) for use, count in counts.items() if count]
    if observation.keep_awake_for_s > 0:
        found.append(Reason(Use.KEEP_AWAKE, left_s=observation.keep_awake_for_s))
    if policy.idle_timeout_s <= 0:
        found.append(Reason(Use.POLICY))
    return tuple(found)


def unused_s(activity: Activity, observation: Observation) -> float:
    """For how long nobody has used it; 0 while a caller, a command, a connection or its program does."""
    found = reasons(activity, observation, _NO_POLICY)
    is_used = any(reason.use in USING for reason in found)
    return 0.0 if is_used else min(activity.idle_for_s, observation.idle_for_s)


def sleeps_in_s(activity: Activity, observation: Observation, policy: Policy) -> float | None:
    """In how many seconds it falls asleep if nothing happens; 0: now. None while something stands against it that nobody knows
    the end of."""
    found = reasons(activity, observation, policy)
    if any(reason.use is not Use.KEEP_AWAKE for reason in found):
        return None
    left_s = policy.idle_timeout_s - unused_s(activity, observation)
    return max(0.0, left_s, *(reason.left_s or 0.0 for reason in found))


def decide(activity: Activity, observation: Observation, policy: Policy) -> Decision:
    """What to do with an awake workspace."""
    if sleeps_in_s(activity, observation, policy) == 0.0:
        return Decision.HIBERNATE
    due = policy.checkpoint_interval_s > 0 and observation.captured_s_ago >= policy.checkpoint_interval_s
    if due and activity.changed:
        return Decision.CHECKPOINT
    return Decision.KEEP
