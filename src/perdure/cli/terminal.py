"""The terminal that a person sits at: raw mode, its size, and the keys that lead out of a shell in a workspace."""

from __future__ import annotations

import os
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from perdure.core.errors import InvalidRequest

DETACH_KEYS = "ctrl-p,ctrl-q"
#: What programs switch on and a person left alone with it could not use: another screen, mouse reports, bracketed paste, a hidden
#: cursor, colours.
_ORDINARY = b"\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?25h\x1b[0m"
_OTHER_SCREEN, _FIRST_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


def parse_keys(text: str) -> bytes:
    """``ctrl-p,ctrl-q`` as bytes; "" and ``none`` are no keys. Raises InvalidRequest."""
    if text.strip().lower() in {"", "none"}:
        return b""
    return b"".join(_key(word.strip()) for word in text.split(","))


def _key(word: str) -> bytes:
    if len(word) == 1 and word.isascii() and word.isprintable():
        return word.encode()
    name, _, letter = word.lower().partition("-")
    if name == "ctrl" and len(letter) == 1 and letter in "abcdefghijklmnopqrstuvwxyz@[\\]^_":
        return bytes([ord(letter.upper()) & 0x1F])
    raise InvalidRequest(f"{word!r} is not a key.", hint="Write keys such as ctrl-p,ctrl-q or ctrl-],q; 'none' for no keys.")


class Keys:
    """Looks for the detach keys in what is typed. The first of them is held back until the next is typed."""

    def __init__(self, keys: bytes) -> None:
        self._keys = keys
        self._held = 0

    def feed(self, typed: bytes) -> tuple[bytes, bool]:
        """What is to be sent, and whether the keys were typed; then the rest is dropped."""
        if not self._keys:
            return typed, False
        sent = bytearray()
        for byte in typed:
            if byte == self._keys[self._held]:
                self._held += 1
                if self._held == len(self._keys):
                    self._held = 0
                    return bytes(sent), True
                continue
            sent += self._keys[: self._held]
            self._held = 1 if byte == self._keys[0] and len(self._keys) > 1 else 0
            if not self._held:
                sent.append(byte)
        return bytes(sent), False


class Screen:
    """What was written to the terminal, as far as it must be undone by who leaves in the middle."""

    def __init__(self) -> None:
        self._tail = b""
        self._is_other = False

    def shown(self, data: bytes) -> None:
        seen = self._tail + data
        on, off = seen.rfind(_OTHER_SCREEN), seen.rfind(_FIRST_SCREEN)
        if on != off:
            self._is_other = on > off
        self._tail = seen[-len(_OTHER_SCREEN) + 1 :]

    def ordinary(self) -> bytes:
        """What brings the terminal back."""
        return (_FIRST_SCREEN if self._is_other else b"") + _ORDINARY


def size(fd: int) -> tuple[int, int]:
    """(rows, cols); 24 by 80 for one that does not know, as over a serial line."""
    cols, rows = os.get_terminal_size(fd)
    return (rows or 24, cols or 80)


@contextmanager
def raw(fd: int) -> Iterator[None]:
    """Every key as it is typed, Ctrl-C too, until the block ends, however it ends."""
    before = termios.tcgetattr(fd)
    tty.setraw(fd)
    try:
        yield
    finally:
        with suppress(termios.error):  # it is gone, as when its window was closed
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


def write(fd: int, data: bytes) -> None:
    """All of it. Raises OSError when the terminal is gone."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
