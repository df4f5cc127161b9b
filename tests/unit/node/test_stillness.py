"""A guest that stands still goes on, whatever happens inside the block."""

from __future__ import annotations

from typing import Any, cast

import pytest

from perdure.core.errors import GuestUnresponsive, MachineDied
from perdure.machines.guestlink import GuestLink
from perdure.machines.guestlink_channel import Channel
from perdure.node.stillness import standing_still


class StubLink:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.freeze_error: Exception | None = None
        self.thaw_error: Exception | None = None

    async def stand_still(self) -> bool:
        self.calls.append("stand still")
        if self.freeze_error:
            raise self.freeze_error
        return True

    def release(self) -> None:
        self.calls.append("release")

    async def thaw(self) -> float:
        self.calls.append("thaw")
        if self.thaw_error:
            raise self.thaw_error
        return 0.0


def use(link: StubLink) -> Any:
    return standing_still(cast("Any", link))


async def test_released_before_thawed() -> None:
    link = StubLink()
    async with use(link) as still:
        assert still.frozen
        link.calls.append("copy")
    assert link.calls == ["stand still", "copy", "release", "thaw"]


async def test_a_failure_inside_still_thaws() -> None:
    link = StubLink()
    with pytest.raises(MachineDied):
        async with use(link):
            raise MachineDied("gone")
    assert link.calls[-2:] == ["release", "thaw"]


async def test_a_freeze_that_nobody_confirmed_is_thawed_all_the_same() -> None:
    link = StubLink()
    link.freeze_error = GuestUnresponsive("no answer")
    with pytest.raises(GuestUnresponsive):
        async with use(link):
            link.calls.append("copy")
    assert link.calls == ["stand still", "release", "thaw"]


async def test_what_is_over_is_not_thawed() -> None:
    link = StubLink()
    async with use(link) as still:
        still.is_over = True
    assert link.calls[-1] == "release"


async def test_an_unanswered_thaw_is_owed_and_does_not_spoil_the_copy() -> None:
    link = StubLink()
    link.thaw_error = GuestUnresponsive("no answer")
    async with use(link) as still:
        pass
    assert still.owes_thaw


async def test_a_machine_that_died_meanwhile_is_told_of_by_its_event() -> None:
    link = StubLink()
    link.thaw_error = MachineDied("gone")
    async with use(link) as still:
        pass
    assert not still.owes_thaw


async def test_a_slow_guest_gets_as_long_to_stand_still_as_for_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given up sooner, a workspace on a slow host could not be put to sleep, although its guest answers everything else."""
    given: list[float] = []

    async def hold(_channel: Channel, _fence: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        given.append(deadline_s)
        return {"ok": True, "frozen": True}

    async def ready(_link: GuestLink) -> None:
        pass

    monkeypatch.setattr(Channel, "hold", hold)
    monkeypatch.setattr(GuestLink, "_await_ready", ready)
    assert await GuestLink(cast("Any", None), unresponsive_s=1000.0).stand_still()
    assert len(given) == 2 and min(given) >= 1000.0
