"""What the demo and the benchmarks ask of their server's store, over a directory and a server that is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest

from perdure.core.config import Settings
from perdure.demo import server as serving
from perdure.demo.server import EMPTY_BYTES, Server


class Idle(Server):
    """``after``: in the how manieth wait the last file goes; ``ends``: in which the server ends."""

    def __init__(self, home: Path, after: int | None, ends: int | None) -> None:
        settings = Settings(home=home)
        super().__init__(settings, cast(Any, None), home / "log")
        settings.store.mkdir(parents=True)
        self.file = settings.store / "file"
        self.file.write_bytes(os.urandom(2 * EMPTY_BYTES))
        self.waits = 0
        self._after, self._ends = after, ends

    async def ends_within(self, seconds: float) -> bool:
        self.waits += 1
        if self.waits == self._after:
            self.file.unlink()
        return self.waits == self._ends


async def test_files_that_go_a_moment_after_their_delete_are_waited_for(tmp_path: Path) -> None:
    idle = Idle(tmp_path, after=3, ends=None)
    assert idle.stored_bytes() >= 2 * EMPTY_BYTES
    assert await idle.emptied() < EMPTY_BYTES
    assert idle.waits == 3
    assert await idle.emptied() < EMPTY_BYTES
    assert idle.waits == 3, "what is empty is not waited for"


async def test_what_stays_is_told_after_a_while_or_when_the_server_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "EMPTIED_DEADLINE_S", 5 * serving.ASK_EVERY_S)
    stays = Idle(tmp_path / "stays", after=None, ends=None)
    assert await stays.emptied() >= 2 * EMPTY_BYTES
    assert stays.waits == 5
    ends = Idle(tmp_path / "ends", after=None, ends=2)
    assert await ends.emptied() >= 2 * EMPTY_BYTES
    assert ends.waits == 2
