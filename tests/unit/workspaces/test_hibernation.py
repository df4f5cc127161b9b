"""Idle is a conjunction: each part alone keeps a workspace awake."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.wire.node import Activity
from perdure.workspaces.hibernation import (
    FRESH_S,
    Decision,
    Observation,
    Policy,
    Reason,
    Said,
    Use,
    Word,
    decide,
    heard,
    reasons,
    sleeps_in_s,
    unused_s,
)

IDLE = Activity(open_execs=0, open_streams=0, open_outbound=0, idle_for_s=900.0, changed=False)
ALONE = Observation(held=0, idle_for_s=900.0, keep_awake_for_s=0.0, captured_s_ago=10.0)
POLICY = Policy(idle_timeout_s=900.0, checkpoint_interval_s=60.0)


def test_all_together_hibernate() -> None:
    assert decide(IDLE, ALONE, POLICY) is Decision.HIBERNATE


@pytest.mark.parametrize(
    ("activity", "observation", "policy"),
    [
        (replace(IDLE, open_execs=1), ALONE, POLICY),
        (replace(IDLE, open_streams=1), ALONE, POLICY),
        (replace(IDLE, open_outbound=1), ALONE, POLICY),
        (replace(IDLE, idle_for_s=899.9), ALONE, POLICY),
        (IDLE, replace(ALONE, held=1), POLICY),
        (IDLE, replace(ALONE, idle_for_s=899.9), POLICY),
        (IDLE, replace(ALONE, keep_awake_for_s=0.1), POLICY),
        (IDLE, replace(ALONE, program_busy=True), POLICY),
        (IDLE, ALONE, replace(POLICY, idle_timeout_s=0.0)),
    ],
)
def test_each_part_alone_keeps_it_awake(activity: Activity, observation: Observation, policy: Policy) -> None:
    assert decide(activity, observation, policy) is Decision.KEEP


def test_a_checkpoint_is_due_while_changed() -> None:
    awake, due = replace(IDLE, open_execs=1, changed=True), replace(ALONE, captured_s_ago=60.0)
    assert decide(awake, due, POLICY) is Decision.CHECKPOINT
    assert decide(replace(awake, changed=False), due, POLICY) is Decision.KEEP
    assert decide(awake, replace(due, captured_s_ago=59.9), POLICY) is Decision.KEEP
    assert decide(awake, due, replace(POLICY, checkpoint_interval_s=0.0)) is Decision.KEEP


def test_what_is_idle_is_not_checkpointed_first() -> None:
    assert decide(replace(IDLE, changed=True), replace(ALONE, captured_s_ago=1e6), POLICY) is Decision.HIBERNATE


@given(idle=st.floats(0, 1e9), captured=st.floats(0, 1e9), changed=st.booleans())
def test_timers_of_zero_never_fire(idle: float, captured: float, changed: bool) -> None:
    activity = replace(IDLE, idle_for_s=idle, changed=changed)
    observation = replace(ALONE, idle_for_s=idle, captured_s_ago=captured)
    assert decide(activity, observation, Policy(0.0, 0.0)) is Decision.KEEP


# ------------------------------------------------------------------------------------------------- the reasons that are shown

ACTIVITIES = st.builds(
    Activity,
    open_execs=st.integers(0, 2),
    open_streams=st.integers(0, 2),
    open_outbound=st.integers(0, 2),
    idle_for_s=st.floats(0, 2000),
    changed=st.booleans(),
)
OBSERVATIONS = st.builds(
    Observation,
    held=st.integers(0, 2),
    idle_for_s=st.floats(0, 2000),
    keep_awake_for_s=st.floats(-100, 100),
    captured_s_ago=st.floats(0, 100),
    program_busy=st.sampled_from([None, False, True]),
)
POLICIES = st.builds(Policy, idle_timeout_s=st.sampled_from([0.0, 5.0, 900.0]), checkpoint_interval_s=st.just(60.0))


@given(activity=ACTIVITIES, observation=OBSERVATIONS, policy=POLICIES)
def test_it_sleeps_exactly_when_no_reason_is_shown_and_it_was_left_alone_for_long_enough(
    activity: Activity, observation: Observation, policy: Policy
) -> None:
    """Nothing keeps a workspace awake, and nothing puts it to sleep, that its owner does not see (peers: row 13)."""
    found = reasons(activity, observation, policy)
    alone_s = min(activity.idle_for_s, observation.idle_for_s)
    is_idle = not found and alone_s >= policy.idle_timeout_s
    assert (decide(activity, observation, policy) is Decision.HIBERNATE) == is_idle
    assert (sleeps_in_s(activity, observation, policy) == 0.0) == is_idle


@given(activity=ACTIVITIES, observation=OBSERVATIONS, policy=POLICIES)
def test_only_a_program_that_says_so_is_busy(activity: Activity, observation: Observation, policy: Policy) -> None:
    """One that was not asked, does not answer, or says that it is not, changes nothing; one that is busy never sleeps."""
    silent = decide(activity, replace(observation, program_busy=None), policy)
    assert decide(activity, replace(observation, program_busy=False), policy) is silent
    busy = replace(observation, program_busy=True)
    assert decide(activity, busy, policy) is not Decision.HIBERNATE
    assert unused_s(activity, busy) == 0.0


@given(activity=ACTIVITIES, observation=OBSERVATIONS, policy=POLICIES, passed=st.floats(0, 3000))
def test_when_it_sleeps_is_said_before(activity: Activity, observation: Observation, policy: Policy, passed: float) -> None:
    """If nothing happens, it is asleep that many seconds later and not before."""
    told = sleeps_in_s(activity, observation, policy)
    if told is None or abs(passed - told) < 1e-6:
        return
    later = replace(activity, idle_for_s=activity.idle_for_s + passed)
    seen = replace(
        observation,
        idle_for_s=observation.idle_for_s + passed,
        keep_awake_for_s=observation.keep_awake_for_s - passed,
    )
    assert (decide(later, seen, policy) is Decision.HIBERNATE) == (passed > told)


def test_every_reason_is_told_with_how_many_there_are() -> None:
    activity = replace(IDLE, open_execs=2, open_streams=3, open_outbound=4)
    observation = replace(ALONE, held=1, keep_awake_for_s=7.0, program_busy=True)
    assert reasons(activity, observation, Policy(0.0, 0.0)) == (
        Reason(Use.REQUEST, 1),
        Reason(Use.COMMAND, 2),
        Reason(Use.STREAM, 3),
        Reason(Use.OUTBOUND, 4),
        Reason(Use.PROGRAM, 1),
        Reason(Use.KEEP_AWAKE, 1, 7.0),
        Reason(Use.POLICY, 1),
    )
    assert reasons(IDLE, ALONE, POLICY) == ()
    assert sleeps_in_s(IDLE, replace(ALONE, keep_awake_for_s=7.0), POLICY) == 7.0
    assert sleeps_in_s(replace(IDLE, open_execs=1), ALONE, POLICY) is None


@pytest.mark.parametrize(
    ("said", "fresh_for_s", "word"),
    [
        (None, None, Word.QUIET),
        (None, 9.0, Word.QUIET),
        (Said(is_busy=True), None, Word.BUSY),
        (Said(is_busy=True, for_s=0.1), 9.0, Word.BUSY),
        (Said(is_busy=False), None, Word.QUIET),
        (Said(is_busy=False, for_s=FRESH_S), None, Word.DONE),
        (Said(is_busy=False, for_s=1e9), 9.0, Word.DONE),
        (Said(is_busy=False, for_s=FRESH_S - 0.1), None, Word.AGAIN),
        (Said(is_busy=False, for_s=-1e9), None, Word.AGAIN),
        (Said(is_busy=False, for_s=0.0), FRESH_S - 0.1, Word.AGAIN),
        (Said(is_busy=False, for_s=0.0), FRESH_S, Word.QUIET),
    ],
)
def test_what_a_programs_answer_is_worth(said: Said | None, fresh_for_s: float | None, word: Word) -> None:
    assert heard(said, fresh_for_s) is word
