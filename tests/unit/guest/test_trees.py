"""Directories as tar streams, on the guest's side."""

from __future__ import annotations

import io
import os
import socket
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perdure.guest import trees
from perdure.guest.worker import Refusal
from perdure.wire.guest import tar
from perdure.wire.guest.ops import Code, Op
from perdure.wire.guest.tar import Entry, Kind
from tests.unit.guest.talking import do, sent

ODD = os.fsdecode(b"odd \xff\n'\"name")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    top = tmp_path / "source"
    (top / "sub/deep/empty").mkdir(parents=True)
    (top / "run.sh").write_bytes(b"#!/bin/sh\n")
    (top / "run.sh").chmod(0o755)
    (top / "sub/large").write_bytes(os.urandom(300_000))
    (top / "sub" / ODD).write_bytes(b"x")
    (top / ("long" * 40)).write_bytes(b"")
    (top / "link").symlink_to("sub/large")
    (top / "to-directory").symlink_to("sub")
    (top / "nowhere").symlink_to("none")
    (top / "sub").chmod(0o750)
    for path in (top / "run.sh", top / "sub/deep", top / "sub"):
        os.utime(path, ns=(0, 1_234_567_890_123_456_789))
    return top


def facts(top: Path) -> dict[str, tuple[object, ...]]:
    """What a tree is: names, kinds, modes, times, contents, targets."""
    found = {}
    for path in [top, *top.rglob("*")]:
        known = path.lstat()
        what = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        mode = None if path.is_symlink() else stat.S_IMODE(known.st_mode)
        found[str(path.relative_to(top))] = (stat.S_IFMT(known.st_mode), mode, known.st_mtime_ns, what)
    return found


def pieces(data: bytes, size: int = 50_000) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def unpack(path: Path, archive: bytes) -> dict[str, int]:
    answer: dict[str, int] = do(Op.UNPACK, sent(*pieces(archive)), path=str(path)).answer
    return answer


def test_a_tree_is_packed_and_unpacked_as_it_was(source: Path, tmp_path: Path) -> None:
    """Permissions, links, times, empty directories and odd names are kept."""
    archive = do(Op.PACK, path=str(source)).data
    answer = unpack(tmp_path / "new/copy", archive)
    assert (answer["files"], answer["directories"], answer["links"]) == (4, 3, 3)
    assert facts(tmp_path / "new/copy") == facts(source)


def test_others_read_what_is_packed(source: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(do(Op.PACK, path=str(source)).data)) as opened:
        assert {f"./{name}".rstrip("/") for name in map(str, facts(source)) if name != "."} == {
            f"./{name}" for name in opened.getnames() if name != "."
        }
        assert opened.getmember("run.sh").mode == 0o755


def test_unpacking_merges_and_replaces(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    (copy / "sub").mkdir(parents=True)
    (copy / "sub/kept").write_text("kept")
    (copy / "run.sh").write_text("old")
    (copy / "link").write_text("a file where a link shall be")
    unpack(copy, do(Op.PACK, path=str(source)).data)
    assert (copy / "sub/kept").read_text() == "kept"
    assert (copy / "run.sh").read_bytes() == b"#!/bin/sh\n"
    assert str((copy / "link").readlink()) == "sub/large"
    assert not [path for path in copy.rglob(".perdure-*")]


def test_special_files_are_left_out_and_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"x")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        archive = do(Op.PACK, path=str(tmp_path)).data
    reader = tar.Reader()
    names = [part.path for part in reader.feed(archive) if isinstance(part, Entry)]
    assert names == ["./", "file"]
    assert reader.comments == [f"skipped: it is a device, socket or pipe: {name}" for name in ("pipe", "socket")]


@pytest.mark.parametrize(("root", "wanted"), [("/proc/self/net", "dev"), ("/sys/kernel/mm/transparent_hugepage", "enabled")])
def test_files_whose_size_lies_are_packed_whole(root: str, wanted: str) -> None:
    """Those of /proc say 0 and those of /sys 4096."""
    if not Path(root, wanted).exists():
        pytest.skip(f"this host has no {root}/{wanted}")
    archive = do(Op.PACK, path=root).data
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        content = opened.extractfile(wanted)
        assert content is not None
        assert content.read().split()[:2] == Path(root, wanted).read_bytes().split()[:2]


