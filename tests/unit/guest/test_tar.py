"""tar, read and written, against Python's own."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.wire.guest import tar
from perdure.wire.guest.tar import BadArchive, Entry, Kind, Reader

NAMES = st.binary(min_size=1, max_size=140).map(lambda raw: os.fsdecode(raw.replace(b"/", b"_").replace(b"\0", b"_")))
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
TIMES = st.integers(-(10**18), 5 * 10**18)


def archive(members: list[tuple[Entry, bytes]]) -> bytes:
    parts = [tar.header(entry) + data + tar.padding(len(data)) for entry, data in members]
    return b"".join(parts) + tar.END


def read(data: bytes, cut: int = 65536) -> list[tuple[Entry, bytes]]:
    reader, found = Reader(), list[tuple[Entry, bytes]]()
    for start in range(0, len(data), cut):
        for part in reader.feed(data[start : start + cut]):
            if isinstance(part, Entry):
                found.append((part, b""))
            elif part is not None:
                found[-1] = (found[-1][0], found[-1][1] + part)
    reader.finish()
    return found


def facts(entry: Entry) -> tuple[Any, ...]:
    return entry.path, entry.kind, entry.size, entry.mode, entry.mtime_ns, entry.target


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(PATHS, st.binary(max_size=1500), st.integers(0, 0o7777), TIMES), max_size=4), st.integers(1, 700))
def test_what_is_written_is_read_whatever_the_cuts(files: list[tuple[str, bytes, int, int]], cut: int) -> None:
    members = [(Entry(path, Kind.FILE, size=len(data), mode=mode, mtime_ns=at), data) for path, data, mode, at in files]
    back = read(archive(members), cut)
    assert [(facts(entry), data) for entry, data in back] == [(facts(entry), data) for entry, data in members]


@settings(deadline=None, max_examples=60)
@given(PATHS, PATHS, TIMES)
def test_pythons_tarfile_reads_what_is_written(path: str, target: str, moment: int) -> None:
    members = [
        (Entry(path, Kind.FILE, size=5, mode=0o640, mtime_ns=moment), b"hello"),
        (Entry(path + "-l", Kind.SYMLINK, target=target), b""),
        (Entry("d/", Kind.DIRECTORY, mode=0o755), b""),
    ]
    with tarfile.open(fileobj=io.BytesIO(archive(members))) as opened:
        file, link, directory = opened.getmembers()
        assert (file.name, file.mode) == (path.rstrip("/"), 0o640)
        assert abs(file.mtime - moment / 1e9) < 1e-3 * max(1.0, abs(moment / 1e18))
        content = opened.extractfile(file)
        assert content is not None and content.read() == b"hello"
        assert (link.issym(), link.linkname, directory.isdir()) == (True, target, True)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_what_pythons_tarfile_writes_is_read(form: int) -> None:
    buffer = io.BytesIO()
    name = "a" * 90 + "/" + "b" * 60
    with tarfile.open(fileobj=buffer, mode="w", format=form) as opened:
        for member, data in ((tarfile.TarInfo("x"), b"1" * 700), (tarfile.TarInfo(name), b""), (tarfile.TarInfo("y"), b"2")):
            member.size, member.mtime = len(data), 1_700_000_000
            opened.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("l")
        link.type, link.linkname = tarfile.SYMTYPE, "x"
        opened.addfile(link)
    found = read(buffer.getvalue(), 100)
    assert [(entry.path, data) for entry, data in found] == [("x", b"1" * 700), (name, b""), ("y", b"2"), ("l", b"")]
    assert (found[3][0].target, found[0][0].mtime_ns) == ("x", 1_700_000_000 * 10**9)


def test_sizes_beyond_eight_gigabytes_are_told() -> None:
    huge = Entry("huge", Kind.FILE, size=9 << 30)
    found = [part for part in Reader().feed(tar.header(huge)) if isinstance(part, Entry)]
    assert found[0].size == 9 << 30
    info = tarfile.TarInfo("huge")
    info.size = 9 << 30
    found = [part for part in Reader().feed(info.tobuf(tarfile.GNU_FORMAT)) if isinstance(part, Entry)]
    assert found[0].size == 9 << 30, "GNU writes such a number in base 256"


def test_remarks_are_read_and_ignored_by_others() -> None:
    data = tar.comment("perdure: skipped") + archive([(Entry("a", Kind.FILE), b"")])
    reader = Reader()
    assert [part.path for part in reader.feed(data) if isinstance(part, Entry)] == ["a"]
    assert reader.comments == ["perdure: skipped"]
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        assert opened.getnames() == ["a"]


GOOD = archive([(Entry("a", Kind.FILE, size=600), b"x" * 600), (Entry("b" * 200, Kind.FILE), b"")])


@pytest.mark.parametrize("cut", [0, 1, 511, 512, 1000, len(GOOD) - 1024, len(GOOD) - 513])
def test_a_cut_archive_is_told(cut: int) -> None:
    with pytest.raises(BadArchive, match="ends in the middle"):
        read(GOOD[:cut])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: b"\1" + data[1:], "checksum"),
        (lambda data: b"PK\3\4" * 300, "number|checksum"),
        (lambda data: tar._block(b"x", "S", 0) + data, "sparse"),
        (lambda data: tar._block(b"x", "x", 2 << 20) + data, "longer than 1 MiB"),
        (lambda data: tar._block(b"x", "x", 5) + b"5 a=b" + bytes(507) + data, "extended header"),
        (lambda data: tar._block(b"x", "x", 5) + b"9 a=b" + bytes(507) + data, "extended header"),
        (lambda data: tar._extended("x", [(b"mtime", b"soon")]) + data, "time"),
    ],
)
def test_damage_is_told(damage: Callable[[bytes], bytes], says: str) -> None:
    with pytest.raises(BadArchive, match=says):
        read(damage(GOOD))


@settings(deadline=None)
@given(st.binary(max_size=3000), st.integers(0, len(GOOD)), st.binary(max_size=64))
def test_nothing_but_bad_archive_is_raised_for_any_bytes(noise: bytes, at: int, splice: bytes) -> None:
    for data in (noise, GOOD[:at] + splice + GOOD[at:]):
        try:
            read(data, 333)
        except BadArchive:
            continue


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a/..", "a\0b", "x" * 256, "//x"])
def test_paths_that_could_lead_out_are_refused(path: str) -> None:
    with pytest.raises(BadArchive):
        tar.parts_of(path)


def test_plain_paths_are_taken_apart() -> None:
    assert tar.parts_of("./a//b/./c/") == ["a", "b", "c"]
    assert tar.parts_of("./") == []


@pytest.mark.parametrize(
    ("target", "depth", "out"),
    [("x", 0, False), ("../x", 1, False), ("../x", 0, True), ("/x", 5, True), ("a/../b", 3, True), ("../../a/b", 2, False)],
)
def test_links_that_could_lead_out_are_known(target: str, depth: int, out: bool) -> None:
    assert tar.leads_out(target, depth) is out
