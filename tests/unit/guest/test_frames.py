"""Frames survive every cut, and half frames of an earlier connection never count (DESIGN D3)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.wire.guest.frames import (
    ANNOUNCE,
    FRAME_MAX,
    NOPS,
    PAYLOAD_MAX,
    SYNC_BYTES,
    SYNC_MAGIC,
    Decoder,
    FrameType,
    encode,
    encode_sync,
)

NONCE = bytes(range(16))
frames = st.tuples(st.integers(1, 10), st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=300))


def synced() -> Decoder:
    decoder = Decoder()
    assert decoder.feed(encode_sync(NONCE)) == [(FrameType.SYNC, 0, 0, NONCE)]
    return decoder


def wire(frame: tuple[int, int, int, bytes]) -> bytes:
    kind, flags, stream, payload = frame
    return encode(kind, stream, payload, flags)


@given(st.lists(frames, max_size=8), st.data())
def test_any_frames_come_out_whole_whatever_the_cuts_and_no_ops_between(sent: list, data: st.DataObject) -> None:
    stream = b"".join(wire(frame) + bytes(data.draw(st.integers(0, 5))) for frame in sent)
    decoder, received, position = synced(), [], 0
    while position < len(stream):
        size = data.draw(st.integers(1, 200))
        received += decoder.feed(stream[position : position + size])
        position += size
    assert received == sent


def test_the_longest_frame_passes_byte_by_byte_and_a_longer_payload_is_refused() -> None:
    longest = encode(FrameType.DATA, 7, b"\xa5" * PAYLOAD_MAX)
    assert len(longest) == FRAME_MAX
    decoder = synced()
    received = [frame for position in range(0, FRAME_MAX, 97) for frame in decoder.feed(longest[position : position + 97])]
    assert received == [(FrameType.DATA, 0, 7, b"\xa5" * PAYLOAD_MAX)]
    with pytest.raises(ValueError, match="does not fit"):
        encode(FrameType.DATA, 7, bytes(PAYLOAD_MAX + 1))


@pytest.mark.parametrize(
    "payload",
    [b"", b"\0", bytes(40), b"text" + bytes(36), SYNC_MAGIC, encode_sync(b"x" * 16)[:-1], b"\xa5" * 20],
    ids=["empty", "zero", "zeros", "zero tail", "magic", "most of a sync", "end bytes"],
)
def test_a_frame_cut_at_every_byte_never_joins_the_next_connection(payload: bytes) -> None:
    whole = encode(FrameType.DATA, 3, payload)
    after = encode(FrameType.EOF, 5)
    for cut in range(len(whole)):
        decoder = synced()
        received = decoder.feed(whole[:cut] + NOPS + encode_sync(b"new-connection!!") + after)
        counted = [frame for frame in received if frame[0] != FrameType.BROKEN]
        assert counted == [(FrameType.SYNC, 0, 0, b"new-connection!!"), (FrameType.EOF, 0, 5, b"")], cut


def test_a_header_that_claims_the_longest_frame_is_flushed_by_the_no_ops() -> None:
    longest = encode(FrameType.DATA, 3, bytes(PAYLOAD_MAX))
    for cut in (1, 3, 12, 13, 5000, FRAME_MAX - 1):
        received = synced().feed(longest[:cut] + NOPS + encode_sync(NONCE))
        assert received[-1] == (FrameType.SYNC, 0, 0, NONCE)
        assert all(frame[0] != FrameType.DATA for frame in received)


def test_a_sync_cut_at_every_byte_does_not_hide_the_next() -> None:
    for cut in range(SYNC_BYTES):
        received = synced().feed(encode_sync(b"y" * 16)[:cut] + NOPS + encode_sync(NONCE))
        assert received[-1] == (FrameType.SYNC, 0, 0, NONCE), cut
        assert (FrameType.SYNC, 0, 0, b"y" * 16) not in received


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_a_new_decoder_drops_everything_before_the_first_sync(before: bytes, after: bytes) -> None:
    decoder = Decoder()
    received = decoder.feed(before + encode_sync(NONCE)) + decoder.feed(encode(FrameType.DATA, 1, after))
    assert received == [(FrameType.SYNC, 0, 0, NONCE), (FrameType.DATA, 0, 1, after)]


@given(st.binary(min_size=1, max_size=60), st.integers(0, 10**6), st.integers(1, 255))
def test_a_flipped_bit_breaks_the_frame_and_only_a_sync_mends_it(payload: bytes, where: int, flip: int) -> None:
    frame = bytearray(encode(FrameType.DATA, 9, payload))
    frame[where % len(frame)] ^= flip
    decoder = synced()
    received = decoder.feed(bytes(frame) + NOPS)
    assert all(found[0] == FrameType.BROKEN for found in received)
    assert decoder.feed(encode_sync(ANNOUNCE))[-1] == (FrameType.SYNC, 0, 0, ANNOUNCE)


@given(st.binary(max_size=3000))
def test_no_bytes_a_peer_can_send_raise_or_pile_up(noise: bytes) -> None:
    decoder = synced()
    for _ in range(3):
        decoder.feed(noise)
    decoder.feed(NOPS * 2)
    assert decoder.feed(encode_sync(NONCE))[-1] == (FrameType.SYNC, 0, 0, NONCE)
    assert decoder._end - decoder._begin <= FRAME_MAX
