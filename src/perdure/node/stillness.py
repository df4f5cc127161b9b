"""Making a guest stand still for a capture, and making it go on.

User processes are frozen, so that a snapshot is of nothing half done, and both channels are held, so that no byte on its way
changes guest memory while it is copied. Afterwards the channels are released and the processes thawed, whatever happened
between.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from perdure.core import tracing
from perdure.core.errors import GuestUnresponsive, MachineDied
from perdure.machines.guestlink import GuestLink


@dataclass(slots=True)
class Stillness:
    """``frozen``: every user process stood still in time. ``is_over``: the machine will not go on, so nothing is thawed.
    ``owes_thaw``: the guest did not answer the thaw in time; its processes may still be frozen, and somebody must ask again."""

    frozen: bool
    is_over: bool = False
    owes_thaw: bool = False


@asynccontextmanager
async def standing_still(link: GuestLink) -> AsyncIterator[Stillness]:
    """The guest stands still inside the block. A guest that dies meanwhile is told of by its own event."""
    still = Stillness(frozen=False)
    try:
        with tracing.span("guest.stand_still"):
            still.frozen = await link.stand_still()
        yield still
    finally:
        link.release()
        if not still.is_over:
            await _thaw(link, still)


async def _thaw(link: GuestLink, still: Stillness) -> None:
    """A capture that is copied is good, whatever the guest says afterwards."""
    try:
        with tracing.span("guest.thaw"):
            await link.thaw()
    except GuestUnresponsive:
        still.owes_thaw = True
    except MachineDied:
        pass
