"""Layers that are written together read as they did one over the other; QEMU's own tools are the judge."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from perdure.core.errors import CorruptSnapshot, InvalidRequest, NoSpace
from perdure.core.files import DISK
from perdure.snapshots import clusters
from perdure.snapshots.bases import Abandoned
from perdure.snapshots.clusters import Union, Written
from perdure.snapshots.layers import CLUSTER, Layout, create_layer, inspect
from tests.fakes.disk import RecordingDisk
from tests.fakes.layer import read_cluster, write_cluster

NEVER = threading.Event()
DISK_BYTES = 9 << 20  # five L2 tables, the last of them half


def qemu(*argv: str | Path) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def graph(paths: list[Path]) -> str:
    """The chain as QEMU's machines get it, bottom first; the lowest is raw."""
    node: dict[str, object] = {"driver": "raw", "file": {"driver": "file", "filename": str(paths[0])}}
    for path in paths[1:]:
        file = {"driver": "file", "filename": str(path), "discard": "unmap"}
        node = {"driver": "qcow2", "discard": "unmap", "file": file, "backing": node}
    return f"json:{json.dumps(node)}"


def content_of(paths: list[Path], scratch: Path) -> bytes:
    target = scratch / "content.raw"
    qemu("qemu-img", "convert", "-O", "raw", graph(paths), target)
    return target.read_bytes()


def merged(paths: list[Path], target: Path, enough: threading.Event = NEVER) -> Written:
    with Union(paths, enough) as union:
        return union.write(target, DISK)


