"""The transition table, as a whole."""

from __future__ import annotations

import itertools

import pytest

from perdure.workspaces import lifecycle
from perdure.workspaces.lifecycle import TABLE, Event, Refusal, Transition, decide
from perdure.workspaces.model import WorkspaceState as State


def test_every_state_and_event_has_an_answer() -> None:
    assert set(TABLE) == set(itertools.product(State, Event))


def test_every_refusal_says_why() -> None:
    for answer in TABLE.values():
        if isinstance(answer, Refusal):
            assert answer.reason.startswith("it ")


def test_every_state_can_be_reached_and_all_but_deleted_can_be_left() -> None:
    reached = {State.CREATING}
    while True:
        more = {answer.to for (state, _), answer in TABLE.items() if state in reached and isinstance(answer, Transition)}
        if more <= reached:
            break
        reached |= more
    assert reached == set(State)
    for state in set(State) - lifecycle.FINAL:
        assert any(isinstance(TABLE[state, event], Transition) for event in Event), f"{state} has no exit"


@pytest.mark.parametrize("state", sorted(set(State) - lifecycle.FINAL))
def test_everything_can_be_deleted(state: State) -> None:
    answer = decide(state, Event.DELETE)
    assert isinstance(answer, Transition)
    assert answer.to is State.DELETED


def test_deleted_is_final() -> None:
    assert all(isinstance(decide(State.DELETED, event), Refusal) for event in Event)


@pytest.mark.parametrize("state", sorted(lifecycle.MOVING | {State.RUNNING}))
def test_a_lost_machine_leaves_a_sleeper_unless_nobody_had_it_yet(state: State) -> None:
    answer = decide(state, Event.MACHINE_LOST)
    assert isinstance(answer, Transition)
    assert answer.to is (State.DELETED if state is State.CREATING else State.HIBERNATED)


def test_each_start_is_a_new_generation_and_nothing_else_is() -> None:
    for answer in TABLE.values():
        if isinstance(answer, Transition):
            assert answer.new_generation == (answer.to is State.WAKING)


def test_failed_has_its_exits() -> None:
    exits = {event for event in Event if isinstance(decide(State.FAILED, event), Transition)}
    assert {Event.RECOVER, Event.DELETE} <= exits
    assert isinstance(decide(State.FAILED, Event.WAKE), Refusal), "a call does not silently wake what has failed"
