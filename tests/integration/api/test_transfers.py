"""Transfers that go on after something broke, directories as tar streams, and watches, over real HTTP."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from perdure.core.errors import Conflict, InvalidRequest, NotFound, PathEscape
from perdure.sdk import ConnectionLost, Workspace, _transfers
from perdure.sdk._transfers import Incoming, Outgoing
from perdure.sdk.errors import TransferMismatch
from perdure.wire.guest import tar
from perdure.wire.node import FileKind
from tests.fakes.api_server import FakeServer
from tests.fakes.memory_guest import Node, World


@pytest.fixture
def http(demo: Workspace, server: FakeServer) -> Iterator[httpx2.Client]:
    """A client that knows HTTP and nothing of Perdure."""
    transport = httpx2.HTTPTransport(uds=str(server.settings.api_socket))
    with httpx2.Client(transport=transport, base_url="http://perdure/v1/workspaces/demo/files") as made:
        yield made


@pytest.fixture
def world(demo: Workspace, server: FakeServer) -> World:
    return server.workspaces.world("demo")


def asleep(server: FakeServer) -> None:
    server.run(lambda: server.workspaces.sleep(None, "demo"))  # type: ignore[arg-type]


def put(world: World, path: str, content: bytes, **fields: Any) -> None:
    world.put(path, Node(FileKind.FILE, bytearray(content), **fields))


# --------------------------------------------------------------------------------------------------------------- ranges


@pytest.mark.parametrize(
    ("asked", "status", "shown", "told"),
    [
        ("bytes=4-", 206, b"456789", "bytes 4-9/10"),
        ("bytes=4-5", 206, b"45", "bytes 4-5/10"),
        ("bytes=0-0", 206, b"0", "bytes 0-0/10"),
        ("bytes=8-999", 206, b"89", "bytes 8-9/10"),
        ("bytes=5-4", 200, b"0123456789", None),
        ("bytes=-3", 200, b"0123456789", None),
        ("bytes=0-1,4-5", 200, b"0123456789", None),
        ("lines=1-2", 200, b"0123456789", None),
    ],
)
def test_ranges(http: httpx2.Client, world: World, asked: str, status: int, shown: bytes, told: str | None) -> None:
    put(world, "/root/f", b"0123456789")
    answer = http.get("/content?path=/root/f", headers={"range": asked})
    assert (answer.status_code, answer.content, answer.headers.get("content-range")) == (status, shown, told)
    assert answer.headers["content-length"] == str(len(shown))
    assert answer.headers["accept-ranges"] == "bytes"


def test_a_range_beyond_the_end_is_refused(http: httpx2.Client, world: World) -> None:
    put(world, "/root/f", b"0123456789")
    answer = http.get("/content?path=/root/f", headers={"range": "bytes=10-"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["details"]) == (416, "range_not_satisfiable", {"size": "10"})


def test_a_condition_that_does_not_hold_gives_the_whole_file(http: httpx2.Client, world: World) -> None:
    """(peers: row 27) A resumed download is never half of one file and half of another."""
    put(world, "/root/f", b"old content")
    etag = http.get("/content?path=/root/f").headers["etag"]
    assert etag.startswith('"')
    same = http.get("/content?path=/root/f", headers={"range": "bytes=4-", "if-range": etag})
    assert (same.status_code, same.content) == (206, b"content")
    put(world, "/root/f", b"new content")
    for condition in (etag, f"W/{etag}", "Tue, 01 Jan 2030 00:00:00 GMT"):
        other = http.get("/content?path=/root/f", headers={"range": "bytes=4-", "if-range": condition})
        assert (other.status_code, other.content) == (200, b"new content")


def test_a_file_without_a_size_has_no_ranges(http: httpx2.Client, world: World) -> None:
    put(world, "/stat", b"cpu 1 2 3\n", declared_size=0)
    answer = http.get("/content?path=/stat", headers={"range": "bytes=4-"})
    assert (answer.status_code, answer.content) == (200, b"cpu 1 2 3\n")
    assert "content-length" not in answer.headers and "etag" not in answer.headers


# ------------------------------------------------------------------------------------------------------------- downloads


def test_a_download_goes_on_after_the_workspace_was_put_to_sleep(demo: Workspace, server: FakeServer, world: World) -> None:
    data = os.urandom(4_000_000)
    put(world, "/root/f", data)
    received = bytearray()
    for piece in demo.files.stream("/root/f", offset=10, length=3_999_980):
        if not received:
            asleep(server)
        received += piece
    assert received == data[10:-10]
    assert server.workspaces.wakes["demo"] == 2
    assert demo.report is not None and demo.report.asleep_s == 3600, "the wake in the middle is told"


def test_a_download_goes_on_after_the_server_was_restarted(demo: Workspace, server: FakeServer, world: World) -> None:
    data = os.urandom(4_000_000)
    put(world, "/root/f", data)
    received = bytearray()
    for piece in demo.files.stream("/root/f"):
        if not received:
            server.stop()
            server.start()
        received += piece
    assert received == data


def test_a_file_that_changed_meanwhile_is_told(demo: Workspace, server: FakeServer, world: World) -> None:
    put(world, "/root/f", b"a" * 4_000_000)
    with pytest.raises(TransferMismatch, match="was changed while it was read"):
        for _ in demo.files.stream("/root/f"):
            asleep(server)
            put(world, "/root/f", b"b" * 4_000_000)


def test_a_large_download_goes_on_in_the_next_call(
    demo: Workspace, server: FakeServer, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_transfers, "RESUMED_BYTES", 1_000_000)
    data = os.urandom(4_000_000)
    put(world, "/root/f", data)
    arrived = 0

    def stop(count: int) -> None:
        nonlocal arrived
        arrived += count
        if arrived > 1_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.files.download("/root/f", tmp_path / "f", on_bytes=stop)
    (part,) = tmp_path.iterdir()
    kept = part.stat().st_size
    assert part.name.startswith(".perdure-part-") and kept > 1_000_000
    asked: list[int] = []
    monkeypatch.setattr(Incoming, "took", lambda self, count: asked.append(self.position) or took(self, count))
    assert demo.files.download("/root/f", tmp_path / "f").bytes == len(data)
    assert asked[0] == kept
    assert (tmp_path / "f").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


took = Incoming.took


def test_what_was_kept_of_a_download_is_compared_as_a_whole(
    demo: Workspace, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(peers: row 27) Something on this disk has changed the part: the hash of the workspace tells."""
    monkeypatch.setattr(_transfers, "RESUMED_BYTES", 1_000_000)
    put(world, "/root/f", b"x" * 4_000_000)

    def stop(_count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.files.download("/root/f", tmp_path / "f", on_bytes=stop)
    (part,) = tmp_path.iterdir()
    with part.open("r+b") as file:
        file.write(b"damage")
    with pytest.raises(TransferMismatch, match="is not what is in the workspace"):
        demo.files.download("/root/f", tmp_path / "f")
    assert list(tmp_path.iterdir()) == []
    demo.files.download("/root/f", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"x" * 4_000_000


def test_a_hash_can_be_asked_for(demo: Workspace, world: World) -> None:
    put(world, "/root/f", b"content")
    found = demo.files.hash("/root/f")
    assert (found.size, found.sha256) == (7, hashlib.sha256(b"content").hexdigest())
    assert found.revision == demo.files.stat("/root/f").revision
    with pytest.raises(NotFound):
        demo.files.hash("/root/none")


# --------------------------------------------------------------------------------------------------------------- uploads


class Breaking(io.BytesIO):
    """A file whose reading is an occasion for something to happen, once, after so many bytes."""

    def __init__(self, data: bytes, after: int, what: Any) -> None:
        super().__init__(data)
        self._after, self._what = after, what

    def read(self, size: int | None = -1) -> bytes:
        if self._what is not None and self.tell() >= self._after:
            what, self._what = self._what, None
            what()
        return super().read(size)


@pytest.mark.parametrize("event", ["sleep", "restart"])
def test_an_upload_goes_on_where_it_broke(demo: Workspace, server: FakeServer, world: World, event: str) -> None:
    """(peers: row 27) Nothing that was acknowledged is lost, and what is there in the end is what was sent."""
    data = os.urandom(6_000_000)

    def interrupt() -> None:
        server.wait_for(lambda: any("upl_" in path and len(node.content) > 1_000_000 for path, node in world.files.items()))
        if event == "sleep":
            asleep(server)
        else:
            server.stop()
            server.start()

    written = demo.files.write_resumable("/root/new/f", Breaking(data, 3_000_000, interrupt), mode=0o600)
    assert (written.length, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert (bytes(world.files["/root/new/f"].content), world.files["/root/new/f"].mode) == (data, 0o600)
    assert not [path for path in world.files if "upl_" in path]


def test_a_large_upload_goes_on_in_the_next_call(
    demo: Workspace, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_transfers, "RESUMED_BYTES", 1_000_000)
    data = os.urandom(6_000_000)
    (tmp_path / "f").write_bytes(data)
    sent = 0

    def stop(count: int) -> None:
        nonlocal sent
        sent += count
        if sent > 4_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.files.upload(tmp_path / "f", "/root/f", on_bytes=stop)
    begun = [node for path, node in world.files.items() if "upl_" in path]
    assert len(begun) == 1 and "/root/f" not in world.files
    offsets: list[int] = []
    monkeypatch.setattr(Outgoing, "pieces", lambda self, offset: offsets.append(offset) or pieces(self, offset))
    assert demo.files.upload(tmp_path / "f", "/root/f").bytes == len(data)
    assert bytes(world.files["/root/f"].content) == data
    assert offsets == [offsets[0]] and offsets[0] > 0


pieces = Outgoing.pieces


def test_a_changed_local_file_is_another_upload(
    demo: Workspace, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_transfers, "RESUMED_BYTES", 1000)
    (tmp_path / "f").write_bytes(b"a" * 2_000_000)

    def stop(_count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.files.upload(tmp_path / "f", "/root/f", on_bytes=stop)
    (tmp_path / "f").write_bytes(b"b" * 1_000_000)
    demo.files.upload(tmp_path / "f", "/root/f")
    assert bytes(world.files["/root/f"].content) == b"b" * 1_000_000


def test_uploads_by_plain_http(http: httpx2.Client, world: World) -> None:
    upload = "/uploads/upl_0123456789"
    assert http.put(upload).json() == {"upload_id": "upl_0123456789", "offset": 0}
    assert http.patch(f"{upload}?offset=0", content=b"one ").json()["offset"] == 4
    assert http.get(upload).json()["offset"] == http.put(upload).json()["offset"] == 4
    wrong = http.patch(f"{upload}?offset=1", content=b"x")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (409, "conflict")
    http.patch(f"{upload}?offset=4", content=b"two")
    digest = hashlib.sha256(b"one two").hexdigest()
    assert http.post(f"{upload}/finish?path=/root/f&length=6").status_code == 409
    for _ in range(2):
        done = http.post(f"{upload}/finish?path=/root/a/f&length=7&sha256={digest}&parents=true")
        assert (done.status_code, done.json()["sha256"]) == (200, digest)
    assert bytes(world.files["/root/a/f"].content) == b"one two"
    assert http.get(upload).status_code == 404
    assert http.delete(upload).json() == {"ok": True}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/uploads/x"),
        ("PUT", "/uploads/upl_UPPERCASE"),
        ("PATCH", "/uploads/upl_0123456789"),
        ("PATCH", "/uploads/upl_0123456789?offset=-1"),
        ("POST", "/uploads/upl_0123456789/finish?path=/root/f"),
        ("POST", "/uploads/upl_0123456789/finish?path=/root/f&length=1&sha256=zz"),
        ("POST", "/uploads/upl_0123456789/finish?path=../f&length=1"),
        ("PUT", "/uploads/upl_0123456789?path=/root"),
    ],
)
def test_bad_uploads_are_told(http: httpx2.Client, world: World, method: str, path: str) -> None:
    http.put("/uploads/upl_0123456789")
    answer = http.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request")


def test_two_clients_do_not_mix_in_one_upload(http: httpx2.Client, server: FakeServer, world: World) -> None:
    http.put("/uploads/upl_0123456789")
    go = threading.Event()

    def slow() -> Iterator[bytes]:
        yield b"one"
        go.wait(30)

    first = threading.Thread(target=lambda: http.patch("/uploads/upl_0123456789?offset=0", content=slow()))
    first.start()
    server.wait_for(lambda: "upl_0123456789" in world.busy)
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(server.settings.api_socket)), base_url=http.base_url) as other:
        refused = other.patch("/uploads/upl_0123456789?offset=3", content=b"two")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "busy")
    go.set()
    first.join()
    assert http.get("/uploads/upl_0123456789").json()["offset"] == 3