def write_history(rng: random.Random, below: list[Path], layer: Path) -> None:
    """What a guest may do to its disk, over everything below."""
    create_layer(layer, DISK_BYTES)
    commands = []
    for _ in range(rng.randint(0, 14)):
        at = rng.randrange(0, DISK_BYTES, 512)
        length = min(rng.choice((512, 4096, 3 * 4096, 70000 // 512 * 512, 1 << 20)), DISK_BYTES - at)
        if rng.random() < 0.5:
            at = at // 4096 * 4096
            length = min(length, DISK_BYTES - at)
        kind = rng.choice(("write", "write", "write", "zeros", "unmapped", "discard"))
        verb = {"write": f"write -P {rng.randint(1, 255)}", "zeros": "write -z", "unmapped": "write -z -u", "discard": "discard"}
        commands += ["-c", f"{verb[kind]} {at} {length}"]
    if commands:
        qemu("qemu-io", *commands, graph([*below, layer]))


@pytest.mark.qemu
@pytest.mark.parametrize("seed", range(8))
def test_any_history_reads_as_before(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    chain = [tmp_path / "image.raw"]
    chain[0].write_bytes(rng.randbytes(DISK_BYTES // 2))
    for number in range(5):
        write_history(rng, list(chain), tmp_path / f"{number}.qcow2")
        chain.append(tmp_path / f"{number}.qcow2")
    before = content_of(chain, tmp_path)
    frozen = [path.read_bytes() for path in chain]
    start = rng.randint(1, 4)
    stop = rng.randint(start + 2, 6)
    target = tmp_path / "merged.qcow2"
    written = merged(chain[start:stop], target)
    assert content_of([*chain[:start], target, *chain[stop:]], tmp_path) == before
    assert "No errors" in qemu("qemu-img", "check", "-f", "qcow2", target)
    assert (written.size, written.checksum) == (target.stat().st_size, xxhash.xxh3_128_hexdigest(target.read_bytes()))
    assert inspect(target).is_plain
    assert [path.read_bytes() for path in chain] == frozen, "nobody writes into a frozen layer"
    again = tmp_path / "again.qcow2"
    merged([target, *chain[stop:]], again)
    assert content_of([*chain[:start], again], tmp_path) == before, "what was merged is merged again"


@pytest.mark.qemu
def test_a_zero_over_data_below_stays_zero_and_what_nobody_wrote_stays_open(tmp_path: Path) -> None:
    image, low, high = tmp_path / "image.raw", tmp_path / "low.qcow2", tmp_path / "high.qcow2"
    image.write_bytes(b"\7" * DISK_BYTES)
    create_layer(low, DISK_BYTES)
    create_layer(high, DISK_BYTES)
    qemu("qemu-io", "-c", "write -P 5 0 64k", "-c", "write -P 6 1M 64k", graph([image, low]))
    qemu("qemu-io", "-c", "write -z -u 0 32k", "-c", "discard 1M 32k", "-c", "write -z 4M 32k", graph([image, low, high]))
    target = tmp_path / "merged.qcow2"
    merged([low, high], target)
    content = content_of([image, target], tmp_path)
    k = 1024
    assert content[: 64 * k] == bytes(32 * k) + b"\5" * 32 * k
    assert content[k * k : k * k + 64 * k] == bytes(32 * k) + b"\6" * 32 * k
    assert content[4 * k * k : 4 * k * k + 64 * k] == bytes(32 * k) + b"\7" * 32 * k
    alone = content_of([image, target], tmp_path)
    image.write_bytes(b"\x08" * DISK_BYTES)
    changed = content_of([image, target], tmp_path)
    differing = {at // 4096 for at in range(0, DISK_BYTES, 4096) if alone[at : at + 4096] != changed[at : at + 4096]}
    assert differing == {at // 4096 for at in range(0, DISK_BYTES, 4096)} - {
        *range(16), *range(256, 272), *range(1024, 1032)
    }  # fmt: skip


@pytest.mark.qemu
def test_an_empty_layer_and_one_with_many_reference_counts(tmp_path: Path) -> None:
    """More clusters than one refcount block counts, and a layer of which nothing is left to say."""
    low, high, target = tmp_path / "low.qcow2", tmp_path / "high.qcow2", tmp_path / "merged.qcow2"
    size = 64 << 20
    create_layer(low, size)
    create_layer(high, size)
    merged([low, high], target)
    assert not inspect(target).has_data
    assert "No errors" in qemu("qemu-img", "check", "-f", "qcow2", target)
    qemu("qemu-io", "-f", "qcow2", "-c", "write -P 5 0 20M", low)
    target.unlink()
    merged([low, high], target)
    assert "No errors" in qemu("qemu-img", "check", "-f", "qcow2", target)
    qemu("qemu-io", "-f", "qcow2", "-c", "read -P 5 0 20M", "-c", "read -P 0 20M 1M", target)


@pytest.mark.parametrize("behind", [0, 1, 2040, 2044, 2045, 2046, 2047, 4092, 512 * 2048 - 600, 512 * 2048, 3 * 512 * 2048])
@pytest.mark.parametrize("virtual", [512, 1 << 30, 2 << 40])
def test_a_layout_counts_itself(behind: int, virtual: int) -> None:
    layout = Layout.of(virtual, behind)
    assert layout.end // CLUSTER + behind == layout.clusters
    assert layout.clusters <= layout.blocks * 2048 < layout.clusters + 2 * 2048
    assert layout.blocks <= layout.tables * 512 < layout.blocks + 2 * 512
    if behind < 5000:
        length = sum(part.length if hasattr(part, "length") else len(part) for part in layout.head())
        assert length == layout.end


# -------------------------------------------------------------------------------------------------------- what stops it


def layer_of(path: Path, *, clusters_of: dict[int, bytes], size: int = DISK_BYTES) -> Path:
    create_layer(path, size)
    for number, data in clusters_of.items():
        write_cluster(path, number, data)
    return path


def test_enough_at_any_table_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {0: b"a", 512: b"b", 1024: b"c"}
    paths = [layer_of(tmp_path / name, clusters_of=numbers) for name in ("a", "b")]
    looked, left, enough = Union._table, [0], threading.Event()

    def table(self: Union, number: int, **named: bool) -> object:
        left[0] -= 1
        if left[0] == 0:
            enough.set()
        return looked(self, number, **named)

    monkeypatch.setattr(Union, "_table", table)
    for last in range(1, 7):
        enough.clear()
        left[0] = last
        with pytest.raises(Abandoned):
            merged(paths, tmp_path / f"merged{last}", enough)
        assert left == [0], "it went on after that"
    enough.clear()
    left[0] = 7
    merged(paths, tmp_path / "merged", enough)


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    disk = RecordingDisk(tmp_path)
    paths = [layer_of(tmp_path / name, clusters_of={0: b"a", 513: b"b"}) for name in ("a", "b")]
    for room in (0, 3000, 4 * CLUSTER):
        disk.room = room
        with Union(paths, NEVER) as union, pytest.raises(NoSpace, match="room left"):
            union.write(tmp_path / f"merged{room}", disk)


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    small, large = layer_of(tmp_path / "a", clusters_of={}), layer_of(tmp_path / "b", clusters_of={}, size=2 * DISK_BYTES)
    with pytest.raises(InvalidRequest, match="of one size"):
        Union([small, large], NEVER)
    with pytest.raises(CorruptSnapshot, match="missing"):
        Union([small, tmp_path / "none"], NEVER)


@pytest.mark.qemu
def test_a_layer_of_earlier_releases_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.qcow2"
    qemu("qemu-img", "create", "-q", "-f", "qcow2", "-o", "extended_l2=on,cluster_size=64k", path, str(DISK_BYTES))
    assert not inspect(path).is_plain
    with pytest.raises(InvalidRequest, match="cannot be merged"):
        Union([path, path], NEVER)


def _at(path: Path, offset: int) -> int:
    return int(struct.unpack(">Q", path.read_bytes()[offset : offset + 8])[0])


def _put(path: Path, offset: int, *values: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(struct.pack(f">{len(values)}Q", *values))


def compressed(path: Path) -> None:
    _put(path, _l2(path), 1 << 62 | 0x5000)


def crooked_data(path: Path) -> None:
    _put(path, _l2(path), 1 << 63 | 0x5200)


def crooked_table(path: Path) -> None:
    _put(path, Layout.of(DISK_BYTES).l1_at, 1 << 63 | 0x200)


def many_for_one(path: Path) -> None:
    """A small file that claims to be a large disk: every entry names the same cluster."""
    _put(path, _l2(path), *[_at(path, _l2(path))] * 512)


def tables_for_one(path: Path) -> None:
    _put(path, Layout.of(64 << 20).l1_at, *[_at(path, Layout.of(64 << 20).l1_at)] * 32)


def short_l1(path: Path) -> None:
    _put(path, 36, (1 << 32) | (Layout.of(DISK_BYTES).l1_at >> 32))  # one entry, and the offset's upper half


def _l2(path: Path) -> int:
    return _at(path, _at(path, 40)) & ~(1 << 63)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (compressed, "compressed"),
        (crooked_data, "where none can be"),
        (crooked_table, "where none can be"),
        (many_for_one, "more than it has"),
        (short_l1, "too short"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_layer_that_lies_is_named(tmp_path: Path, damage: Callable[[Path], None], why: str, place: int) -> None:
    paths = [layer_of(tmp_path / name, clusters_of={0: b"x"}) for name in ("a.qcow2", "b.qcow2")]
    damage(paths[place])
    with pytest.raises(CorruptSnapshot, match=why) as caught:
        merged(paths, tmp_path / "merged")
    assert caught.value.file == f"{tmp_path.name}/{paths[place].name}"
    assert not (tmp_path / "merged").exists()


def test_a_small_file_does_not_become_a_large_one_by_its_tables(tmp_path: Path) -> None:
    path = layer_of(tmp_path / "a", clusters_of={0: b"x"}, size=64 << 20)
    tables_for_one(path)
    with pytest.raises(CorruptSnapshot, match="more than it has"):
        Union([path, layer_of(tmp_path / "b", clusters_of={}, size=64 << 20)], NEVER)


@pytest.mark.qemu
def test_behind_the_end_of_a_file_there_are_zeros_as_for_qemu(tmp_path: Path) -> None:
    image, low, high = tmp_path / "image.raw", tmp_path / "low", tmp_path / "high"
    image.write_bytes(b"\7" * DISK_BYTES)
    layer_of(low, clusters_of={1: b"a", 600: b"b", 601: b"c"})
    layer_of(high, clusters_of={0: b"d"})
    for cut in (CLUSTER + 100, CLUSTER, 2 * CLUSTER, 3 * CLUSTER):  # half a cluster, one, two, and their table
        os.truncate(low, low.stat().st_size - cut % (2 * CLUSTER) or CLUSTER)
        before = content_of([image, low, high], tmp_path)
        target = tmp_path / f"merged{cut}"
        merged([low, high], target)
        assert content_of([image, target], tmp_path) == before


def test_entries_behind_the_end_of_the_disk_are_nothing(tmp_path: Path) -> None:
    low, high = (layer_of(tmp_path / name, clusters_of={2047 + 256: b"x", 2047: b"y"}) for name in ("a", "b"))
    l1 = Layout.of(DISK_BYTES).l1_at
    last = _at(low, l1 + 8 * 4) & ~(1 << 63)
    _put(low, last + 8 * 300, _at(low, last + 8 * 255))
    with Union([low, high], NEVER) as union:
        assert union._counts == {3: 1, 4: 1}


def test_long_writes_are_synced_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "SYNC_BYTES", 4 * CLUSTER)
    disk = RecordingDisk(tmp_path)
    paths = [layer_of(tmp_path / name, clusters_of=dict.fromkeys(range(0, 40, 2), b"z")) for name in ("a", "b")]
    with Union(paths, NEVER) as union:
        union.write(tmp_path / "merged", disk)
    assert disk.operations.count("sync merged") >= 3
    assert disk.operations[-1] == "sync merged"
    assert read_cluster(tmp_path / "merged", 38).startswith(b"z")
