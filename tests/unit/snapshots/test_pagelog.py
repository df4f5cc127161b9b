"""The page log: every history of writes, wakes and forks comes back byte for byte; damage is named."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.core.errors import CorruptSnapshot, InvalidRequest, NoSpace
from perdure.core.ids import SegmentId
from perdure.machines.driver import PAGE_SIZE
from perdure.snapshots import flushes, pagekinds, pagelog
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.pageindex import PageIndex
from perdure.snapshots.pagelog import record
from perdure.snapshots.pageread import load
from perdure.snapshots.segments import (
    Codec,
    SegmentWriter,
    encode_frame,
)
from tests.fakes.base_ram import RAM_PAGES, make_base
from tests.fakes.disk import RecordingDisk
from tests.fakes.page_model import Model, captured, restored, writer

STEP = st.one_of(
    st.tuples(
        st.just("write"),
        st.lists(
            st.tuples(
                st.integers(0, RAM_PAGES - 1),
                st.sampled_from(["zero", "base", "word", "text", "random", "gone"]),
                st.integers(0, 2**32 - 1),
            ),
            max_size=90,
        ),
    ),
    st.tuples(st.sampled_from(["capture", "hibernate", "wake", "fork"]), st.just([])),
)


@settings(max_examples=100, deadline=None)
@given(history=st.lists(STEP, min_size=1, max_size=12), choice=st.randoms(use_true_random=False))
def test_any_history_comes_back_exactly(history: list, choice) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        base = make_base(directory)
        machines = [Model(base, base.pages.copy(), PageIndex(RAM_PAGES))]
        segments = {id(machines[0]): writer(directory)}
        for kind, writes in [*history, ("capture", [])]:
            machine = choice.choice(machines)
            if kind == "write":
                for page, how, seed in writes:
                    machine.write(page, how, seed)
                continue
            captured = machine.still() if kind == "hibernate" else machine.copied(lately=choice.random() < 0.7)
            closed = sorted(machine.index.segments() - {segments[id(machine)].segment_id})
            leave = frozenset(name for name in closed if choice.random() < 0.3)
            machine.index = record(directory, machine.index, base, captured, segments[id(machine)], leave=leave).index
            assert not machine.index.segments() & leave
            check_index(machine)
            if kind in ("wake", "fork"):
                again = Model(base, restored(directory, machine.index, base), machine.index)
                again.private = set(machine.index.pages.tolist()) | set(machine.index.zeros.tolist())
                segments[id(again)] = writer(directory)
                if kind == "wake":
                    machines.remove(machine)
                machines.append(again)
            assert np.array_equal(restored(directory, machine.index, base), machine.ram)
        for segment in segments.values():
            segment.close()


def check_index(machine: Model) -> None:
    """A page is in the index if and only if it differs from the base; it is a zero page exactly when it is zero."""
    differs = (machine.ram != machine.base.pages).any(axis=1)
    zero = ~machine.ram.any(axis=1)
    assert np.array_equal(machine.index.zeros, np.flatnonzero(differs & zero))
    assert np.array_equal(machine.index.pages, np.flatnonzero(differs & ~zero))


def test_only_what_changed_since_the_last_capture_is_appended(tmp_path: Path, base: BaseRam) -> None:
    machine = Model(base, base.pages.copy(), PageIndex(RAM_PAGES))
    for page in range(150):
        machine.write(page, "random", page)
    log = writer(tmp_path)
    first = record(tmp_path, machine.index, base, (machine.written(), machine.ram[:150]), log)
    assert first.pages_changed == 150
    machine.write(3, "word", 1)
    machine.write(4, "zero", 1)
    machine.write(6, "base", 1)
    second = record(tmp_path, first.index, base, (machine.written(), machine.ram[:150]), log)
    assert second.pages_changed == 1
    assert 4 in second.index.zeros
    assert 6 not in second.index.pages
    third = record(tmp_path, second.index, base, (machine.written(), machine.ram[:150]), log)
    assert (third.pages_changed, third.appended_bytes) == (0, 0)
    assert third.index.to_bytes() == second.index.to_bytes()
    assert third.index.ends() == {log.segment_id: log.size}
    log.close()


@pytest.mark.parametrize("how", ["all", "lately", "still"])
def test_a_wake_never_decodes_twice_what_it_needs(tmp_path: Path, base: BaseRam, how: str) -> None:
    """Hot pages move to every capture's own frames, and leave behind frames of which a few cold pages are needed."""
    machine, log = captured(tmp_path, base)
    chance = np.random.default_rng(11)
    decoded = []
    for number in range(30):
        for page in {*range(40), *chance.integers(40, 130, 8).tolist()}:
            machine.write(page, "random", 1000 * number + page)
        content = machine.still() if how == "still" else machine.copied(lately=how == "lately")
        machine.index = record(tmp_path, machine.index, base, content, log).index
        decoded.append(int(machine.index.frames.count.sum()))
        assert np.array_equal(restored(tmp_path, machine.index, base), machine.ram)
    assert max(decoded) <= 2 * 130, decoded
    log.close()


