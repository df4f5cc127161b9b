"""Backups and restores, killed at each of their named points: steps of the lives that the rounds of ``kills`` kill."""

from __future__ import annotations

from contextlib import suppress

import psycopg

from perdure.workspaces.model import Workspace
from tests.torture.life import Life
from tests.torture.registry import Part, Work
from tests.torture.saving import Recovering, Saving
from tests.torture.server import Server


async def _back_up(life: Life, _one: Workspace) -> None:
    await Saving(life.server).back_up()


async def _restore(life: Life, _one: Workspace) -> None:
    """Of what is the case now, beside the server."""
    saving = Saving(life.server)
    await saving.back_up()
    with suppress(psycopg.Error):  # its database is made by hand, and may be away
        await saving.restore()
    await life._check()


async def _recover(life: Life, _one: Workspace) -> None:
    """The catalogue of what is here now, of its copy in a store alone."""
    with suppress(psycopg.Error):
        await Recovering(life.server).recover()
    await life._check()


async def _begin(server: Server) -> None:
    """As a server does at its start."""
    await Saving(server).service.start()


async def _mend(server: Server) -> None:
    await Saving(server).service.reap()


async def _check(server: Server) -> None:
    await Saving(server).check()
    await Recovering(server).check()


#: A restore takes as long as all the rest of a life, so that only who waits for one of its points has to wait for it.
WORKS = (
    Work("back up", _back_up, 1, ("backup.",)),
    Work("restore", _restore, 0, ("restore.",)),
    Work("recover", _recover, 0, ("recover.",)),
)
PARTS = (Part(_begin, _check, _mend),)
