"""The spool keeps the newest bytes and says what it lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perdure.guest.spool import Spool


@given(st.lists(st.binary(max_size=60), max_size=40), st.integers(1, 100), st.integers(0, 2000), st.integers(1, 50))
def test_reading_gives_what_was_written_after_the_gap_it_names(chunks: list[bytes], limit: int, offset: int, size: int) -> None:
    spool, everything = Spool(limit), b"".join(chunks)
    for chunk in chunks:
        spool.append(chunk)
    assert spool.end == len(everything)
    assert spool.held >= min(limit, len(everything))
    assert spool.held <= limit + limit // 4 + 60
    offset = min(offset, len(everything))
    gap, data = spool.read(offset, size)
    assert data == everything[offset + gap : offset + gap + size]
    assert gap == max(0, spool.start - offset)


def test_nothing_is_lost_within_the_limit() -> None:
    spool = Spool(10)
    spool.append(b"0123456789")
    assert spool.read(0, 100) == (0, b"0123456789")
    assert spool.read(10, 100) == (0, b"")
    spool.append(b"abc")
    assert spool.read(0, 100) == (3, b"3456789abc")
