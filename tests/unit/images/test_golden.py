"""A golden is captured while everything in it stands still, or not at all."""

from __future__ import annotations

from typing import Any, cast

import pytest

from perdure.core.errors import MachineFailed
from perdure.images.golden import _STILL_TRIES, _stand_still
from perdure.machines.guestlink import GuestLink


class Restless:
    """A guest in which something does not stand still the first so many times."""

    def __init__(self, times: int) -> None:
        self._times = times
        self.calls: list[str] = []

    async def quiesce(self, _deadline_s: float) -> bool:
        self.calls.append("quiesce")
        self._times -= 1
        return self._times < 0

    async def thaw(self) -> None:
        self.calls.append("thaw")


def link(guest: Restless) -> GuestLink:
    return cast("Any", guest)


async def test_what_does_not_stand_still_at_once_is_asked_again() -> None:
    guest = Restless(2)
    await _stand_still(link(guest), "base")
    assert guest.calls == ["quiesce", "thaw", "quiesce", "thaw", "quiesce"], "and it stands still"


async def test_what_never_stands_still_makes_no_golden() -> None:
    guest = Restless(_STILL_TRIES)
    with pytest.raises(MachineFailed, match="warm-up of base"):
        await _stand_still(link(guest), "base")
