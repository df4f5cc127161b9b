"""The lifecycle of a workspace as a table. Pure: decides, does nothing.

                     ┌──────────── GUEST_REBOOTED ───────────┐
                     ▼                                       │
    (insert) CREATING ─STARTED─► RUNNING ─HIBERNATE─► HIBERNATING ─CAPTURED─► HIBERNATED
                │                  ▲ │ ▲                  │                     │   ▲
          START_FAILED     STARTED │ │ └─CAPTURE_FAILED───┘        WAKE, RECOVER│   │ MACHINE_LOST, POWERED_OFF,
                ▼                  │ │                                          │   │ START_REFUSED
             DELETED ◄──DELETE── WAKING ◄───────────────────────────────────────┘───┘
                                     │
                                     └─START_FAILED─► FAILED ─RECOVER─► WAKING

``REWIND`` and ``PROMOTE`` wake a sleeper, or one that failed, from another state than its head's; an awake one is put to sleep
first, so what it was can be kept as a branch. A branch whose state was promoted ends (``PROMOTED``): it goes on as its parent.

``FAILED`` always has exits: retry, rewind, disk boot (``RECOVER``), delete. A create that does not end in ``RUNNING`` ends in
``DELETED`` and its name is free again: nothing in it was anybody's yet. A machine that is lost takes its workspace back to the
last snapshot; what its disk had since is salvaged first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from perdure.workspaces.model import WorkspaceState as State


class Event(StrEnum):
    """What happened, or what was asked and may now begin."""

    STARTED = "started"  # the agent answered this generation's handshake
    START_REFUSED = "start-refused"  # nothing was tried (no space, host unfit): the same start may work later
    START_FAILED = "start-failed"  # it was tried and did not come up
    HIBERNATE = "hibernate"
    CAPTURED = "captured"  # the hibernating capture is complete and durable
    CAPTURE_FAILED = "capture-failed"  # and the machine goes on
    CHECKPOINTED = "checkpointed"
    WAKE = "wake"
    RECOVER = "recover"
    REWIND = "rewind"  # to go on from an earlier snapshot
    PROMOTE = "promote"  # of a parent: to go on from what a branch of it became
    PROMOTED = "promoted"  # of a branch: its parent has its state now
    MACHINE_LOST = "machine-lost"  # the VMM or the guest's kernel is gone
    GUEST_REBOOTED = "guest-rebooted"
    POWERED_OFF = "powered-off"
    UNRESPONSIVE = "unresponsive"
    FILES_MISSING = "files-missing"  # the head snapshot is not on its node
    SALVAGED = "salvaged"  # a newer disk turned up after the loss was recorded
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Transition:
    to: State
    new_generation: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an event means nothing in a state."""

    reason: str


#: Named sets of states.
MOVING = frozenset({State.CREATING, State.WAKING, State.HIBERNATING})  # an operation is under way, or was when we crashed
WITH_MACHINE = frozenset({State.CREATING, State.WAKING, State.RUNNING, State.HIBERNATING})  # the node may hold a machine
RECOVERABLE = frozenset({State.FAILED, State.HIBERNATED})
FINAL = frozenset({State.DELETED})

_GONE = Refusal("it is deleted")

_TABLE: dict[State, dict[Event, Transition]] = {
    State.CREATING: {
        Event.STARTED: Transition(State.RUNNING),
        Event.START_REFUSED: Transition(State.DELETED),
        Event.START_FAILED: Transition(State.DELETED),
        Event.MACHINE_LOST: Transition(State.DELETED),
        Event.DELETE: Transition(State.DELETED),
    },
    State.RUNNING: {
        Event.HIBERNATE: Transition(State.HIBERNATING),
        Event.CHECKPOINTED: Transition(State.RUNNING),
        Event.MACHINE_LOST: Transition(State.HIBERNATED),
        Event.GUEST_REBOOTED: Transition(State.WAKING, new_generation=True),
        Event.POWERED_OFF: Transition(State.HIBERNATED),
        Event.UNRESPONSIVE: Transition(State.FAILED),
        Event.DELETE: Transition(State.DELETED),
    },
    State.HIBERNATING: {
        Event.CAPTURED: Transition(State.HIBERNATED),
        Event.CAPTURE_FAILED: Transition(State.RUNNING),
        Event.MACHINE_LOST: Transition(State.HIBERNATED),
        Event.DELETE: Transition(State.DELETED),
    },
    State.HIBERNATED: {
        Event.WAKE: Transition(State.WAKING, new_generation=True),
        Event.RECOVER: Transition(State.WAKING, new_generation=True),
        Event.REWIND: Transition(State.WAKING, new_generation=True),
        Event.PROMOTE: Transition(State.WAKING, new_generation=True),
        Event.PROMOTED: Transition(State.DELETED),
        Event.FILES_MISSING: Transition(State.FAILED),
        Event.SALVAGED: Transition(State.HIBERNATED),
        Event.DELETE: Transition(State.DELETED),
    },
    State.WAKING: {
        Event.STARTED: Transition(State.RUNNING),
        Event.START_REFUSED: Transition(State.HIBERNATED),
        Event.START_FAILED: Transition(State.FAILED),
        Event.MACHINE_LOST: Transition(State.HIBERNATED),
        Event.DELETE: Transition(State.DELETED),
    },
    State.FAILED: {
        Event.SALVAGED: Transition(State.FAILED),
        Event.RECOVER: Transition(State.WAKING, new_generation=True),
        Event.REWIND: Transition(State.WAKING, new_generation=True),
        Event.PROMOTE: Transition(State.WAKING, new_generation=True),
        Event.DELETE: Transition(State.DELETED),
    },
    State.DELETED: {},
}

_REASONS: dict[State, dict[Event, str]] = {
    State.CREATING: {Event.HIBERNATE: "it is being created", Event.WAKE: "it is being created"},
    State.RUNNING: {Event.WAKE: "it is awake", Event.RECOVER: "it is awake", Event.STARTED: "it is awake"},
    State.HIBERNATING: {Event.HIBERNATE: "it is going to sleep already", Event.WAKE: "it is still going to sleep"},
    State.HIBERNATED: {Event.HIBERNATE: "it sleeps already", Event.CHECKPOINTED: "it sleeps"},
    State.WAKING: {Event.WAKE: "it is waking already", Event.HIBERNATE: "it is still waking"},
    State.FAILED: {Event.WAKE: "it has failed", Event.HIBERNATE: "it has failed"},
}


def _complete() -> dict[tuple[State, Event], Transition | Refusal]:
    """Every (state, event) has an answer."""
    table: dict[tuple[State, Event], Transition | Refusal] = {}
    for state in State:
        for event in Event:
            reason = _REASONS.get(state, {}).get(event, f"it is {state.value}")
            refusal = _GONE if state in FINAL else Refusal(reason)
            table[state, event] = _TABLE[state].get(event, refusal)
    return table


TABLE = _complete()


def decide(state: State, event: Event) -> Transition | Refusal:
    """What the event does to a workspace in that state."""
    return TABLE[state, event]


def _check_table() -> None:
    """Invariants of the table itself, checked at import."""
    for state in State:
        exits = {event for event in Event if isinstance(TABLE[state, event], Transition)}
        if state not in FINAL:
            assert Event.DELETE in exits, f"{state} cannot be deleted"
        if state in MOVING:
            assert Event.MACHINE_LOST in exits, f"{state} has no way out after a crash"
    for (state, event), answer in TABLE.items():
        if isinstance(answer, Transition):
            assert answer.new_generation == (answer.to is State.WAKING), f"{state} {event}: a start is a generation"


_check_table()
