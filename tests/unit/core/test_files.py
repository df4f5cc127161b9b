"""Durable writes: for every crash point, the complete old or the complete new thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perdure.core import files
from perdure.core.errors import AlreadyExists, NoSpace
from tests.fakes.disk import Crash, RecordingDisk

OLD = b"old " * 5000
NEW = b"new " * 7000


@pytest.fixture
def disk(tmp_path: Path) -> RecordingDisk:
    root = tmp_path / "disk"
    root.mkdir()
    return RecordingDisk(root)


def crashes(disk: RecordingDisk, tmp_path: Path, since: int = 0) -> Iterator[tuple[str, Path]]:
    """Every state that a crash after any operation from ``since`` on may leave, with a name for messages."""
    for after in range(since, len(disk.states)):
        for crash in Crash:
            for seed in range(4 if crash is Crash.MIXED else 1):
                target = tmp_path / f"crash-{after}-{crash}-{seed}"
                target.mkdir()
                disk.materialise(after, crash, target, seed=seed)
                yield f"after {disk.operations[:after]}, {crash} {seed}", target


def test_a_replaced_file_is_old_or_new_at_every_crash(disk: RecordingDisk, tmp_path: Path) -> None:
    files.write_file(disk.root / "a", OLD, disk=disk)
    done = len(disk.operations)
    files.write_file(disk.root / "a", [NEW[:9000], memoryview(NEW)[9000:]], disk=disk)
    seen = set()
    for name, state in crashes(disk, tmp_path, since=done):
        content = (state / "a").read_bytes()
        assert content in (OLD, NEW), name
        seen.add(content)
        assert all(files.is_temporary(path) for path in state.iterdir() if path.name != "a"), name
    assert seen == {OLD, NEW}
    end = tmp_path / "end"
    end.mkdir()
    disk.materialise(len(disk.operations), Crash.DROPPED, end)
    assert (end / "a").read_bytes() == NEW


def test_a_published_directory_is_absent_or_complete_at_every_crash(disk: RecordingDisk, tmp_path: Path) -> None:
    building = disk.root / ".tmp-image"
    files.make_dir(building / "sub", disk=disk)
    files.create_file(building / "one", OLD, disk=disk)
    files.create_file(building / "sub" / "two", NEW, disk=disk)
    (building / "external").write_bytes(b"by another process")
    files.publish_dir(building, disk.root / "image", disk=disk)
    complete = 0
    for name, state in crashes(disk, tmp_path):
        if (state / "image").exists():
            complete += 1
            assert (state / "image/one").read_bytes() == OLD, name
            assert (state / "image/sub/two").read_bytes() == NEW, name
            assert (state / "image/external").read_bytes() == b"by another process", name
    assert complete


def test_what_returned_is_durable(disk: RecordingDisk, tmp_path: Path) -> None:
    """After each call returns, the worst crash keeps its result."""

    def dropped(name: str) -> Path:
        target = tmp_path / name
        target.mkdir()
        disk.materialise(len(disk.operations), Crash.DROPPED, target)
        return target

    files.make_dir(disk.root / "x/y", disk=disk)
    assert (dropped("1") / "x/y").is_dir()
    files.write_file(disk.root / "x/y/file", NEW, disk=disk)
    assert (dropped("2") / "x/y/file").read_bytes() == NEW
    files.link(disk.root / "x/y/file", disk.root / "x/linked", disk=disk)
    assert (dropped("3") / "x/linked").read_bytes() == NEW
    files.rename(disk.root / "x/linked", disk.root / "moved", disk=disk)
    assert not (dropped("4") / "x/linked").exists()
    assert (tmp_path / "4/moved").read_bytes() == NEW
    assert files.remove(disk.root / "moved", disk=disk)
    assert not (dropped("5") / "moved").exists()
    assert files.remove_tree(disk.root / "x", disk=disk)
    assert not (dropped("6") / "x").exists()
    assert not files.remove(disk.root / "moved", disk=disk)
    assert not files.remove_tree(disk.root / "x", disk=disk)


@pytest.mark.parametrize("write", [files.write_file, files.create_file])
def test_a_full_disk_is_named_and_loses_nothing(disk: RecordingDisk, write: Callable[..., int]) -> None:
    files.write_file(disk.root / "a", OLD, disk=disk)
    disk.room = 100
    target = disk.root / ("a" if write is files.write_file else "b")
    with pytest.raises(NoSpace, match=r"no room left on the disk to write \S+") as caught:
        write(target, NEW, disk=disk)
    assert "nothing was lost" in caught.value.hint
    assert {path.name for path in disk.root.iterdir()} == {"a"}
    assert (disk.root / "a").read_bytes() == OLD


def test_a_failing_source_of_content_leaves_the_old_file(tmp_path: Path) -> None:
    files.write_file(tmp_path / "a", OLD)

    def chunks() -> Iterator[bytes]:
        yield NEW
        raise ValueError("the source broke")

    with pytest.raises(ValueError, match="the source broke"):
        files.write_file(tmp_path / "a", chunks())
    assert (tmp_path / "a").read_bytes() == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_names_that_are_taken_are_refused(tmp_path: Path) -> None:
    files.create_file(tmp_path / "a", OLD)
    with pytest.raises(AlreadyExists, match="a exists already"):
        files.create_file(tmp_path / "a", NEW)
    with pytest.raises(AlreadyExists, match="a exists already"):
        files.link(tmp_path / "a", tmp_path / "a")
    for name in ("old", ".tmp-new"):
        files.make_dir(tmp_path / name)
        files.create_file(tmp_path / name / "file", name.encode())
    with pytest.raises(AlreadyExists, match="old exists already"):
        files.publish_dir(tmp_path / ".tmp-new", tmp_path / "old")
    assert (tmp_path / "old/file").read_bytes() == b"old"
    assert (tmp_path / "a").read_bytes() == OLD


def test_a_tree_is_removed_without_following_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    files.make_dir(outside)
    files.create_file(outside / "keep", OLD)
    tree = tmp_path / "tree"
    files.make_dir(tree / "deep")
    (tree / "deep/link").symlink_to(outside)
    (tree / "file-link").symlink_to(outside / "keep")
    assert files.remove_tree(tree)
    assert not tree.exists()
    assert (outside / "keep").read_bytes() == OLD


def test_an_append_handle_continues_and_cuts(disk: RecordingDisk, tmp_path: Path) -> None:
    handle = disk.create(disk.root / "log", 0o644)
    handle.write(b"one", b"", memoryview(b"two"))
    handle.sync()
    handle.close()
    handle = disk.append(disk.root / "log")
    assert handle.size == 6
    handle.write(b"torn")
    handle.cut(6)
    handle.write(b"three")
    assert handle.size == 11
    handle.sync()
    handle.close()
    assert (disk.root / "log").read_bytes() == b"onetwothree"


def test_many_small_parts_are_written_in_order(tmp_path: Path) -> None:
    parts = [bytes([n % 256]) * (n % 7) for n in range(3000)]
    handle = files.DISK.create(tmp_path / "parts", 0o644)
    assert handle.write(*parts) == sum(map(len, parts))
    handle.close()
    assert (tmp_path / "parts").read_bytes() == b"".join(parts)


def test_holes_read_as_zeros_and_take_no_room(tmp_path: Path) -> None:
    assert files.write_file(tmp_path / "a", [b"head", files.Hole((1 << 20) - 4), b"tail", files.Hole(4096)]) == (1 << 20) + 4100
    assert (tmp_path / "a").read_bytes() == b"head".ljust(1 << 20, b"\0") + b"tail" + bytes(4096)
    assert files.stored_bytes(tmp_path / "a") < 1 << 17
