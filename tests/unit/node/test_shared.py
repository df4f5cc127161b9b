"""Damage in what many workspaces lie on: a start finds it in small files, the background in large ones; it is refused by name."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.core.errors import CorruptData, CorruptSnapshot, Unavailable
from perdure.images import agentdisk
from perdure.images.registry import ImageStore
from perdure.node import shared as shared_module
from perdure.node.secondhome import Starts
from perdure.node.shared import SharedFile, SharedFiles
from perdure.node.sinceboot import SinceBoot
from perdure.snapshots.frozen import identity_of
from tests.unit.images.test_registry import DIGEST, put, put_golden

DEADLINE_S = 30.0
_writes = itertools.count(1)


def flip(path: Path, at: int = -1) -> None:
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + next(_writes)))  # those within some milliseconds have the same time


class World:
    """An image with a golden, and who looks after their files."""

    def __init__(self, root: Path) -> None:
        self.images = ImageStore(root / "images")
        self.image = put(self.images)
        self.golden = put_golden(self.image)
        self.starts = Starts()
        self.found: list[str] = []
        self.heard = asyncio.Event()
        self.since_boot = SinceBoot(root / "since-boot.json", "this boot")
        self.shared = self.another()
        self.paths = [self.image.root.path, self.golden.ram, self.golden.devices]

    def another(self, boot_id: str = "this boot") -> SharedFiles:
        """That of a server that starts now."""
        return SharedFiles(self.starts, self._damaged, SinceBoot(self.since_boot._path, boot_id))

    async def _damaged(self, file: SharedFile) -> None:
        self.found.append(file.name)
        self.heard.set()

    def files(self) -> list[SharedFile]:
        return self.shared.of(self.paths)

    async def start(self) -> None:
        with self.starts.one(None):
            await self.shared.before_start(self.files())

    @asynccontextmanager
    async def background(self, everything: Callable[[], Iterable[SharedFile]] = list) -> AsyncIterator[None]:
        self.shared.start(everything, begin_after_s=0)
        try:
            yield
        finally:
            await self.shared.close()


@pytest.fixture
async def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is more than a start reads each time that a server begins."""
    monkeypatch.setattr(shared_module, "SMALL_BYTES", -1)


