"""A guest that stands still goes on, whatever happens inside the block."""

from __future__ import annotations

from typing import Any, cast

import pytest

from perdure.core.errors import GuestUnresponsive, MachineDied
from perdure.node.stillness import standing_still


class StubLink:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.thaw_error: Exception | None = None

    async def quiesce(self) -> bool:
        self.calls.append("quiesce")
        return True

    async def hold(self) -> None:
        self.calls.append("hold")

    def release(self) -> None:
        self.calls.append("release")

    async def thaw(self) -> float:
        self.calls.append("thaw")
        if self.thaw_error:
            raise self.thaw_error
        return 0.0


def use(link: StubLink) -> Any:
    return standing_still(cast("Any", link))


async def test_frozen_before_held_and_released_before_thawed() -> None:
    link = StubLink()
    async with use(link) as still:
        assert still.frozen
        link.calls.append("copy")
    assert link.calls == ["quiesce", "hold", "copy", "release", "thaw"]


async def test_a_failure_inside_still_thaws() -> None:
    link = StubLink()
    with pytest.raises(MachineDied):
        async with use(link):
            raise MachineDied("gone")
    assert link.calls[-2:] == ["release", "thaw"]


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