def test_of_what_was_not_copied_everything_keeps_its_place(tmp_path: Path, base: BaseRam) -> None:
    machine, log = captured(tmp_path, base)
    machine.write(70, "zero", 1)
    machine.index = record(tmp_path, machine.index, base, machine.copied(lately=False), log).index
    before = machine.index
    machine.write(3, "random", 1)
    machine.write(5, "gone", 1)
    done = record(tmp_path, before, base, machine.copied(lately=True), log)
    assert (done.pages_changed, done.damaged) == (1, False)
    assert done.index.zeros.tolist() == [70]
    assert 5 not in done.index.pages
    there, at = before.find(done.index.pages)
    same = there & (done.index.pages != 3)
    assert np.array_equal(before.slot[at[same]], done.index.slot[same])
    offsets = before.frames.offset[before.frame[at[same]]]
    assert np.array_equal(offsets, done.index.frames.offset[done.index.frame[same]])
    assert np.array_equal(restored(tmp_path, done.index, base), machine.ram)
    machine.write(70, "random", 1)
    machine.write(71, "gone", 1)
    done = record(tmp_path, done.index, base, machine.copied(lately=True), log)
    assert done.index.zeros.tolist() == []
    idle = record(tmp_path, done.index, base, machine.copied(lately=True), log)
    assert (idle.pages_changed, idle.appended_bytes) == (0, 0)
    assert idle.index.to_bytes() == done.index.to_bytes()
    assert np.array_equal(restored(tmp_path, idle.index, base), machine.ram)
    log.close()


def test_a_segment_is_left_without_a_copy_of_its_pages(tmp_path: Path, base: BaseRam) -> None:
    """They come from the log; damage among them is never written anew, but told, and mended by a capture of all pages."""
    machine, log = captured(tmp_path, base)
    log.close()
    machine.lately = set()
    again = writer(tmp_path)
    done = record(tmp_path, machine.index, base, machine.copied(lately=True), again, leave=frozenset((log.segment_id,)))
    assert done.index.segments() == {again.segment_id}
    assert (done.pages_changed, done.damaged) == (130, False)
    assert np.array_equal(restored(tmp_path, done.index, base), machine.ram)
    data = bytearray(log.path.read_bytes())
    data[int(machine.index.frames.offset[1]) + 200] ^= 1
    log.path.write_bytes(data)
    third = writer(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pagelog, "_FRAMES_PER_MOVE", 1)
        done = record(tmp_path, machine.index, base, machine.copied(lately=True), third, leave=frozenset((log.segment_id,)))
    assert done.damaged
    assert done.pages_changed == 130 - 64, "the others are saved"
    with pytest.raises(CorruptSnapshot):
        restored(tmp_path, done.index, base)
    done = record(tmp_path, done.index, base, machine.copied(lately=False), third)
    assert not done.damaged
    assert np.array_equal(restored(tmp_path, done.index, base), machine.ram)
    for segment in (again, third):
        segment.close()


