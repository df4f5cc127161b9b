"""The login shell of a terminal in memory: it echoes what is typed, runs a line when it ends, and knows Ctrl-C and Ctrl-D."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fakes.memory_guest import Command

PROMPT = b"$ "
INTERRUPT, END = 3, 4


class FakeShell:
    """``execute`` runs the words of one command and returns its code."""

    def __init__(self, command: Command, execute: Callable[[list[str]], Awaitable[int]]) -> None:
        self._command = command
        self._execute = execute
        self._line = bytearray()
        self._pending = bytearray()
        self._job: asyncio.Task[int] | None = None
        self._code = 0

    async def live(self) -> int:
        """Until ``exit`` or Ctrl-D; returns the code."""
        try:
            return await self._serve()
        finally:
            if self._job is not None:
                self._job.cancel()

    async def _serve(self) -> int:
        self._command.put("stdout", PROMPT)
        while True:
            if self._take():
                return self._code
            self._command.at_prompt = self._job is None
            typed = asyncio.ensure_future(self._command.stdin.get())
            waits: list[asyncio.Future[object]] = [typed, *([self._job] if self._job else [])]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not typed.done():
                    typed.cancel()
            if typed.done() and not typed.cancelled():
                self._pending += typed.result() or bytes([END])
            if self._job is not None and self._job.done():
                self._finish(self._job)

    def _take(self) -> bool:
        """Take what was typed, up to a line that is now running; what is typed ahead waits. True when the shell is to end."""
        if self._job is not None and INTERRUPT in self._pending:
            del self._pending[: self._pending.index(INTERRUPT) + 1]
            self._command.put("stdout", b"^C\r\n")
            self._job.cancel()
        while self._pending and self._job is None:
            if self._type(self._pending.pop(0)):
                return True
        return False

    def _finish(self, job: asyncio.Task[int]) -> None:
        self._job = None
        if not job.cancelled():
            self._code = job.result()
        self._command.put("stdout", PROMPT)

    def _type(self, byte: int) -> bool:
        """True when the shell is to end."""
        if byte == INTERRUPT:
            self._line.clear()
            self._command.put("stdout", b"^C\r\n" + PROMPT)
        elif byte == END:
            return not self._line
        elif byte in b"\r\n":
            self._command.put("stdout", b"\r\n")
            words, self._line = bytes(self._line).decode().split(), bytearray()
            if words[:1] == ["exit"]:
                self._code = int(words[1]) if words[1:] else 0
                return True
            self._job = asyncio.ensure_future(self._execute(words)) if words else None
            if not words:
                self._command.put("stdout", PROMPT)
        else:
            self._line.append(byte)
            self._command.put("stdout", bytes([byte]))
        return False
