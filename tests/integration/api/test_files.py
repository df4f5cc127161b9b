"""Files over real HTTP."""

from __future__ import annotations

import hashlib
import os
import socket
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from perdure.core.errors import InvalidRequest, MachineFailed, NotFound, PathEscape
from perdure.sdk import AsyncClient, AsyncWorkspace, ConnectionLost, Workspace
from perdure.wire.node import FileKind
from tests.fakes.api_server import FakeServer
from tests.fakes.memory_guest import Node


def test_read_and_write(demo: Workspace) -> None:
    demo.files.write("/root/a/b.txt", "grüße", mode=0o600)
    assert demo.files.read("/root/a/b.txt") == "grüße"
    assert demo.files.read("/root/a/b.txt", "bytes") == "grüße".encode()
    assert b"".join(demo.files.read("/root/a/b.txt", "stream")) == "grüße".encode()
    assert b"".join(demo.files.stream("/root/a/b.txt", offset=2, length=2)) == "ü".encode()
    assert demo.files.stat("/root/a/b.txt").mode == 0o600
    demo.files.rename("/root/a/b.txt", "/root/c")
    assert [one.name for one in demo.files.list("/root")] == ["a", "c"]
    demo.files.remove("/root/a")
    assert (demo.files.exists("/root/a"), demo.files.exists("/root/c")) == (False, True)


def test_names_are_bytes(demo: Workspace) -> None:
    name = os.fsdecode(b"/root/caf\xe9 &=?#\x1b[31m")
    demo.files.write(name, b"x")
    found = demo.files.list("/root")[0]
    assert (found.fs_path, found.fs_name) == (name, name.rpartition("/")[2])
    assert found.name == "caf� &=?#\x1b[31m"
    assert demo.files.read(name) == "x"