def test_a_full_disk_takes_back_what_was_moved_too(tmp_path: Path) -> None:
    disk = RecordingDisk(tmp_path)
    base = make_base(tmp_path)
    machine, log = captured(tmp_path, base)
    log.close()
    machine.lately = set()
    machine.write(3, "random", 5)
    copied = machine.copied(lately=True)
    again = SegmentWriter(tmp_path, SegmentId("seg_full"), disk)
    disk.room = 20_000  # for the copied page, not for those that move
    with pytest.raises(NoSpace):
        record(tmp_path, machine.index, base, copied, again, leave=frozenset((log.segment_id,)))
    assert again.size <= 64, "at most its head is left"
    disk.room = None
    done = record(tmp_path, machine.index, base, copied, again, leave=frozenset((log.segment_id,)))
    assert np.array_equal(restored(tmp_path, done.index, base), machine.ram)
    again.close()


def test_an_idle_machine_writes_no_segment(tmp_path: Path, base: BaseRam) -> None:
    log = writer(tmp_path)
    done = record(tmp_path, PageIndex(RAM_PAGES), base, (np.arange(5, dtype=np.uint32), base.pages[:5]), log)
    assert (len(done.index.pages), len(done.index.zeros), done.index.segments()) == (0, 0, frozenset())
    assert not log.path.exists()


def test_every_damaged_byte_of_a_segment_is_noticed(tmp_path: Path, base: BaseRam) -> None:
    machine, log = captured(tmp_path, base)
    log.close()
    good = log.path.read_bytes()
    for at in [*range(64), *range(64, len(good) - 8, 4099), len(good) // 2]:
        bad = bytearray(good)
        bad[at] ^= 0x40
        log.path.write_bytes(bad)
        with pytest.raises(CorruptSnapshot, match=log.path.name):
            restored(tmp_path, machine.index, base)
    log.path.write_bytes(good[:-9])
    with pytest.raises(CorruptSnapshot, match=r"ends too early"):
        restored(tmp_path, machine.index, base)
    log.path.unlink()
    with pytest.raises(CorruptSnapshot, match=r"missing"):
        restored(tmp_path, machine.index, base)


def test_every_damaged_byte_of_an_index_is_noticed(tmp_path: Path, base: BaseRam) -> None:
    machine, log = captured(tmp_path, base)
    log.close()
    good = machine.index.to_bytes()
    assert PageIndex.from_bytes(good, "ram.index").to_bytes() == good
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1
        with pytest.raises(CorruptSnapshot, match=r"ram\.index"):
            PageIndex.from_bytes(bytes(bad), "ram.index")
    for size in (0, 5, len(good) - 1):
        with pytest.raises(CorruptSnapshot, match=r"ram\.index"):
            PageIndex.from_bytes(good[:size], "ram.index")


def test_a_frame_that_holds_other_pages_is_refused(tmp_path: Path, base: BaseRam) -> None:
    """A misdirected write gives a valid frame at the wrong place."""
    machine, log = captured(tmp_path, base)
    log.close()
    other = encode_frame(np.arange(1, 65, dtype=np.uint32), base.pages[:64], base.pages[:64], Codec.RAW)
    frames = machine.index.frames
    log.path.write_bytes(log.path.read_bytes()[: int(frames.offset[0])] + b"".join(other.parts))
    frames.length.setflags(write=True)
    frames.length[0] = other.size
    with pytest.raises(CorruptSnapshot, match="other pages"):
        list(load(tmp_path, machine.index, base))


def test_a_damaged_log_mends_itself_at_the_next_capture(tmp_path: Path, base: BaseRam) -> None:
    machine, log = captured(tmp_path, base)
    damaged = bytearray(log.path.read_bytes())
    damaged[70] ^= 1
    log.path.write_bytes(damaged)
    log.close()
    again = writer(tmp_path)
    done = record(tmp_path, machine.index, base, (machine.written(), machine.ram[:130]), again)
    again.close()
    assert done.pages_changed > 0
    assert np.array_equal(restored(tmp_path, done.index, base), machine.ram)


@pytest.mark.parametrize("room", [0, 100, 5000, 300_000])
def test_a_full_disk_loses_nothing(tmp_path: Path, room: int) -> None:
    disk = RecordingDisk(tmp_path)
    base = make_base(tmp_path)
    machine = Model(base, base.pages.copy(), PageIndex(RAM_PAGES))
    log = SegmentWriter(tmp_path, SegmentId("seg_full"), disk)
    machine.write(0, "random", 5)
    machine.index = record(tmp_path, machine.index, base, (machine.written(), machine.ram[:1]), log).index
    before = log.size
    for page in range(150):
        machine.write(page, "random", page)
    disk.room = room
    with pytest.raises(NoSpace, match="no room left"):
        record(tmp_path, machine.index, base, (machine.written(), machine.ram[:150]), log)
    assert log.size == before == log.path.stat().st_size
    disk.room = None
    done = record(tmp_path, machine.index, base, (machine.written(), machine.ram[:150]), log)
    log.close()
    assert np.array_equal(restored(tmp_path, done.index, base), machine.ram)


def test_a_segment_that_cannot_be_begun_leaves_no_file(tmp_path: Path) -> None:
    disk = RecordingDisk(tmp_path)
    disk.room = 10
    base = make_base(tmp_path)
    log = SegmentWriter(tmp_path, SegmentId("seg_none"), disk)
    with pytest.raises(NoSpace):
        record(tmp_path, PageIndex(RAM_PAGES), base, (np.array([1], np.uint32), base.pages[:1] + np.uint8(1)), log)
    assert not log.path.exists()


def test_live_bytes_tell_the_share_still_used(tmp_path: Path, base: BaseRam) -> None:
    machine, log = captured(tmp_path, base)
    whole = machine.index.live_bytes()[log.segment_id]
    assert whole == machine.index.stored_bytes() == log.size - 64
    for page in range(64):
        machine.write(page, "base", 0)
    again = writer(tmp_path)
    index = record(tmp_path, machine.index, base, (machine.written(), machine.ram[:130]), again).index
    assert 0.4 * whole < index.live_bytes()[log.segment_id] < 0.6 * whole
    again.close()
    log.close()


def test_a_file_that_is_not_a_memory_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"x" * 5000)
    with pytest.raises(InvalidRequest, match="odd is not a memory image"):
        BaseRam(tmp_path / "odd")


