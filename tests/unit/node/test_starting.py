"""A disk boot reaches a workspace whose file system is not in order."""

from __future__ import annotations

from typing import cast

import pytest

from perdure.core.errors import GuestUnresponsive, MachineDied, MachineFailed
from perdure.machines.guestlink import GuestLink
from perdure.node.starting import grow


class StubLink:
    def __init__(self, error: MachineFailed | None) -> None:
        self._error = error

    async def grow_disk(self) -> int:
        if self._error:
            raise self._error
        return 1


async def test_a_file_system_that_cannot_grow_is_told_and_does_not_stop_the_start() -> None:
    assert await grow(cast(GuestLink, StubLink(None))) == []
    (problem,) = await grow(cast(GuestLink, StubLink(MachineFailed("resize2fs ended with 1: damaged."))))
    assert problem == "The file system did not grow to the size of its disk: resize2fs ended with 1: damaged."


@pytest.mark.parametrize("error", [MachineDied("It died."), GuestUnresponsive("It does not answer.")])
async def test_a_machine_that_breaks_meanwhile_stops_the_start(error: MachineFailed) -> None:
    with pytest.raises(type(error)):
        await grow(cast(GuestLink, StubLink(error)))