@pytest.mark.parametrize(
    ("path", "kind", "says"),
    [
        ("relative", InvalidRequest, "is not absolute"),
        ("/../etc/passwd", PathEscape, "leads out of the workspace"),
        ("/a/../../b", PathEscape, "leads out of the workspace"),
        ("/a\0b", InvalidRequest, "NUL"),
        ("/" + "x" * 5000, InvalidRequest, "longer than 4096"),
        ("/root", InvalidRequest, "is a directory"),
        ("/missing", NotFound, "no '/missing'"),
    ],
)
def test_bad_paths_are_told(demo: Workspace, path: str, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        demo.files.read(path)


def test_bad_paths_are_refused_for_every_action(demo: Workspace, server: FakeServer) -> None:
    actions = [
        lambda: demo.files.write("/../x", b""),
        lambda: demo.files.stat("/../x"),
        lambda: demo.files.list("/../x"),
        lambda: demo.files.make_dir("/../x"),
        lambda: demo.files.remove("/../x"),
        lambda: demo.files.rename("/../x", "/y"),
        lambda: demo.files.rename("/root", "/../y"),
    ]
    before = dict(server.workspaces.world("demo").files)
    for action in actions:
        with pytest.raises(PathEscape):
            action()
    assert server.workspaces.world("demo").files == before


def test_exists_tells_a_missing_file_from_a_missing_workspace(demo: Workspace) -> None:
    assert demo.files.exists("/missing") is False
    demo.delete()
    with pytest.raises(NotFound, match="no workspace"):
        demo.files.exists("/missing")


def test_large_upload_is_streamed(demo: Workspace, server: FakeServer) -> None:
    """256 MiB pass through client, HTTP and server; neither side ever holds more than a few MiB."""
    piece, count = b"\xa5" * (1 << 20), 256

    def pieces() -> Iterator[bytes]:
        for _ in range(count):
            yield piece

    tracemalloc.start()
    try:
        written = demo.files.write("/root/big", pieces())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    expected = hashlib.sha256()
    for _ in range(count):
        expected.update(piece)
    assert (written.length, written.sha256) == (count << 20, expected.hexdigest())
    assert server.workspaces.world("demo").largest_chunk <= 1 << 20
    assert peak < 32 << 20


def test_upload_that_fails_in_the_guest_keeps_the_old_content(demo: Workspace, server: FakeServer) -> None:
    demo.files.write("/root/a", b"old")
    server.workspaces.world("demo").fail_write_after = 100_000
    with pytest.raises(MachineFailed, match="broke in the middle"):
        demo.files.write("/root/a", b"new" * 1_000_000)
    server.workspaces.world("demo").fail_write_after = None
    assert demo.files.read("/root/a") == "old"


def test_upload_whose_client_dies_keeps_the_old_content(demo: Workspace, server: FakeServer) -> None:
    demo.files.write("/root/a", b"old")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.connect(str(server.settings.api_socket))
        head = "PUT /v1/workspaces/demo/files/content?path=/root/a HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
        raw.sendall(head.encode() + b"n" * 10_000)
        held = server.workspaces.held
        row = server.workspaces.find_row("demo")
        server.wait_for(lambda: held.get(row.id, 0) == 1)
    server.wait_for(lambda: held[row.id] == 0)
    assert demo.files.read("/root/a") == "old"


def test_cut_download_is_visibly_cut(demo: Workspace, server: FakeServer) -> None:
    """To a client that does not go on by itself, as the SDK does where it can tell that the file is the same."""
    server.workspaces.world("demo").files["/root/a"] = Node(FileKind.FILE, bytearray(8_000_000), declared_size=0)
    received = 0
    with pytest.raises(ConnectionLost):
        for piece in demo.files.stream("/root/a"):
            received += len(piece)
            server.run(lambda: server.workspaces.sleep(None, "demo"))  # type: ignore[arg-type]
    assert 0 < received < 8_000_000


def test_file_that_says_it_is_empty_but_is_not(demo: Workspace, server: FakeServer) -> None:
    """As in /proc: size 0, content all the same."""

    server.workspaces.world("demo").files["/stat"] = Node(FileKind.FILE, bytearray(b"cpu 1 2 3\n"), declared_size=0)
    assert demo.files.stat("/stat").size == 0
    assert demo.files.read("/stat") == "cpu 1 2 3\n"


def test_devices_are_not_read(demo: Workspace, server: FakeServer) -> None:
    server.workspaces.world("demo").files["/dev-x"] = Node(FileKind.OTHER)
    with pytest.raises(InvalidRequest, match="not a regular file"):
        demo.files.read("/dev-x")


def test_upload_and_download_a_tree(demo: Workspace, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub/empty").mkdir(parents=True)
    (source / "run.sh").write_bytes(b"#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "sub" / os.fsdecode(b"b\xff")).write_bytes(os.urandom(300_000))
    (source / "link").symlink_to("run.sh")
    (source / "away").symlink_to("/etc")
    done = demo.files.upload(source, "/root/tree")
    assert (done.files, done.directories, [one.reason for one in done.skipped]) == (2, 3, ["it is a link to a directory"])
    back = demo.files.download("/root/tree", tmp_path / "back")
    assert (back.files, back.directories, back.links, back.skipped) == (2, 3, 1, [])
    assert (tmp_path / "back/run.sh").stat().st_mode & 0o777 == 0o755
    name = os.fsdecode(b"sub/b\xff")
    assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()


async def test_async_files(server: FakeServer, tmp_path: Path) -> None:
    async with AsyncClient(settings=server.settings) as client:
        ws = await AsyncWorkspace.create("demo", client=client)

        async def pieces() -> object:
            yield b"one "
            yield b"two"

        await ws.files.write("/root/x", pieces())  # type: ignore[arg-type]
        assert await ws.files.read("/root/x") == "one two"
        assert b"".join([piece async for piece in ws.files.stream("/root/x")]) == b"one two"
        await ws.files.download("/root/x", tmp_path / "x")
    assert (tmp_path / "x").read_text() == "one two"


def test_content_route_describes_the_file_for_plain_http_clients(demo: Workspace, server: FakeServer) -> None:
    transport = httpx2.HTTPTransport(uds=str(server.settings.api_socket))
    demo.files.write("/root/a", b"0123456789")
    with httpx2.Client(transport=transport, base_url="http://perdure/v1/workspaces/demo/files") as http:
        whole = http.get("/content?path=/root/a")
        part = http.get("/content?path=/root/a&offset=8&length=5")
        written = http.put("/content?path=/root/b", content=b"x")
        directory = http.get("/content?path=/root")
    assert (whole.headers["content-length"], whole.headers["perdure-file-size"], part.text) == ("10", "10", "89")
    assert whole.headers["etag"] == f'"{demo.files.stat("/root/a").revision}"'
    assert written.headers["etag"] == f'"{hashlib.sha256(b"x").hexdigest()}"'
    assert (directory.status_code, directory.json()["error"]["code"]) == (422, "invalid_request")


def test_parents_are_made_only_when_asked_for(demo: Workspace) -> None:
    with pytest.raises(NotFound):
        demo.files.write("/root/a/b/c", b"x", parents=False)
    demo.files.write("/root/a/b/c", b"x" * 1_000_000)
    assert demo.files.read("/root/a/b/c", "bytes") == b"x" * 1_000_000