def test_a_conflict_or_a_missing_workspace_is_not_waited_for(demo: Workspace, world: World) -> None:
    with pytest.raises(InvalidRequest, match="is a directory"):
        demo.files.write_resumable("/root", b"x")
    demo.delete()
    with pytest.raises(NotFound, match="no workspace"):
        demo.files.write_resumable("/root/f", b"x")


# ----------------------------------------------------------------------------------------------------------- directories


@pytest.fixture
def source(tmp_path: Path) -> Path:
    top = tmp_path / "source"
    (top / "sub/empty").mkdir(parents=True)
    (top / "run.sh").write_bytes(b"#!/bin/sh\n")
    (top / "run.sh").chmod(0o755)
    (top / "sub" / os.fsdecode(b"odd \xff\n")).write_bytes(os.urandom(300_000))
    (top / "link").symlink_to("sub/empty")
    (top / "out").symlink_to("/etc/hostname")
    os.utime(top / "run.sh", ns=(0, 1_234_567_890_123_456_789))
    os.utime(top / "sub", ns=(0, 1_234_567_890_000_000_000))
    return top


def facts(top: Path) -> dict[str, Any]:
    found = {}
    for path in top.rglob("*"):
        known = path.lstat()
        what = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(top))] = (known.st_mode, None if path.is_symlink() else known.st_mtime_ns, what)
    return found


