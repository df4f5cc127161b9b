"""Hints: ranges that cover pages, and files on which nothing depends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.ids import SnapshotId
from perdure.snapshots.hints import GAP_PAGES, RANGES_MAX, Hint, Hints, pages_of, ranges_of
from tests.fakes.disk import QuickDisk
from tests.fakes.tiny_node import Node, capture, files_of

ONE, TWO = (SnapshotId(f"snp_{number:026d}") for number in (1, 2))
HINT = Hint(np.array([[3, 4], [100, 1]], np.uint32), {"dsk_1.qcow2": np.array([[0, 2]], np.uint32)})


@given(st.sets(st.integers(0, 5000), max_size=300))
def test_ranges_cover_their_pages_and_little_else(numbers: set[int]) -> None:
    pages = np.array(sorted(numbers), np.uint32)
    ranges = ranges_of(pages)
    covered = pages_of(ranges)
    assert set(pages.tolist()) <= set(covered.tolist())
    assert len(covered) <= len(pages) * (GAP_PAGES + 1)
    ends = (ranges[:, 0] + ranges[:, 1]).tolist()
    assert all(following - end > GAP_PAGES for end, following in zip(ends, ranges[1:, 0].tolist(), strict=False))
    assert np.array_equal(ranges_of(covered), ranges)


def test_there_is_an_end_to_ranges() -> None:
    assert len(ranges_of(np.arange(0, 1 << 20, 100, dtype=np.uint32))) == RANGES_MAX


def same(one: Hint | None, other: Hint) -> bool:
    return one is not None and one.to_bytes() == other.to_bytes()


def test_a_hint_is_read_as_it_was_written(tmp_path: Path) -> None:
    hints = Hints(tmp_path / "hints", QuickDisk())
    hints.open([])
    assert hints.read(ONE) is None
    hints.write(ONE, HINT)
    assert same(hints.read(ONE), HINT)
    hints.write(ONE, Hint())
    assert same(hints.read(ONE), Hint())
    hints.drop(ONE)
    hints.drop(ONE)
    assert hints.read(ONE) is None
    hints.write(SnapshotId("../../etc/x"), HINT)
    assert list(tmp_path.rglob("*")) == [tmp_path / "hints"]


@pytest.mark.parametrize("where", [0, 10, 16, 17, 40, -1])
def test_a_damaged_hint_is_none(tmp_path: Path, where: int) -> None:
    hints = Hints(tmp_path, QuickDisk())
    hints.write(ONE, HINT)
    path = tmp_path / f"{ONE}.hint"
    good = path.read_bytes()
    bad = bytearray(good)
    bad[where] ^= 1
    for data in (bytes(bad), good[:where], b"", good.replace(b'"version":1', b'"version":2')):
        path.write_bytes(data)
        assert hints.read(ONE) is None
    other = Hint.to_bytes(HINT).partition(b"\n")[2].replace(b'"version":1', b'"version":2')
    path.write_bytes(seal(other))
    assert hints.read(ONE) is None, "of another release"


def seal(body: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(body).encode() + b"\n" + body


async def test_the_store_keeps_hints_as_long_as_their_snapshots(node: Node) -> None:
    run, machine = await node.wake(1)
    first = await capture(run, machine)
    second = await capture(run, machine, goes_on=False)
    run.end()
    hints = node.store.hints
    for name in (first.snapshot_id, second.snapshot_id, ONE):
        hints.write(name, HINT)
    node.store.delete([first.snapshot_id])
    assert hints.read(first.snapshot_id) is None
    assert node.store.open().debris == (), "a hint that nobody needs is no debris that anyone should hear of"
    assert hints.read(ONE) is None
    assert same(hints.read(second.snapshot_id), HINT)
    path = node.store.root / "hints" / f"{second.snapshot_id}.hint"
    path.write_bytes(b"torn")
    node.store.verify(second.snapshot_id, node.base.ram)
    again, _ = await node.wake(2, second.snapshot_id)
    again.end()
    node.store.delete([second.snapshot_id])
    assert files_of(node) == set()
