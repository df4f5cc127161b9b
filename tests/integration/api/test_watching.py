"""Watching a directory, over real HTTP."""

from __future__ import annotations

import os
from typing import Any

import pytest

from perdure.core.errors import InvalidRequest, NotFound
from perdure.sdk import AsyncClient, AsyncWorkspace, Client, Workspace
from perdure.wire import public
from perdure.wire.node import FileKind
from tests.fakes.api_server import FakeServer
from tests.fakes.memory_files import MemoryFiles
from tests.fakes.memory_guest import Node, World


@pytest.fixture
def world(demo: Workspace, server: FakeServer) -> World:
    return server.workspaces.world("demo")


def asleep(server: FakeServer) -> None:
    server.run(lambda: server.workspaces.sleep(None, "demo"))  # type: ignore[arg-type]


def put(world: Any, path: str, content: bytes) -> None:
    world.put(path, Node(FileKind.FILE, bytearray(content)))


@pytest.fixture(autouse=True)
def first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something to see as soon as a watch has begun."""
    real = MemoryFiles.watch

    async def watch(self: MemoryFiles, path: Any, *, recursive: bool = False) -> Any:
        handle = await real(self, path, recursive=recursive)
        put(self.disk, "/root/one", b"")
        return handle

    monkeypatch.setattr(MemoryFiles, "watch", watch)


def kinds(events: list[public.WatchEvent]) -> list[tuple[str, str]]:
    return [(event.type, event.path) for event in events]


def test_a_watch_tells_ends_with_the_generation_and_goes_on(demo: Workspace, server: FakeServer, world: World) -> None:
    watch = demo.files.watch_dir("/root")
    seen: list[public.WatchEvent] = []
    for event in watch:
        seen.append(event)
        if event.path == "/root/two":
            asleep(server)
        elif event.path == "/root/one":
            put(world, "/root/two", b"")
        if len(seen) == 1 and event.path != "/root/one":
            raise AssertionError(event)
    assert kinds(seen) == [("created", "/root/one"), ("created", "/root/two"), ("ended", "")]


def test_a_watch_is_taken_up_again_after_a_sleep(demo: Workspace, server: FakeServer, world: World) -> None:
    watch = demo.files.watch_dir("/root")
    for event in watch:
        assert event.path == "/root/one" or event.reason == "generation"
        asleep(server)
    assert server.workspaces.wakes["demo"] == 1, "nothing was woken to go on"
    put(world, "/root/two", b"")  # by a program, when it runs again
    for event in watch:
        assert kinds([event]) == [("created", "/root/two")]
        break
    assert server.workspaces.wakes["demo"] == 2


def test_a_watch_whose_memory_was_lost_begins_anew_and_says_so(demo: Workspace, server: FakeServer, world: World) -> None:
    watch = demo.files.watch_dir("/root")
    for _ in watch:
        asleep(server)
    world.watches.clear()
    events = iter(watch)
    assert [next(events).type, next(events).path] == ["overflow", "/root/one"]


def test_a_watch_survives_the_server(demo: Workspace, server: FakeServer, world: World) -> None:
    seen = []
    for event in demo.files.watch_dir("/root"):
        seen.append(event.path)
        if event.path == "/root/one":
            server.stop()
            put(world, "/root/two", b"")
            server.start()
        else:
            break
    assert seen == ["/root/one", "/root/two"]


def test_a_watch_of_names_that_are_bytes(demo: Workspace, world: World) -> None:
    name = os.fsdecode(b"/root/caf\xe9")
    for event in demo.files.watch_dir("/root"):
        if event.path == "/root/one":
            put(world, name, b"")
        else:
            assert (event.path, event.fs_path) == ("/root/caf\ufffd", name)
            break


def test_a_watch_with_a_callback(demo: Workspace, server: FakeServer) -> None:
    seen: list[str] = []

    def told(event: public.WatchEvent) -> None:
        seen.append(event.type)
        if len(seen) == 1:
            demo.files.remove("/root", recursive=True)

    demo.files.watch_dir("/root", told).run()
    assert seen[0] == "created" and seen[-1] == "ended"


async def test_an_async_watch(server: FakeServer) -> None:
    async with AsyncClient(settings=server.settings) as client:
        workspace = await AsyncWorkspace.create("demo", client=client)
        async for event in workspace.files.watch_dir("/root"):
            assert event.path == "/root/one"
            break
        row = server.workspaces.find_row("demo")
        await client.health()
    server.wait_for(lambda: server.workspaces.held.get(row.id, 0) == 0)


def test_a_watch_of_what_is_no_directory_is_told(demo: Workspace) -> None:
    demo.files.write("/root/f", "x")
    with pytest.raises(InvalidRequest):
        next(iter(demo.files.watch_dir("/root/f")))
    with pytest.raises(NotFound):
        next(iter(demo.files.watch_dir("/none")))


def test_two_clients_watch_the_same(demo: Workspace, client: Client, world: World) -> None:
    first, second = iter(demo.files.watch_dir("/root")), iter(Workspace.connect("demo", client=client).files.watch_dir("/root"))
    assert next(first).path == next(second).path == "/root/one"
