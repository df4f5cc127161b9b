"""Idle is a conjunction: each part alone keeps a workspace awake."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.wire.node import Activity
from perdure.workspaces.hibernation import Decision, Observation, Policy, decide

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
