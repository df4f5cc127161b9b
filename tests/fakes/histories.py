"""Histories that are verified, in memory: what a test says was found."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from perdure.runs.service.histories import History


class FakeHistories:
    """Implements ``Histories``."""

    def __init__(self) -> None:
        self.found: list[History] = []

    async def verify(self) -> AsyncGenerator[History]:
        for one in self.found:
            yield one