def test_a_file_that_becomes_shorter_ends_the_stream(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.read
    cut = source / "sub/large"

    def shrinking(fd: int, size: int) -> bytes:
        if os.path.samestat(os.fstat(fd), cut.stat()):
            os.truncate(cut, 100_000)
        return real(fd, size)

    monkeypatch.setattr(trees.os, "read", shrinking)
    with pytest.raises(Refusal, match="became shorter"):
        do(Op.PACK, path=str(source))


def hostile(*entries: Entry) -> bytes:
    return b"".join(tar.header(entry) for entry in entries) + tar.END


GOOD = Entry("good", Kind.FILE)


@pytest.mark.parametrize(
    ("entries", "code"),
    [
        ([Entry("/absolute", Kind.FILE)], Code.INVALID),
        ([Entry("../beside", Kind.FILE)], Code.INVALID),
        ([Entry("a/../../beside", Kind.FILE)], Code.INVALID),
        ([Entry("a/..", Kind.DIRECTORY)], Code.INVALID),
        ([Entry("link", Kind.SYMLINK, target="/etc/passwd")], Code.ESCAPE),
        ([Entry("link", Kind.SYMLINK, target="../beside")], Code.ESCAPE),
        ([Entry("a/link", Kind.SYMLINK, target="b/../../../x")], Code.ESCAPE),
        ([Entry("link", Kind.SYMLINK, target="good"), Entry("link/x", Kind.FILE)], Code.CONFLICT),
        ([Entry("hard", Kind.HARD_LINK, target="/etc/passwd")], Code.INVALID),
        ([Entry("hard", Kind.HARD_LINK, target="../beside")], Code.INVALID),
        ([Entry("null", Kind.CHARACTER_DEVICE)], Code.INVALID),
        ([Entry("disk", Kind.BLOCK_DEVICE)], Code.INVALID),
        ([Entry("pipe", Kind.PIPE)], Code.INVALID),
        ([Entry("", Kind.FILE)], Code.INVALID),
        ([Entry("d", Kind.DIRECTORY), Entry("d", Kind.FILE)], Code.CONFLICT),
    ],
)
def test_hostile_archives_are_refused(tmp_path: Path, entries: list[Entry], code: str) -> None:
    cage = tmp_path / "cage"
    with pytest.raises(Refusal) as refused:
        unpack(cage, hostile(GOOD, *entries))
    assert refused.value.code == code
    assert [path.name for path in tmp_path.iterdir()] == ["cage"]
    assert (cage / "good").is_file(), "what came before it stays"
    assert not list(cage.rglob(".perdure-*"))


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("untouched")
    cage = tmp_path / "cage"
    cage.mkdir()
    (cage / "d").symlink_to("../outside")
    (cage / "f").symlink_to("../outside/secret")
    unpack(cage, hostile(Entry("f", Kind.FILE)))
    assert not (cage / "f").is_symlink()
    with pytest.raises(Refusal, match="no directory"):
        unpack(cage, hostile(Entry("d/x", Kind.FILE)))
    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("secret", "untouched")]


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o1777])
def test_no_archive_gives_special_bits(tmp_path: Path, mode: int) -> None:
    unpack(tmp_path / "c", hostile(Entry("f", Kind.FILE, mode=mode)))
    assert stat.S_IMODE((tmp_path / "c/f").stat().st_mode) == mode & 0o777


def test_hard_links_of_others_are_made(tmp_path: Path) -> None:
    unpack(tmp_path / "c", hostile(Entry("a/f", Kind.FILE), Entry("g", Kind.HARD_LINK, target="a/f")))
    assert (tmp_path / "c/g").samefile(tmp_path / "c/a/f")
    unpack(tmp_path / "c", hostile(Entry("a/f", Kind.FILE), Entry("g", Kind.HARD_LINK, target="a/f")))
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["a", "g"]


DAMAGE: list[Callable[[bytes], bytes]] = [
    lambda data: data[:-600],
    lambda data: b"PK\3\4" + data,
    lambda _: b"",
    lambda _: b"\x1f\x8b" * 900,
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_no_whole_archive_is_told(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(Refusal) as refused:
        unpack(tmp_path / "c", damage(hostile(GOOD)))
    assert refused.value.code == Code.INVALID


def test_a_transfer_that_breaks_off_leaves_no_half_file(tmp_path: Path) -> None:
    archive = tar.header(Entry("f", Kind.FILE, size=100_000)) + b"x" * 50_000
    (tmp_path / "f").write_text("old")
    with pytest.raises(IndexError):  # nothing more comes
        do(Op.UNPACK, [archive], path=str(tmp_path))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("f", "old")]