def test_a_tree_goes_there_and_back_as_it_was(demo: Workspace, source: Path, tmp_path: Path) -> None:
    """Permissions, links, times, empty directories and odd names; a link to a file outside becomes that file."""
    there = demo.files.upload(source, "/root/deep/tree")
    assert (there.files, there.directories, there.links, there.skipped) == (3, 3, 1, [])
    back = demo.files.download("/root/deep/tree", tmp_path / "back")
    assert (back.files, back.directories, back.links, back.skipped) == (3, 3, 1, [])
    (source / "out").unlink()
    (source / "out").write_bytes(Path("/etc/hostname").read_bytes())
    mine, theirs = facts(source), facts(tmp_path / "back")
    assert {name: value for name, value in mine.items() if name != "out"} == {
        name: value for name, value in theirs.items() if name != "out"
    }
    assert mine["out"][2] == theirs["out"][2]


def test_a_tree_is_read_by_others_and_written_by_them(http: httpx2.Client, demo: Workspace, source: Path) -> None:
    demo.files.upload(source, "/root/tree")
    answer = http.get("/tar?path=/root/tree")
    assert answer.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as opened:
        assert {"run.sh", "sub", "sub/empty", "link"} <= {name.rstrip("/") for name in opened.getnames()}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        made.add(source, arcname=".", filter=lambda info: None if info.name == "./out" else info)
    done = http.put("/tar?path=/root/copy", content=buffer.getvalue())
    assert (done.status_code, done.json()["files"], done.json()["links"]) == (200, 2, 1)
    assert demo.files.stat("/root/copy/run.sh").mode == 0o755