def test_a_large_record_is_handed_to_the_disk_while_it_is_made(
    tmp_path: Path, base: BaseRam, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a disk that refuses at one of these syncs makes it fail: nobody would hear of it at the next."""
    monkeypatch.setattr(flushes, "_BYTES_PER_FLUSH", 64 * PAGE_SIZE)
    monkeypatch.setattr(pagelog, "_FRAMES_PER_WRITE", 1)
    pages = np.arange(RAM_PAGES, dtype=np.uint32)
    content = np.random.default_rng(3).integers(0, 255, (RAM_PAGES, PAGE_SIZE), np.uint8)
    first = writer(tmp_path)
    syncs = []
    monkeypatch.setattr(first, "sync", lambda: syncs.append(first.size))
    recorded = record(tmp_path, PageIndex(RAM_PAGES), base, (pages, content), first)
    assert len(syncs) >= 1
    assert np.array_equal(restored(tmp_path, recorded.index, base), content)

    def refuse() -> None:
        raise NoSpace("The disk is full.")

    before = first.size
    monkeypatch.setattr(first, "sync", refuse)
    with pytest.raises(NoSpace):
        record(tmp_path, PageIndex(RAM_PAGES), base, (pages, content[::-1]), first)
    assert first.size == before, "what it had written is taken back"


def test_rows_are_taken_in_their_order(base: BaseRam) -> None:
    content = np.arange(10 * PAGE_SIZE, dtype=np.uint32).astype(np.uint8).reshape(10, PAGE_SIZE)
    content[:, 0] = np.arange(10)
    for rows in ([3, 4, 5], [0, 2, 1, 3], [5], [], [9, 0], [0, 9], list(range(10))):
        wanted = np.array(rows, np.intp)
        assert np.array_equal(pagekinds.take(content, wanted), content[wanted])