def reads_of(world: World, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    real = SharedFiles._read

    def listening(self: SharedFiles, file: SharedFile, told: Callable[[int], None]) -> None:
        names.append(file.path.name)
        real(self, file, told)

    monkeypatch.setattr(SharedFiles, "_read", listening)
    return names


@pytest.mark.parametrize("which", [0, 1, 2])
async def test_a_start_reads_what_is_small_before_its_first_use(world: World, which: int) -> None:
    flip(world.paths[which])
    for _ in range(2):
        with pytest.raises(CorruptSnapshot, match="its checksum does not hold") as caught:
            await world.start()
        assert caught.value.file == world.files()[which].name
        assert caught.value.file.startswith(f"images/blobs/{DIGEST}/")
    assert set(world.found) == {world.files()[which].name}
    flip(world.paths[which])  # put back
    await world.start()


async def test_it_reads_it_once_and_again_when_somebody_wrote_to_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    names = reads_of(world, monkeypatch)
    await world.start()
    await world.start()
    assert sorted(names) == sorted(path.name for path in world.paths)
    del names[:]
    (world.paths[0].parent / "linked").hardlink_to(world.paths[0])  # as another image on the same root disk does
    await world.start()
    assert names == [], "that is left to the background"
    flip(world.paths[1])
    with pytest.raises(CorruptSnapshot, match=r"ram\.base"):
        await world.start()
    assert names == ["ram.base"]


async def test_one_that_is_missing_is_named(world: World) -> None:
    await world.start()
    files = world.files()
    world.paths[1].unlink()
    with pytest.raises(CorruptSnapshot, match="is missing") as caught:
        await world.shared.before_start(files)
    assert caught.value.file == files[1].name


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("which", [0, 1, 2])
async def test_the_first_start_after_a_boot_of_the_host_waits_for_what_is_large(world: World, which: int) -> None:
    await world.start()
    flip(world.paths[which])
    flip(world.paths[which])  # the same content, written anew: nobody knows that
    world.shared = world.another("the next boot")
    flip(world.paths[which])
    with pytest.raises(CorruptSnapshot) as caught:
        await world.start()
    assert caught.value.file == world.files()[which].name


@pytest.mark.usefixtures("large")
async def test_other_servers_and_later_ones_do_not_wait_until_the_host_boots(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = reads_of(world, monkeypatch)
    await world.start()
    assert sorted(names) == sorted(path.name for path in world.paths)
    del names[:]
    world.shared = world.another()
    (world.paths[0].parent / "linked").hardlink_to(world.paths[0])  # as another image on the same root disk does
    await world.start()
    assert names == []
    world.paths[1].chmod(0o644)
    os.utime(world.paths[1])  # as a write would
    await world.start()
    assert names == ["ram.base"]
    del names[:]
    world.shared = world.another("the next boot")
    await world.start()
    assert sorted(names) == sorted(path.name for path in world.paths)


@pytest.mark.usefixtures("large")
async def test_starts_at_once_read_a_file_once_and_who_goes_away_ends_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = reads_of(world, monkeypatch)
    reading, go = threading.Event(), threading.Event()
    real = world.files()

    def slowly(told: Callable[[int], None]) -> str:
        reading.set()
        assert go.wait(DEADLINE_S)
        told(1)
        return ""

    slow = replace(real[1], read=slowly)
    first = asyncio.create_task(world.shared.before_start([slow]))
    assert await asyncio.to_thread(reading.wait, DEADLINE_S)
    others = [asyncio.create_task(world.shared.before_start([slow])) for _ in range(3)]
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    go.set()
    await asyncio.wait_for(asyncio.gather(*others), DEADLINE_S)
    assert names == ["ram.base"]


@pytest.mark.usefixtures("large")
async def test_what_nobody_has_read_since_the_boot_is_read_when_a_server_starts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, for wakes to come; the rest half a minute later."""
    names = reads_of(world, monkeypatch)
    await world.shared.whole(world.files()[:1])
    del names[:]
    flip(world.paths[1])
    world.shared.start(world.files, begin_after_s=3600)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await world.heard.wait()
        await world.shared.whole(world.files()[2:])
        assert sorted(names) == sorted(path.name for path in world.paths[1:])
    finally:
        await world.shared.close()


@pytest.mark.usefixtures("large")
async def test_what_a_pool_is_filled_for_is_read_ahead(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    names = reads_of(world, monkeypatch)
    flip(world.paths[0])
    world.shared.soon(world.files())
    with pytest.raises(CorruptSnapshot, match="does not hold"):
        await world.start()
    await world.shared.whole(world.files()[1:])
    assert sorted(names) == sorted(path.name for path in world.paths), "each once"
    world.shared.soon(world.files()[1:])
    await world.shared.close()
    assert len(names) == len(world.paths), "what was whole is known"


@pytest.mark.usefixtures("large")
async def test_what_was_written_a_moment_ago_is_as_good_as_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    names = reads_of(world, monkeypatch)
    for file in world.files():
        world.shared.written(file)
    await world.start()
    assert names == []
    flip(world.paths[1])
    with pytest.raises(CorruptSnapshot):
        await world.start()


@pytest.mark.usefixtures("large")
async def test_the_end_of_the_server_ends_who_waits(world: World) -> None:
    reading = threading.Event()

    def endless(told: Callable[[int], None]) -> str:
        reading.set()
        while True:
            told(1)

    waiting = asyncio.create_task(world.shared.before_start([replace(world.files()[0], read=endless)]))
    assert await asyncio.to_thread(reading.wait, DEADLINE_S)
    await world.shared.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await waiting


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"boot_id": "this boot"}', b'{"boot_id": "this boot", "whole": 7}', None]
)
@pytest.mark.usefixtures("large")
async def test_a_memory_that_cannot_be_read_is_none(world: World, content: bytes | None) -> None:
    path = world.since_boot._path
    if content is None:
        path.mkdir()  # nor can it be written
    else:
        path.write_bytes(content)
    await world.start()
    flip(world.paths[1])
    with pytest.raises(CorruptSnapshot):
        await world.start()


async def test_files_that_are_gone_are_forgotten(world: World) -> None:
    since = world.since_boot
    for path in world.paths:
        since.note(path, identity_of(path))
    world.paths[1].unlink()
    since.note(world.paths[0], identity_of(world.paths[0]))
    assert set(json.loads(since._path.read_bytes())["whole"]) == {str(world.paths[0]), str(world.paths[2])}


@pytest.mark.usefixtures("large")
async def test_a_start_does_not_wait_for_what_is_known_and_the_background_finds_it(world: World) -> None:
    """A disk that gives other bytes than it gave when the host had booted."""
    flip(world.golden.ram)
    world.since_boot.note(world.golden.ram, identity_of(world.golden.ram))
    await world.start()
    async with world.background():
        async with asyncio.timeout(DEADLINE_S):
            await world.heard.wait()
    (name,) = world.found
    assert name.endswith("ram.base")
    with pytest.raises(CorruptSnapshot) as caught:
        await world.start()
    assert caught.value.file == name
    flip(world.golden.ram)
    await world.start()  # what was damaged is read at once when it is another


class Watched(threading.Event):
    """Tells how often somebody waited in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.set()
        self.in_vain = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        happened = super().wait(timeout)
        if not happened:
            self.in_vain.release()
        return happened


@pytest.mark.usefixtures("large")
async def test_the_background_reads_everything_and_stands_still_while_something_starts(world: World) -> None:
    world.starts.quiet = quiet = Watched()
    reading, ended = threading.Event(), threading.Event()
    files = world.files()

    def first(told: Callable[[int], None]) -> str:
        reading.set()
        told(1)
        ended.set()
        return "It is damaged."

    files[1] = replace(files[1], read=first)  # the smallest is the first
    for path in world.paths:
        world.since_boot.note(path, identity_of(path))
    with world.starts.one(None):
        async with world.background(lambda: files):
            assert await asyncio.to_thread(reading.wait, DEADLINE_S)
            for _ in range(2):
                assert await asyncio.to_thread(quiet.in_vain.acquire, timeout=DEADLINE_S)
            assert not ended.is_set()
    flip(world.image.root.path)
    world.shared = world.another()
    async with world.background(lambda: files):
        async with asyncio.timeout(DEADLINE_S):
            while len(world.found) < 2:
                world.heard.clear()
                await world.heard.wait()
    assert sorted(world.found) == sorted([files[0].name, files[1].name])


@pytest.mark.usefixtures("large")
async def test_closing_ends_what_is_being_read(world: World) -> None:
    reading, ended = threading.Event(), threading.Event()

    def endless(told: Callable[[int], None]) -> str:
        reading.set()
        try:
            while True:
                told(1)
        finally:
            ended.set()

    file = replace(world.files()[0], read=endless)
    world.since_boot.note(file.path, identity_of(file.path))
    async with world.background(lambda: [file]):
        assert await asyncio.to_thread(reading.wait, DEADLINE_S)
    assert ended.is_set()


@pytest.mark.usefixtures("large")
async def test_who_writes_anew_over_a_file_waits_until_it_is_read(world: World) -> None:
    flip(world.golden.ram)
    with pytest.raises(CorruptSnapshot, match=r"ram\.base"):
        await world.shared.whole(world.files())


async def test_a_release_that_an_old_image_boots_with_is_held_against_its_checksums(world: World) -> None:
    release = world.images.root / "agents" / "release"
    release.mkdir(parents=True)
    paths = [release / name for name in ("kernel", "initrd", "agent.raw")]
    for path in paths:
        path.write_bytes(path.name.encode() * 100)
    assert world.shared.of(paths) == [], "one of an earlier version has none"
    agentdisk._seal(release)
    flip(paths[2])
    with pytest.raises(CorruptSnapshot, match="does not hold") as caught:
        await world.shared.before_start(world.shared.of(paths))
    assert caught.value.file == "images/agents/release/agent.raw"
    agentdisk._seal(release)  # what is there stays: it says what the files were
    flip(paths[2])
    await world.shared.before_start(world.shared.of(paths))
    assert len(world.shared.of(paths)) == 3


async def test_a_golden_that_is_made_again_is_held_against_its_own_description(world: World) -> None:
    await world.start()
    for path in world.golden.directory.iterdir():
        path.unlink()
    world.golden.directory.rmdir()
    world.paths[1] = put_golden(world.image).ram
    await world.start()
    (world.golden.directory / "golden.json").write_text("{}")
    with pytest.raises(CorruptData, match="golden"):
        await world.start()