def test_hostile_archives_are_refused(demo: Workspace, world: World) -> None:
    for entry, error in (
        (tar.Entry("/etc/passwd", tar.Kind.FILE), InvalidRequest),
        (tar.Entry("../beside", tar.Kind.FILE), InvalidRequest),
        (tar.Entry("link", tar.Kind.SYMLINK, target="/etc"), PathEscape),
        (tar.Entry("null", tar.Kind.CHARACTER_DEVICE), InvalidRequest),
    ):
        with pytest.raises(error):
            demo.files.write_dir("/root/cage", tar.header(entry) + tar.END)
    assert sorted(world.files) == ["/", "/root", "/root/cage"]
    with pytest.raises(InvalidRequest, match="ends in the middle"):
        demo.files.write_dir("/root/cage", b"")
    with pytest.raises(InvalidRequest, match="not a directory"):
        put(world, "/root/file", b"")
        list(demo.files.read_dir("/root/file"))


def test_a_cut_archive_is_not_taken_for_a_whole_one(demo: Workspace, server: FakeServer, world: World, tmp_path: Path) -> None:
    for number in range(40):
        put(world, f"/root/tree/{number:02}", b"x" * 200_000)
    world.put("/root/tree", Node(FileKind.DIRECTORY, mode=0o755))
    with pytest.raises(ConnectionLost):
        demo.files.download("/root/tree", tmp_path / "back", on_bytes=lambda _count: asleep(server))
    assert not list((tmp_path / "back").glob(".perdure-*"))


