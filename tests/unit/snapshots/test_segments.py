"""Frames and segments: every codec gives back what it was given, and what is damaged is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perdure.core.errors import CorruptSnapshot
from perdure.core.ids import SegmentId
from perdure.machines.driver import PAGE_SIZE, Pages
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.segments import Codec, SegmentReader, decode_head, decode_pages, encode_frame, page_hashes


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("count", [1, 2, 63, 64])
def test_every_codec_gives_back_what_it_was_given(base: BaseRam, codec: Codec, count: int) -> None:
    pages = np.arange(3, 3 + count, dtype=np.uint32)
    content = _text(count)
    content[0, 5] ^= 1
    content[-1] = 7
    data = b"".join(encode_frame(pages, content, base.read(pages), codec).parts)
    assert len(data) % 8 == 0
    frame = decode_head(memoryview(data), "seg")
    assert frame.codec is codec
    assert np.array_equal(decode_pages(frame, base.read(pages), "seg"), content)
    assert np.array_equal(page_hashes(content), frame.hashes)


def _text(count: int) -> Pages:
    return np.resize(np.frombuffer(b"some lines of text ", np.uint8), (count, PAGE_SIZE))


@pytest.mark.parametrize(("asked", "plain"), [(Codec.ZSTD, Codec.RAW), (Codec.WORDS_ZSTD, Codec.WORDS)])
def test_what_does_not_shrink_is_stored_as_it_is(base: BaseRam, asked: Codec, plain: Codec) -> None:
    noise = np.random.default_rng(5).integers(0, 256, (4, PAGE_SIZE), dtype=np.uint8)
    pages = np.arange(4, dtype=np.uint32)
    for content, codec in ((_text(4), asked), (noise, plain)):
        frame = decode_head(memoryview(b"".join(encode_frame(pages, content, base.read(pages), asked).parts)), "seg")
        assert frame.codec is codec
        assert np.array_equal(decode_pages(frame, base.read(pages), "seg"), content)


def test_a_payload_that_cannot_be_decoded_is_named(base: BaseRam) -> None:
    pages = np.arange(4, dtype=np.uint32)
    for codec in (Codec.ZSTD, Codec.WORDS, Codec.WORDS_ZSTD):
        frame = decode_head(memoryview(b"".join(encode_frame(pages, _text(4), base.pages[:4], codec).parts)), "seg")
        for payload in (frame.payload[:-1], frame.payload[:3], b"x" * len(frame.payload)):
            with pytest.raises(CorruptSnapshot, match="seg are damaged: a frame cannot be decoded"):
                decode_pages(replace(frame, payload=memoryview(payload)), base.read(pages), "seg")


def test_a_frame_holds_one_to_64_pages(base: BaseRam) -> None:
    for count in (0, 65):
        with pytest.raises(ValueError, match="1 to 64 pages"):
            encode_frame(np.arange(count, dtype=np.uint32), base.pages[:count], base.pages[:count], Codec.RAW)


def test_a_reader_refuses_another_segment(tmp_path: Path) -> None:
    (tmp_path / "seg_a.pages").write_bytes(b"PDRSEG01" + b"seg_b".ljust(56, b"\0"))
    with pytest.raises(CorruptSnapshot, match="not that of this segment"):
        SegmentReader(tmp_path, SegmentId("seg_a"))
    with pytest.raises(CorruptSnapshot, match="too early"):
        decode_head(memoryview(b"FRM1"), "seg_a.pages")


@pytest.mark.parametrize("fill", [0, 256, 1024, PAGE_SIZE])
def test_a_frame_of_which_some_shrinks_is_compressed(base: BaseRam, fill: int) -> None:
    """The probe looks at the middle of every page; what is left alone is what does not shrink there."""
    content = np.random.default_rng(1).integers(0, 255, (64, PAGE_SIZE), np.uint8)
    middle = PAGE_SIZE // 2
    content[:32, max(0, middle - fill) : middle + fill] = 7
    numbers = np.arange(64, dtype=np.uint32)
    encoded = encode_frame(numbers, content, base.pages[:0], Codec.ZSTD)
    frame = decode_head(memoryview(b"".join(bytes(part) for part in encoded.parts)), "x")
    assert frame.codec is (Codec.ZSTD if fill else Codec.RAW)
    assert np.array_equal(decode_pages(frame, base.pages[:0], "x"), content)
