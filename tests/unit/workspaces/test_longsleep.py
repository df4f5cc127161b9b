"""What becomes of a workspace that has been asleep for long: nothing unasked, and no deletion unannounced."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.errors import InvalidRequest
from perdure.workspaces import checks
from perdure.workspaces.longsleep import Step, archived_at, decide, deletes_at, wish
from perdure.workspaces.model import AsleepAction, Configuration, CreateWorkspace, Workspace, WorkspaceState
from tests.fakes.workspaces import FakeWorkspaces

KEEP, ARCHIVE, DELETE = AsleepAction
SLEPT = datetime(2026, 3, 1, tzinfo=UTC)
DAY = timedelta(days=1)


def sleeper(action: AsleepAction, days: float | None, **fields: object) -> Workspace:
    made = FakeWorkspaces()._row("ws_1", CreateWorkspace("demo"))  # type: ignore[arg-type]
    asleep = replace(made, state=WorkspaceState.HIBERNATED, generation=4, state_changed_at=SLEPT)
    return replace(asleep, asleep_action=action, asleep_after_days=days, **fields)  # type: ignore[arg-type]


@given(days=st.floats(1, 3660), asleep=st.integers(0, 4000))
def test_nothing_becomes_of_one_of_which_nobody_said_so(days: float, asleep: int) -> None:
    """However long it sleeps, no timer of anybody else's ends it (peers: row 5)."""
    assert decide(sleeper(KEEP, None), SLEPT + asleep * DAY) is Step.NOTHING
    for state in set(WorkspaceState) - {WorkspaceState.HIBERNATED}:
        for action in (ARCHIVE, DELETE):
            awake = sleeper(action, days, state=state)
            assert decide(awake, SLEPT + asleep * DAY) is Step.NOTHING
            assert archived_at(awake) is None and deletes_at(awake) is None


@given(days=st.floats(1, 3660), late=st.floats(0, 4000))
def test_a_deletion_is_announced_a_day_before_however_late_that_is(days: float, late: float) -> None:
    one = sleeper(DELETE, days)
    announced = SLEPT + timedelta(days=days) - DAY + timedelta(days=late)
    before = SLEPT + timedelta(days=days) - DAY - timedelta(milliseconds=1)
    assert decide(one, before) is Step.NOTHING
    assert decide(one, announced) is Step.WARN
    warned = replace(one, asleep_noted=4, asleep_noted_at=announced)
    ends = deletes_at(warned)
    assert ends is not None and ends >= announced + DAY and ends >= SLEPT + timedelta(days=days)
    assert decide(warned, ends - timedelta(milliseconds=1)) is Step.NOTHING
    assert decide(warned, ends) is Step.DELETE


def test_what_was_announced_of_an_earlier_sleep_does_not_count() -> None:
    """It was awake in between, so all begins anew (peers: row 6)."""
    again = sleeper(DELETE, 10, asleep_noted=3, asleep_noted_at=SLEPT - 5 * DAY)
    assert decide(again, SLEPT + 9 * DAY) is Step.WARN
    assert decide(again, SLEPT + 30 * DAY) is Step.WARN


def test_one_that_is_to_wake_by_itself_is_not_deleted_before() -> None:
    waits = sleeper(DELETE, 10, wake_at=SLEPT + 100 * DAY)
    assert deletes_at(waits) is None
    assert decide(waits, SLEPT + 50 * DAY) is Step.NOTHING
    assert decide(replace(waits, asleep_noted=4, asleep_noted_at=SLEPT), SLEPT + 50 * DAY) is Step.NOTHING


def test_an_archive_is_made_once_in_a_sleep() -> None:
    one = sleeper(ARCHIVE, 10)
    assert decide(one, SLEPT + 9.9 * DAY) is Step.NOTHING
    assert decide(one, SLEPT + 10 * DAY) is Step.ARCHIVE
    done = replace(one, asleep_noted=4, asleep_noted_at=SLEPT + 11 * DAY)
    assert decide(done, SLEPT + 500 * DAY) is Step.NOTHING
    assert archived_at(done) == SLEPT + 11 * DAY
    assert deletes_at(done) is None
    assert decide(replace(done, generation=5), SLEPT + 500 * DAY) is Step.ARCHIVE


@pytest.mark.parametrize(
    ("has", "change", "becomes"),
    [
        ((None, KEEP), Configuration(asleep_after_days=30, asleep_action=DELETE), (30, DELETE)),
        ((30, DELETE), Configuration(asleep_after_days=60), (60, DELETE)),
        ((30, DELETE), Configuration(asleep_action=ARCHIVE), (30, ARCHIVE)),
        ((30, DELETE), Configuration(asleep_action=KEEP), (None, KEEP)),
        ((30, DELETE), Configuration(idle_timeout_s=5.0), (30, DELETE)),
        ((None, KEEP), Configuration(idle_timeout_s=5.0), (None, KEEP)),
    ],
)
def test_a_change_says_only_what_it_changes(
    has: tuple[float | None, AsleepAction], change: Configuration, becomes: tuple[float | None, AsleepAction]
) -> None:
    days, action = wish(sleeper(has[1], has[0]), change)
    assert (days, action) == becomes
    checks.check_long_sleep(days, action)


@pytest.mark.parametrize(
    ("days", "action", "says"),
    [
        (None, DELETE, "After how many days"),
        (None, ARCHIVE, "After how many days"),
        (30, KEEP, "What is to become of it"),
        (0.5, DELETE, "out of range"),
        (-1, ARCHIVE, "out of range"),
        (float("nan"), DELETE, "out of range"),
        (1e9, DELETE, "out of range"),
    ],
)
def test_what_does_not_go_together_is_refused(days: float | None, action: AsleepAction, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        checks.check_long_sleep(days, action)
    assert caught.value.hint


@pytest.mark.parametrize("seconds", [0.1, 4.9, -1.0, float("nan"), 1e12])
def test_an_idle_timeout_is_five_seconds_or_more_or_none(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="is no idle timeout") as caught:
        checks.check_timers(seconds, None)
    assert "5 seconds or more, or 0 for never" in caught.value.hint
    for good in (0.0, 5.0, 900.0, None):
        checks.check_timers(good, None)


@pytest.mark.parametrize(
    ("when", "says"),
    [
        (datetime(2026, 3, 1, 12), "any hour"),  # noqa: DTZ001 - that is the mistake
        (SLEPT + timedelta(days=5000), "too far"),
        (timedelta(days=5000), "too far"),
        (timedelta(seconds=-1), "in the past"),
    ],
)
def test_times_to_wake_at_that_mean_nothing_are_refused(when: datetime | timedelta, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        checks.check_alarm(when, SLEPT)
    assert caught.value.hint


def test_times_to_wake_at_may_have_passed() -> None:
    """A call that is repeated must not fail because its time has come meanwhile."""
    for when in (None, SLEPT - DAY, SLEPT, SLEPT + DAY, timedelta(0), timedelta(days=30)):
        checks.check_alarm(when, SLEPT)
