"""Damage in what many workspaces lie on: a start finds it in small files, the background in large ones; it is refused by name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.core.errors import CorruptData, CorruptSnapshot
from perdure.images.registry import ImageStore
from perdure.node import shared as shared_module
from perdure.node.secondhome import Starts
from perdure.node.shared import SharedFile, SharedFiles
from tests.unit.images.test_registry import DIGEST, put, put_golden

DEADLINE_S = 30.0


def flip(path: Path, at: int = -1) -> None:
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


class World:
    """An image with a golden, and who looks after their files."""

    def __init__(self, root: Path) -> None:
        self.images = ImageStore(root / "images")
        self.image = put(self.images)
        self.golden = put_golden(self.image)
        self.starts = Starts()
        self.found: list[str] = []
        self.heard = asyncio.Event()
        self.shared = SharedFiles(self.starts, self._damaged)
        self.paths = [self.image.root.path, self.golden.ram, self.golden.devices]

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
    """Every file is more than a start reads."""
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
async def test_a_start_does_not_wait_for_what_is_large_and_the_background_finds_it(world: World) -> None:
    flip(world.golden.ram)
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
    with world.starts.one(None):
        async with world.background(lambda: files):
            assert await asyncio.to_thread(reading.wait, DEADLINE_S)
            for _ in range(2):
                assert await asyncio.to_thread(quiet.in_vain.acquire, timeout=DEADLINE_S)
            assert not ended.is_set()
    flip(world.image.root.path)
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
    async with world.background(lambda: [file]):
        assert await asyncio.to_thread(reading.wait, DEADLINE_S)
    assert ended.is_set()


@pytest.mark.usefixtures("large")
async def test_who_writes_anew_over_a_file_waits_until_it_is_read(world: World) -> None:
    flip(world.golden.ram)
    with pytest.raises(CorruptSnapshot, match=r"ram\.base"):
        await world.shared.whole(world.files())


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
