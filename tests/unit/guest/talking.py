"""A file operation of the agent, done here and now: what it says, in order, for what it is told."""

from __future__ import annotations

from collections import deque
from typing import Any

from perdure.guest.fileops import WORKS, prepare
from perdure.guest.hands import Tag
from perdure.wire.guest.frames import DATA_MAX


class Told:
    """Stands in for ``hands.Talk``. A source is always asked for more; ``words`` are what a sink is told."""

    def __init__(self, words: list[Any] | None = None) -> None:
        self._words = None if words is None else deque(words)
        self.said: list[tuple[str, Any]] = []

    def say(self, tag: str, value: Any = None) -> None:
        self.said.append((tag, value))

    def listen(self) -> Any:
        return DATA_MAX if self._words is None else self._words.popleft()

    def check(self) -> None:
        """It is always wanted."""

    @property
    def has_word(self) -> bool:
        return bool(self._words)

    @property
    def data(self) -> bytes:
        return b"".join(value for tag, value in self.said if tag == Tag.DATA)

    @property
    def answer(self) -> Any:
        """Of the last thing that was said with a value."""
        return [value for _, value in self.said if isinstance(value, dict)][-1]


def do(op: str, words: list[Any] | None = None, **request: Any) -> Told:
    """Do it; raises what the hand would be told."""
    told = Told(words)
    prepare(op)
    WORKS[op](told, {"op": op, **request})  # type: ignore[arg-type]
    return told


def sent(*pieces: bytes) -> list[Any]:
    """The words of a transfer that is complete."""
    import zlib

    whole = b"".join(pieces)
    return [*pieces, {"length": len(whole), "crc32": zlib.crc32(whole)}]