def test_a_large_tree_is_streamed(demo: Workspace, tmp_path: Path, server: FakeServer, world: World) -> None:
    """128 MiB of files pass; neither side holds more than a few MiB beside what the fake keeps."""
    (tmp_path / "big").mkdir()
    for number in range(4):
        with (tmp_path / "big" / str(number)).open("wb") as file:
            file.truncate(32 << 20)
    upload = demo.files.upload
    tracemalloc.start()
    try:
        count = 0
        for piece in _transfers.pack(tmp_path / "big", _transfers.Transfer()):
            count += len(piece)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count > 128 << 20 and peak < 8 << 20
    assert upload(tmp_path / "big", "/root/big").bytes == 128 << 20
    assert world.largest_chunk <= 1 << 20


def test_several_files_are_written_at_once(demo: Workspace) -> None:
    written = demo.files.write_files({"/root/x/a": "one", "/root/x/b": b"\x00\xff"})
    assert [one.path for one in written] == ["/root/x/a", "/root/x/b"]
    assert demo.files.read("/root/x/b", "bytes") == b"\x00\xff"


# ----------------------------------------------------------------------------------------------------------------- names


def test_names_modes_and_owners(demo: Workspace) -> None:
    demo.files.write("/root/f", "x")
    assert demo.files.chmod("/root/f", 0o640).mode == 0o640
    assert demo.files.chown("/root/f", "nobody:7").uid == 65534
    demo.files.symlink("/root/l", "f")
    info = demo.files.stat("/root/l")
    assert (info.kind, info.target) == (FileKind.SYMLINK, "f")
    with pytest.raises(Conflict):
        demo.files.symlink("/root/l", "g")
    with pytest.raises(InvalidRequest, match="no user"):
        demo.files.chown("/root/f", "somebody")


def test_bad_modes_are_told(http: httpx2.Client, world: World) -> None:
    put(world, "/root/f", b"")
    for query in ("mode=9", "mode=77777", "mode=-1", "mode=rwx"):
        answer = http.patch(f"http://perdure/v1/workspaces/demo/files?path=/root/f&{query}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request")


def test_files_beneath_a_root_stay_there(demo: Workspace, world: World) -> None:
    demo.files.write("/root/secret", "secret")
    cage = demo.files.beneath("/root/cage")
    demo.files.make_dir("/root/cage")
    cage.write("a/f", "inside")
    cage.symlink("out", "../secret")
    cage.symlink("in", "a/f")
    assert (cage.read("in"), [one.name for one in cage.list("a")]) == ("inside", ["f"])
    cage.rename("a/f", "/g")
    assert cage.exists("g") and not cage.exists("a/f")
    for work in (
        lambda: cage.read("out"),
        lambda: cage.write("out", "x"),
        lambda: cage.stat("../secret"),
        lambda: cage.hash("out"),
        lambda: cage.chmod("out", 0o777),
        lambda: cage.write_resumable("out", b"x"),
        lambda: cage.rename("g", "../g"),
        lambda: list(cage.watch_dir("..")),
        lambda: list(cage.read_dir("..")),
    ):
        with pytest.raises(PathEscape):
            work()
    assert demo.files.read("/root/secret") == "secret"
    assert cage.beneath("a").list("") == []
