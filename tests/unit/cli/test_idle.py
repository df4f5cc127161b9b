"""Times and policies of options, and what people are told of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure.api import render
from perdure.cli import idle
from perdure.core.errors import InvalidRequest
from perdure.wire import public
from perdure.workspaces.model import CreateWorkspace
from tests.fakes.workspaces import FakeWorkspaces

EVENING = datetime(2026, 12, 24, 18, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("never", None),
        ("+90s", timedelta(seconds=90)),
        ("+1.5h", timedelta(minutes=90)),
        ("2026-12-24T18:00:00Z", EVENING),
        ("2026-12-24T19:00+01:00", EVENING),
        ("2026-12-24 18:00:00+00:00", EVENING),
    ],
)
def test_a_time_is_given_in_either_way(text: str, means: datetime | timedelta | None) -> None:
    assert idle.moment(text) == means


@pytest.mark.parametrize("text", ["", "tomorrow", "2026-12-24", "2026-12-24T18:00", "18:00Z", "+2", "2h", "+2 weeks", "-1h"])
def test_what_may_mean_any_hour_or_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        idle.moment(text)
    assert caught.value.hint and caught.value.message.endswith(".")


def told(unused_s: float, sleeps_in_s: float | None, *reasons: dict[str, Any]) -> list[str]:
    found = [public.AwakeReason(**one) for one in reasons]
    return idle.in_use(public.IdleInfo(unused_s=unused_s, reasons=found, sleeps_in_s=sleeps_in_s))


def test_people_are_told_why_it_is_awake() -> None:
    """Each reason in a line of its own (peers: row 13)."""
    assert idle.in_use(None) == ["-"]
    assert told(180, 720) == ["last used 3 min ago; sleeps in 12 min if nobody uses it"]
    assert told(0.2, None, {"use": "command"}, {"use": "outbound", "count": 3}) == [
        "a command runs",
        "it has 3 connections to the outside",
        "last used now",
    ]
    assert told(180, 3600, {"use": "keep-awake", "left_s": 3600}) == [
        "somebody keeps it awake for another 60 min",
        "last used 3 min ago; sleeps in 60 min if nobody uses it",
    ]
    for use in ("request", "stream", "program", "policy"):
        lines = told(5, None, {"use": use}) + told(5, None, {"use": use, "count": 2})
        assert all(line and "{}" not in line for line in lines)


def test_people_are_told_what_becomes_of_a_long_sleeper() -> None:
    made = render.workspace(FakeWorkspaces()._row("ws_1", CreateWorkspace("demo")))  # type: ignore[arg-type]

    def said(**fields: Any) -> str:
        return idle.long_sleep(made.model_copy(update=fields))

    assert said() == "kept"
    archive = {"asleep_after_days": 30.0, "asleep_action": "archive"}
    assert said(**archive) == "after 30 days asleep it is archived"
    assert said(**archive, archived_at=EVENING) == (
        "after 30 days asleep it is archived; it has been since 2026-12-24 18:00:00 UTC"
    )
    delete = {"asleep_after_days": 2.5, "asleep_action": "delete"}
    assert said(**delete) == "after 2.5 days asleep it is deleted"
    assert said(**delete, deletes_at=EVENING) == "after 2.5 days asleep it is deleted: not before 2026-12-24 18:00:00 UTC"


def test_people_are_told_when_it_wakes() -> None:
    assert idle.wakes(None) == "does not wake by itself"
    assert idle.wakes(datetime(2020, 1, 1, tzinfo=UTC)) == "wakes at 2020-01-01 00:00:00 UTC, which is now"
    later = datetime.now(UTC) + timedelta(hours=3, minutes=1)
    assert idle.wakes(later) == f"wakes at {later:%Y-%m-%d %H:%M:%S} UTC, in 3 h"
