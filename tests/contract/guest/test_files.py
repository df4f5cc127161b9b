"""What every guest does with files beyond reading and writing them: revisions, roots, uploads in pieces, trees, watches."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from perdure.core.errors import AlreadyExists, Conflict, InvalidRequest, NotFound, PathEscape
from perdure.wire.guest import tar
from perdure.wire.guest.tar import Entry, Kind
from perdure.wire.node import Attributes, Beneath, FileKind, FinishUpload, WatchEvent, WatchHandle, WatchKind
from tests.contract.guest.places import DEADLINE_S, Place

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def content(place: Place, path: str | Beneath, offset: int = 0, length: int | None = None) -> bytes:
    return b"".join([part async for part in place.guest.read_file(path, offset, length)])


@pytest_asyncio.fixture(loop_scope="session")
async def directory(place: Place) -> AsyncIterator[str]:
    path = f"/tmp/files-{os.urandom(4).hex()}"
    await place.guest.make_dir(path)
    yield path
    await place.guest.remove(path, recursive=True)


# ------------------------------------------------------------------------------------------------------------ revisions


async def test_an_open_file_tells_what_it_is(place: Place, directory: str) -> None:
    await place.guest.write_file(f"{directory}/f", chunks(b"0123456789"), mode=0o640)
    reading = await place.guest.open_file(f"{directory}/f", 4, 3)
    assert (reading.size, reading.offset, reading.info.mode, reading.info.kind) == (10, 4, 0o640, FileKind.FILE)
    assert reading.info.revision == (await place.guest.stat(f"{directory}/f")).revision
    assert b"".join([part async for part in reading.chunks()]) == b"456"
    await reading.close()
    await reading.close()


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 300_000])
async def test_sizes_are_exact(place: Place, directory: str, size: int) -> None:
    data = os.urandom(size)
    await place.guest.write_file(f"{directory}/f", chunks(data))
    reading = await place.guest.open_file(f"{directory}/f")
    assert reading.size == size
    assert b"".join([part async for part in reading.chunks()]) == data
    assert await content(place, f"{directory}/f", max(0, size - 1)) == data[max(0, size - 1) :]


async def test_a_changed_file_is_read_from_its_beginning(place: Place, directory: str) -> None:
    """(peers: row 27) What was read before of another content never becomes the beginning of this one."""
    path = f"{directory}/f"
    await place.guest.write_file(path, chunks(b"old content"))
    known = (await place.guest.stat(path)).revision
    same = await place.guest.open_file(path, 4, revision=known)
    assert (same.offset, b"".join([part async for part in same.chunks()])) == (4, b"content")
    await same.close()
    await place.guest.write_file(path, chunks(b"new content"))
    other = await place.guest.open_file(path, 4, revision=known)
    assert (other.offset, b"".join([part async for part in other.chunks()])) == (0, b"new content")
    assert other.info.revision != known
    await other.close()


async def test_a_hash_is_of_the_whole_file(place: Place, directory: str) -> None:
    data = os.urandom(700_000)
    await place.guest.write_file(f"{directory}/f", chunks(data))
    found = await place.guest.hash_file(f"{directory}/f")
    assert (found.size, found.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert found.revision == (await place.guest.stat(f"{directory}/f")).revision
    for wrong, error in ((directory, InvalidRequest), (f"{directory}/none", NotFound)):
        with pytest.raises(error):
            await place.guest.hash_file(wrong)


# ---------------------------------------------------------------------------------------------------------------- names


async def test_mode_and_owner_are_changed(place: Place, directory: str) -> None:
    await place.guest.write_file(f"{directory}/f", chunks(b"x"))
    await place.guest.make_link(f"{directory}/l", "f")
    changed = await place.guest.set_attributes(f"{directory}/l", Attributes(0o600, "nobody:65534"))
    assert changed.mode == 0o600 and changed.uid == 65534
    info = await place.guest.stat(f"{directory}/f")
    assert (info.mode, info.uid, info.gid) == (0o600, 65534, 65534)
    await place.guest.set_attributes(f"{directory}/f", Attributes(owner="0:0"))
    info = await place.guest.stat(f"{directory}/f")
    assert (info.mode, info.uid, info.gid) == (0o600, 0, 0)
    with pytest.raises(InvalidRequest, match="no user"):
        await place.guest.set_attributes(f"{directory}/f", Attributes(owner="no-such-user"))
    with pytest.raises(NotFound):
        await place.guest.set_attributes(f"{directory}/none", Attributes(0o600))


async def test_links_are_made_and_never_over_something(place: Place, directory: str) -> None:
    await place.guest.make_link(f"{directory}/l", "nowhere/at all")
    info = await place.guest.stat(f"{directory}/l")
    assert (info.kind, info.target, info.revision) == (FileKind.SYMLINK, "nowhere/at all", None)
    with pytest.raises(AlreadyExists):
        await place.guest.make_link(f"{directory}/l", "x")


# ----------------------------------------------------------------------------------------------------------- below a root


@pytest_asyncio.fixture(loop_scope="session")
async def caged(place: Place, directory: str) -> str:
    """A directory whose links lead in and out of it; beside it is a secret."""
    guest = place.guest
    await guest.write_file(f"{directory}/secret", chunks(b"secret"))
    await guest.make_dir(f"{directory}/cage/sub")
    await guest.write_file(f"{directory}/cage/sub/f", chunks(b"inside"))
    for name, target in (("in", "sub"), ("file", "sub/f"), ("out", "../secret"), ("up", ".."), ("etc", "/etc")):
        await guest.make_link(f"{directory}/cage/{name}", target)
    return f"{directory}/cage"


async def test_paths_below_a_root_are_resolved_inside(place: Place, caged: str) -> None:
    guest = place.guest
    for path in ("sub/f", "/sub/f", "in/f", "file", "in/../sub/f"):
        assert await content(place, Beneath(caged, path)) == b"inside"
    assert (await guest.stat(Beneath(caged, "file"))).kind is FileKind.SYMLINK
    assert [info.path for info in await guest.list_dir(Beneath(caged, "in"))] == ["in/f"]
    await guest.write_file(Beneath(caged, "file"), chunks(b"new"))
    assert await content(place, f"{caged}/sub/f") == b"new"
    await guest.make_dir(Beneath(caged, "x/y"))
    await guest.rename(Beneath(caged, "in/f"), Beneath(caged, "x/y/g"))
    assert await content(place, f"{caged}/x/y/g") == b"new"
    await guest.set_attributes(Beneath(caged, "x/y/g"), Attributes(0o600))
    await guest.make_link(Beneath(caged, "x/l"), "y/g")
    assert (await guest.hash_file(Beneath(caged, "x/l"))).size == 3
    await guest.remove(Beneath(caged, "x"), recursive=True)
    await guest.remove(Beneath(caged, "out"))
    assert await content(place, f"{caged}/../secret") == b"secret", "the link went, not what it led to"


@pytest.mark.parametrize("path", ["out", "up/secret", "etc/hostname", "in/../../secret", "up/cage/sub/f"])
async def test_nothing_below_a_root_leads_out_of_it(place: Place, caged: str, path: str) -> None:
    where, guest = Beneath(caged, path), place.guest
    for work in (
        lambda: content(place, where),
        lambda: guest.write_file(where, chunks(b"x")),
        lambda: guest.hash_file(where),
        lambda: guest.set_attributes(where, Attributes(0o777)),
        lambda: guest.finish_upload(FinishUpload("upl_0000000000", where, 0)),
    ):
        with pytest.raises(PathEscape):
            await work()
    assert await content(place, f"{caged}/../secret") == b"secret"


@pytest.mark.parametrize("path", ["up", "up/cage", "etc"])
async def test_no_directory_below_a_root_is_outside(place: Place, caged: str, path: str) -> None:
    where, guest = Beneath(caged, path), place.guest
    for work in (
        lambda: guest.list_dir(where),
        lambda: guest.pack(where),
        lambda: guest.watch(where),
        lambda: guest.unpack(where, chunks(tar.END)),
        lambda: guest.make_dir(Beneath(caged, f"{path}/new")),
        lambda: guest.make_link(Beneath(caged, f"{path}/new"), "x"),
        lambda: guest.remove(Beneath(caged, f"{path}/secret"), recursive=True),
        lambda: guest.rename(Beneath(caged, "sub"), Beneath(caged, f"{path}/moved")),
        lambda: guest.rename(Beneath(caged, f"{path}/cage"), Beneath(caged, "moved")),
    ):
        with pytest.raises(PathEscape):
            await work()


async def test_a_root_itself_is_not_removed_or_missing(place: Place, caged: str) -> None:
    for path in ("", "/", ".", "sub/.."):
        with pytest.raises(InvalidRequest, match="root"):
            await place.guest.remove(Beneath(caged, path), recursive=True)
    with pytest.raises(NotFound):
        await place.guest.stat(Beneath(f"{caged}/none", "f"))
    with pytest.raises(PathEscape):
        await place.guest.stat(Beneath(caged, "../x"))
    with pytest.raises(InvalidRequest):
        await place.guest.rename(Beneath(caged, "sub"), f"{caged}/moved")


# -------------------------------------------------------------------------------------------------------------- uploads


async def test_an_upload_in_pieces_goes_on_where_it_broke(place: Place, directory: str) -> None:
    """(peers: row 27) What was acknowledged is there, and the file is whole or not there at all."""
    guest, upload, data = place.guest, f"upl_{os.urandom(8).hex()}", os.urandom(500_000)
    target = f"{directory}/sub/target"
    assert await guest.begin_upload(upload, target) == 0

    async def broken() -> AsyncIterator[bytes]:
        yield data[:200_000]
        raise RuntimeError("the client went away")

    with pytest.raises(RuntimeError):
        await guest.append_upload(upload, 0, broken())
    async with asyncio.timeout(DEADLINE_S):
        reached = await guest.upload_offset(upload)
        while True:
            try:
                reached = await guest.append_upload(upload, await guest.upload_offset(upload), chunks(data[reached:]))
                break
            except Conflict:
                reached = await guest.upload_offset(upload)
    assert reached == len(data)
    with pytest.raises(Conflict):
        await guest.append_upload(upload, 17, chunks(b"x"))
    whole = FinishUpload(upload, target, len(data), hashlib.sha256(data).hexdigest(), 0o600)
    with pytest.raises(NotFound):
        await guest.finish_upload(whole)
    await guest.make_dir(f"{directory}/sub")
    await guest.finish_upload(whole)
    await guest.finish_upload(whole)  # an answer that was lost
    assert await content(place, target) == data
    assert (await guest.stat(target)).mode == 0o600
    assert [info.name for info in await guest.list_dir(f"{directory}/sub")] == ["target"]
    with pytest.raises(NotFound):
        await guest.upload_offset(upload)


async def test_an_upload_that_is_not_what_was_told_gets_no_name(place: Place, directory: str) -> None:
    guest, upload = place.guest, f"upl_{os.urandom(8).hex()}"
    await guest.begin_upload(upload)
    assert await guest.append_upload(upload, 0, chunks(b"abc")) == 3
    with pytest.raises(Conflict, match="3 bytes"):
        await guest.finish_upload(FinishUpload(upload, f"{directory}/f", 4))
    with pytest.raises(Conflict, match="SHA-256"):
        await guest.finish_upload(FinishUpload(upload, f"{directory}/f", 3, "ab" * 32))
    with pytest.raises(NotFound):
        await guest.stat(f"{directory}/f")
    for wrong, error in (("upl_../../../etc/x", InvalidRequest), ("upl_aaaaaaaaaaaaaa", NotFound)):
        with pytest.raises(error):
            await guest.upload_offset(wrong)
    await guest.drop_upload(upload)
    await guest.drop_upload(upload)


# ----------------------------------------------------------------------------------------------------------------- trees


async def packed(place: Place, path: str | Beneath) -> bytes:
    reading = await place.guest.pack(path)
    data = b"".join([part async for part in reading.chunks()])
    await reading.close()
    return data


def members(archive: bytes) -> dict[str, tuple[str, int, int, bytes | str]]:
    reader, found, current = tar.Reader(), dict[str, tuple[str, int, int, bytes | str]](), b""
    last: Entry | None = None
    for part in reader.feed(archive):
        if isinstance(part, Entry):
            last, current = part, b""
            found[part.path] = (part.kind, part.mode, part.mtime_ns, part.target)
        elif part is None:
            assert last is not None
            found[last.path] = (last.kind, last.mode, last.mtime_ns, current)
        else:
            current += part
    reader.finish()
    return found


async def test_a_tree_goes_out_and_comes_back_as_it_was(place: Place, directory: str) -> None:
    at = 1_234_567_890_000_000_000
    odd = os.fsdecode(b"o\xffdd \n")
    entries = [
        Entry("./", Kind.DIRECTORY, mode=0o755, mtime_ns=at),
        Entry("run", Kind.FILE, size=200_000, mode=0o755, mtime_ns=at),
        Entry(odd, Kind.FILE, size=3, mode=0o600, mtime_ns=at),
        Entry("d/", Kind.DIRECTORY, mode=0o700, mtime_ns=at),
        Entry("d/link", Kind.SYMLINK, mode=0o777, mtime_ns=at, target="../run"),
        Entry("d/empty/", Kind.DIRECTORY, mode=0o750, mtime_ns=at),
    ]
    data = {"run": os.urandom(200_000), odd: b"odd"}
    parts = [tar.header(one) + data.get(one.path, b"") + tar.padding(one.size) for one in entries]
    archive = b"".join(parts) + tar.END
    pieces = [archive[start : start + 70_000] for start in range(0, len(archive), 70_000)]
    made = await place.guest.unpack(f"{directory}/t", chunks(*pieces))
    assert (made.length, made.files, made.links) == (len(archive), 2, 1)
    back = members(await packed(place, f"{directory}/t"))
    assert set(back) == {one.path for one in entries}
    for one in entries:
        if one.path != "./":
            assert back[one.path] == (one.kind, one.mode, at, data.get(one.path, one.target or "")), one.path
    again = await place.guest.unpack(f"{directory}/t", chunks(archive))
    assert again.files == 2
    assert members(await packed(place, Beneath(directory, "t"))).keys() == back.keys()


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        (Entry("/tmp/absolute", Kind.FILE), InvalidRequest),
        (Entry("../beside", Kind.FILE), InvalidRequest),
        (Entry("link", Kind.SYMLINK, target="/etc"), PathEscape),
        (Entry("link", Kind.SYMLINK, target="../../x"), PathEscape),
        (Entry("null", Kind.CHARACTER_DEVICE), InvalidRequest),
    ],
)
async def test_what_would_lead_out_is_not_unpacked(place: Place, directory: str, entry: Entry, error: type[Exception]) -> None:
    before = [info.name for info in await place.guest.list_dir("/tmp")]
    with pytest.raises(error):
        await place.guest.unpack(f"{directory}/t", chunks(tar.header(Entry("first", Kind.FILE)) + tar.header(entry) + tar.END))
    assert [info.name for info in await place.guest.list_dir(f"{directory}/t")] == ["first"]
    assert [info.name for info in await place.guest.list_dir("/tmp")] == before


async def test_what_is_no_archive_or_no_directory_is_told(place: Place, directory: str) -> None:
    await place.guest.write_file(f"{directory}/f", chunks(b"x"))
    for junk in (b"", b"junk" * 1000, tar.header(Entry("f", Kind.FILE, size=9))):
        with pytest.raises(InvalidRequest):
            await place.guest.unpack(f"{directory}/t", chunks(junk))
    with pytest.raises(InvalidRequest):
        await place.guest.pack(f"{directory}/f")
    with pytest.raises(NotFound):
        await place.guest.pack(f"{directory}/none")


# -------------------------------------------------------------------------------------------------------------- watching


async def until(handle: WatchHandle, kind: WatchKind, path: str) -> list[WatchEvent]:
    """Events up to that one."""
    seen = []
    async with asyncio.timeout(DEADLINE_S):
        async for event in handle.events():
            seen.append(event)
            if (event.kind, event.path) == (kind, path):
                return seen
    raise AssertionError(f"the watch ended before {kind} {path}: {seen}")


def told(events: list[WatchEvent]) -> list[tuple[str, str]]:
    return [(event.kind.value, event.path) for event in events if event.kind is not WatchKind.ATTRIBUTES]


async def test_a_watch_tells_what_happens(place: Place, directory: str) -> None:
    guest = place.guest
    await guest.make_dir(f"{directory}/sub")
    handle = await guest.watch(directory)
    await guest.make_dir(f"{directory}/d")
    await guest.make_link(f"{directory}/l", "x")
    await guest.rename(f"{directory}/l", f"{directory}/m")
    await guest.write_file(f"{directory}/sub/unseen", chunks(b"x"))
    await guest.remove(f"{directory}/m")
    events = await until(handle, WatchKind.REMOVED, f"{directory}/m")
    assert told(events) == [
        ("created", f"{directory}/d"),
        ("created", f"{directory}/l"),
        ("renamed", f"{directory}/m"),
        ("removed", f"{directory}/m"),
    ]
    assert [event.is_directory for event in events if event.kind is WatchKind.CREATED] == [True, False]
    assert [event.old_path for event in events if event.kind is WatchKind.RENAMED] == [f"{directory}/l"]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    await handle.close()


async def test_a_watch_follows_new_directories(place: Place, directory: str) -> None:
    guest = place.guest
    await guest.make_dir(f"{directory}/top/deep")
    handle = await guest.watch(f"{directory}/top", recursive=True)
    await guest.make_dir(f"{directory}/top/a/b/c")
    await guest.rename(f"{directory}/top/a", f"{directory}/top/deep/a")
    await until(handle, WatchKind.RENAMED, f"{directory}/top/deep/a")
    await guest.make_dir(f"{directory}/top/deep/a/b/new")
    await until(handle, WatchKind.CREATED, f"{directory}/top/deep/a/b/new")
    await handle.close()


async def test_a_watch_goes_on_without_a_reader(place: Place, directory: str) -> None:
    guest = place.guest
    handle = await guest.watch(Beneath(directory, "."))
    await guest.make_dir(f"{directory}/one")
    (first,) = await until(handle, WatchKind.CREATED, "./one")
    await handle.close()
    await guest.make_dir(f"{directory}/two")
    again = await guest.resume_watch(handle.watch_id, first.seq)
    assert told(await until(again, WatchKind.CREATED, "./two")) == [("created", "./two")]
    await again.close()
    whole = await guest.resume_watch(handle.watch_id, 0)
    assert told(await until(whole, WatchKind.CREATED, "./two")) == [("created", "./one"), ("created", "./two")]
    await whole.close()
    with pytest.raises(NotFound):
        await guest.resume_watch("wch_none", 0)


async def test_a_watch_ends_with_its_directory(place: Place, directory: str) -> None:
    await place.guest.make_dir(f"{directory}/d")
    handle = await place.guest.watch(f"{directory}/d")
    await place.guest.remove(f"{directory}/d")
    async with asyncio.timeout(DEADLINE_S):
        events = [event async for event in handle.events()]
    assert [event.kind for event in events if event.kind is not WatchKind.ATTRIBUTES] == [WatchKind.ENDED]
    await handle.close()


async def test_only_directories_are_watched(place: Place, directory: str) -> None:
    await place.guest.write_file(f"{directory}/f", chunks(b"x"))
    with pytest.raises(InvalidRequest):
        await place.guest.watch(f"{directory}/f")
    with pytest.raises(NotFound):
        await place.guest.watch(f"{directory}/none")
