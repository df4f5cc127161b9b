"""Keys that lead out of a shell, and what is put back when somebody leaves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.cli.terminal import DETACH_KEYS, Keys, Screen, parse_keys
from perdure.core.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "keys"),
    [(DETACH_KEYS, b"\x10\x11"), ("ctrl-],q", b"\x1dq"), ("Ctrl-A", b"\x01"), ("~,.", b"~."), ("none", b""), ("", b"")],
)
def test_keys(text: str, keys: bytes) -> None:
    assert parse_keys(text) == keys


@pytest.mark.parametrize("text", ["f1", "ctrl-", "ctrl-1", "alt-x", "ctrl-p,", "é", "ctrl-pq"])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a key"):
        parse_keys(text)


@pytest.mark.parametrize(
    ("typed", "sent", "left"),
    [
        (b"\x10\x11", b"", True),
        (b"ls\r\x10\x11rest", b"ls\r", True),
        (b"\x10x", b"\x10x", False),
        (b"\x10\x10\x11", b"\x10", True),
        (b"\x11\x10", b"\x11", False),  # the last one is held back
        (b"plain", b"plain", False),
    ],
)
def test_detaching(typed: bytes, sent: bytes, left: bool) -> None:
    whole, single = Keys(b"\x10\x11"), Keys(b"\x10\x11")
    assert whole.feed(typed) == (sent, left)
    pieces = b""
    for byte in typed:
        got, over = single.feed(bytes([byte]))
        pieces += got
        if over:
            break
    assert (pieces, over) == (sent, left)


@given(st.binary(max_size=40), st.sampled_from([b"", b"\x10\x11", b"q", b"\x10\x10"]))
def test_what_is_typed_is_sent_as_it_is_unless_it_leads_out(typed: bytes, keys: bytes) -> None:
    reader = Keys(keys)
    sent, left = reader.feed(typed)
    assert left == bool(keys and keys in typed)
    if not left:
        assert typed.startswith(sent) and len(typed) - len(sent) <= max(0, len(keys) - 1)


def test_another_screen_is_left_and_only_then() -> None:
    screen = Screen()
    assert b"?1049l" not in screen.ordinary()
    for piece in (b"x\x1b[?10", b"49hfull screen"):
        screen.shown(piece)
    assert b"?1049l" in screen.ordinary()
    screen.shown(b"\x1b[?1049l")
    assert b"?1049l" not in screen.ordinary()
