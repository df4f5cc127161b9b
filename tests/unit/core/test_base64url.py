"""What is written is read back, and nothing else is read."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.core import base64url


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_bytes_come_back(raw: bytes) -> None:
    text = base64url.encode(raw)
    assert base64url.decode(text) == raw
    assert "=" not in text and base64.urlsafe_b64decode(text + "==") == raw


@settings(deadline=None)
@given(st.text(max_size=20))
def test_whatever_is_read_is_the_one_writing_of_its_bytes(text: str) -> None:
    try:
        raw = base64url.decode(text)
    except ValueError:
        return
    assert base64url.encode(raw) == text


@pytest.mark.parametrize(
    "text", ["A", "AAAAA", "AA==", "AAA=", "QQ ", "Q Q", "QQ\n", "QR", "++__", "//--", "é", "\ud800", "QQ\0"]
)
def test_another_writing_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        base64url.decode(text)
