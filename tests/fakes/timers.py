"""What the fake workspaces do about times: kept awake, to wake by themselves, and what may be configured."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from perdure.workspaces import checks, longsleep
from perdure.workspaces.model import Configuration, Context, Workspace
from tests.fakes.memory_guest import MOMENT


class FakeTimers:
    """The part of ``Workspaces`` that is about times, over the rows of the rest."""

    def find_row(self, ref: str) -> Workspace:
        raise NotImplementedError

    def _put(self, row: Workspace, **changes: Any) -> Workspace:
        raise NotImplementedError

    def _note(self, row: Workspace, kind: str, **body: Any) -> None:
        raise NotImplementedError

    async def keep_awake(self, ctx: Context, ref: str, seconds: float) -> Workspace:
        return self._put(self.find_row(ref), keep_awake_until=MOMENT + timedelta(seconds=seconds))

    async def wake_at(self, ctx: Context, ref: str, when: datetime | timedelta | None) -> Workspace:
        checks.check_alarm(when, MOMENT)
        row = self._put(self.find_row(ref), wake_at=MOMENT + when if isinstance(when, timedelta) else when)
        self._note(row, "wake-at", at=None if row.wake_at is None else row.wake_at.isoformat())
        return row

    async def configure(self, ctx: Context, ref: str, change: Configuration) -> Workspace:
        checks.check_configuration(change)
        given = {name: value for name, value in change.given().items() if value is not None}
        if change.keep_snapshots == "default":
            given["keep_snapshots"] = None
        row = self.find_row(ref)
        days, action = longsleep.wish(row, change)
        checks.check_long_sleep(days, action)
        row = self._put(row, **{**given, "asleep_after_days": days, "asleep_action": action})
        self._note(row, "configured", **given)
        return row
