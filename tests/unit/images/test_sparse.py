"""Sparse files: zeros become holes and stay zeros, and checksums do not care how zeros are stored."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.images.sparse import copy_without_zeros, file_facts, sparse_sha256

PAGE = 4096


def test_equal_content_has_equal_sums_with_holes_or_without(tmp_path: Path) -> None:
    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    dense.write_bytes(bytes(3 * PAGE) + b"x" * PAGE + bytes(PAGE))
    with sparse.open("wb") as file:
        file.truncate(5 * PAGE)
        file.seek(3 * PAGE)
        file.write(b"x" * PAGE)
    assert sparse_sha256(dense) == sparse_sha256(sparse)


def test_place_length_and_content_count(tmp_path: Path) -> None:
    variants = [
        b"x" + bytes(2 * PAGE - 1),
        bytes(PAGE) + b"x" + bytes(PAGE - 1),
        b"x" + bytes(3 * PAGE - 1),
        b"y" + bytes(2 * PAGE - 1),
    ]
    sums = set()
    for number, content in enumerate(variants):
        (tmp_path / str(number)).write_bytes(content)
        sums.add(sparse_sha256(tmp_path / str(number)))
    assert len(sums) == len(variants)


def test_a_tail_shorter_than_a_page_counts(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(PAGE) + b"ab")
    (tmp_path / "b").write_bytes(bytes(PAGE) + b"ac")
    assert sparse_sha256(tmp_path / "a") != sparse_sha256(tmp_path / "b")
    assert file_facts(tmp_path / "a")["bytes"] == PAGE + 2


@settings(max_examples=60, deadline=None)
@given(
    pages=st.lists(st.sampled_from([b"\0", b"\0\0\0\0\0\0\0\1", b"a"]), max_size=600),
    tail=st.sampled_from([b"", b"\0", b"\0\1", b"a" * 4095]),
)
def test_the_sum_is_over_the_size_and_each_page_with_its_offset(
    tmp_path_factory: object, pages: list[bytes], tail: bytes
) -> None:
    """As image.json and golden.json of every release have it."""
    file = tmp_path_factory.mktemp("sum") / "file"  # type: ignore[attr-defined]
    content = b"".join(page * (PAGE // len(page)) for page in pages) + tail
    file.write_bytes(content)
    wanted = hashlib.sha256(len(content).to_bytes(8, "little"))
    for at in range(0, len(content), PAGE):
        if (page := content[at : at + PAGE]).strip(b"\0"):
            wanted.update(at.to_bytes(8, "little") + page)
    heard: list[int] = []
    assert sparse_sha256(file, heard.append) == wanted.hexdigest()
    assert sum(heard) <= len(content)


@settings(max_examples=60, deadline=None)
@given(pages=st.lists(st.sampled_from([b"\0", b"\0\0\0\0\0\0\0\1", b"a"]), min_size=1, max_size=40))
def test_the_copy_is_equal_and_its_zero_pages_are_holes(tmp_path_factory: object, pages: list[bytes]) -> None:
    directory = tmp_path_factory.mktemp("copy")  # type: ignore[attr-defined]
    source, copy = directory / "source", directory / "copy"
    content = b"".join(page * (PAGE // len(page)) for page in pages)
    source.write_bytes(content)
    copied = copy_without_zeros(source, copy)
    assert copy.read_bytes() == content
    used = sum(page != b"\0" for page in pages)
    assert copied == used * PAGE
    assert copy.stat().st_blocks * 512 <= used * PAGE


def test_a_large_hole_costs_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.truncate(8 << 30)
        file.seek(5 << 30)
        file.write(b"x" * PAGE)
    assert copy_without_zeros(source, tmp_path / "copy") == PAGE
    assert (tmp_path / "copy").stat().st_size == 8 << 30
