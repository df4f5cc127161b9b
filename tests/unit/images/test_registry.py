"""The image store: what is found by which word, what a crash may leave, and who may remove what."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from perdure.core.errors import CorruptData, NotFound
from perdure.images.model import Golden, Image
from perdure.images.registry import ImageStore, described_files, golden_to_json, image_from_json, image_to_json, load_golden
from perdure.images.sparse import file_facts
from perdure.wire.node import MachineSize

DIGEST = "ab" * 32
OTHER = "ac" * 32


def put(store: ImageStore, digest: str = DIGEST, name: str = "base") -> Image:
    with store.scratch("build") as scratch:
        directory = scratch / "image"
        directory.mkdir()
        for file in ("kernel", "initrd", "root.raw", "agent.raw"):
            (directory / file).write_bytes(file.encode() * 1000)
        (directory / "golden").mkdir()
        image = Image(
            digest=digest,
            name=name,
            created_at=datetime(2026, 1, 1, tzinfo=UTC),
            directory=directory,
            default_size=MachineSize(512, 1),
            disk_gib=8,
            kernel_version="6.12",
            agent_protocol=1,
            environment={"LANG": "C.UTF-8"},
            egress_allow=("packages.example.org:443",),
            warm_up=("true",),
            packages={"git": "1"},
            kernel_digest="k",
            agent_release="a",
            recipe_digest="r",
            root_digest="o",
        )
        facts = {path.name: file_facts(path) for path in directory.iterdir() if path.is_file()}
        (directory / "image.json").write_bytes(image_to_json(image, facts))
        return store.publish(directory, digest)


def put_golden(image: Image, name: str = "512m1c-0") -> Golden:
    directory = image.directory / "golden" / name
    directory.mkdir()
    for file in ("ram.base", "devices.state", "disk.qcow2"):
        (directory / file).write_bytes(b"x")
    golden = Golden(image.digest, MachineSize(512, 1), directory, "f", "b", 5.0, datetime(2026, 1, 1, tzinfo=UTC), 1, 1)
    facts = {path.name: file_facts(path) for path in directory.iterdir()}
    (directory / "golden.json").write_bytes(golden_to_json(golden, facts))
    return load_golden(directory)


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def test_an_image_comes_back_as_it_was_put(store: ImageStore) -> None:
    image = put(store)
    assert image == store.resolve("base") == store.resolve(DIGEST) == store.resolve(DIGEST[:6])
    assert image.directory == store.root / "blobs" / DIGEST
    assert image.egress_allow == ("packages.example.org:443",)
    assert image.created_at == datetime(2026, 1, 1, tzinfo=UTC)


def test_an_unknown_image_lists_those_that_are_there(store: ImageStore) -> None:
    with pytest.raises(NotFound, match="no image 'bose' here; no image has been built") as caught:
        store.resolve("bose")
    assert caught.value.hint.startswith("Name one of these, or build one with 'perdure image build RECIPE'")
    put(store)
    put(store, OTHER, "dev")
    with pytest.raises(NotFound, match="no image 'bose' here; there is: base, dev"):
        store.resolve("bose")


def test_a_shipped_image_that_is_not_built_says_the_command(store: ImageStore) -> None:
    for there, also in ((None, r"\."), ("base", "; there is: base.")):
        if there:
            put(store, name=there)
        with pytest.raises(NotFound, match=f"^The image 'node' has not been built here{also}") as caught:
            store.resolve("node")
        assert caught.value.hint == "Build it with 'perdure image build node', which takes some minutes."


def test_an_image_of_an_earlier_release_says_nothing_of_the_least_memory(store: ImageStore) -> None:
    image = put(store)
    described = described_files(image.directory / "image.json")
    assert image_from_json(described | {"min_memory_mib": 1024}, image.directory).min_memory_mib == 1024
    del described["min_memory_mib"]
    assert image_from_json(described, image.directory) == image


@pytest.mark.parametrize("reference", ["../names/base", "", ".", "..", "/etc/passwd", "AB" * 32])
def test_a_reference_never_leaves_the_store(store: ImageStore, reference: str) -> None:
    put(store)
    with pytest.raises(NotFound):
        store.resolve(reference)


def test_a_prefix_of_two_images_asks_for_more(store: ImageStore) -> None:
    put(store, "abcdef0" + "0" * 57)
    put(store, "abcdef1" + "0" * 57, "dev")
    with pytest.raises(NotFound, match="begins 2 images' digests"):
        store.resolve("abcdef")


def test_a_rebuilt_name_moves_and_the_old_image_stays(store: ImageStore) -> None:
    put(store)
    put(store, OTHER)
    assert store.resolve("base").digest == OTHER
    assert store.load(DIGEST).digest == DIGEST
    assert [image.digest for image in store.unnamed()] == [DIGEST]
    assert [image.digest for image in store.all()] == [OTHER, DIGEST]


def test_removing_frees_the_files_and_the_name(store: ImageStore) -> None:
    put(store)
    assert store.remove("base") > 0
    assert store.names() == {}
    assert list((store.root / "blobs").iterdir()) == []


def test_files_that_other_images_share_are_not_counted_as_freed(store: ImageStore) -> None:
    image = put(store)
    kept = store.root / "kept"
    kept.hardlink_to(image.directory / "root.raw")
    everything = store.sizes(image).total
    assert store.remove("base") < everything
    assert kept.read_bytes().startswith(b"root.raw")


@pytest.mark.parametrize("harm", ["missing", "short"])
def test_a_damaged_image_names_the_file(store: ImageStore, harm: str) -> None:
    path = put(store).directory / "root.raw"
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(b"short")
    with pytest.raises(CorruptData, match=r"root\.raw is missing or has a wrong size"):
        store.resolve("base")


def test_a_damaged_description_says_so(store: ImageStore) -> None:
    (put(store).directory / "image.json").write_bytes(b"{")
    with pytest.raises(CorruptData, match=r"image\.json is damaged"):
        store.resolve("base")


def test_goldens_are_found_by_their_directory(store: ImageStore) -> None:
    image = put(store)
    golden = put_golden(image)
    assert store.goldens(image) == (golden,)
    assert store.golden(image, golden.name) == golden
    (golden.directory / "ram.base").write_bytes(b"longer")
    with pytest.raises(CorruptData, match=r"ram\.base"):
        store.goldens(image)
    with pytest.raises(NotFound, match="is gone"):
        store.golden(image, "nowhere")


def test_the_sweep_removes_what_crashes_left_and_nothing_else(store: ImageStore) -> None:
    image = put(store)
    golden = put_golden(image)
    (store.root / "tmp" / "build-dead" / "tree").mkdir(parents=True)
    (store.root / "blobs" / OTHER).mkdir()  # a removal that was interrupted
    (image.directory / "golden" / ".tmp-golden-dead").mkdir()
    with store.scratch("build") as living:
        assert set(store.sweep()) == {"build-dead", OTHER, ".tmp-golden-dead"}
        assert living.is_dir()
    assert not living.exists()
    assert store.resolve("base") == image
    assert store.goldens(image) == (golden,)
    assert store.sweep() == ()


def test_a_removal_takes_effect_at_once_and_a_sweep_completes_one_that_was_cut_off(store: ImageStore) -> None:
    image = put(store)
    withdrawn = store.withdraw(image)
    assert store.all() == ()
    assert store.names() == {}
    assert store.sweep() == (), "who removes it is at it"
    os.close(withdrawn.lock)  # as its end does
    assert store.sweep() == (withdrawn.directory.name,)
    assert put(store) == image, "its place is free"


def test_what_was_built_anew_during_a_removal_stays_when_that_is_taken_back(store: ImageStore) -> None:
    withdrawn = store.withdraw(put(store))
    put(store, OTHER)  # has the name now
    store.put_back(withdrawn)
    assert store.resolve("base").digest == OTHER
    assert store.load(DIGEST).digest == DIGEST
    again = store.withdraw(store.load(DIGEST))
    put(store)
    store.put_back(again)
    assert store.resolve("base").digest == DIGEST
    assert set(store.sweep()) == {again.directory.name}, "the older one of the two"


def _hold(root: Path, entered: object, leave: object) -> None:
    async def hold() -> None:
        async with ImageStore(root).only_one("golden"):
            entered.set()  # type: ignore[attr-defined]
            leave.wait(30)  # type: ignore[attr-defined]

    asyncio.run(hold())


async def test_only_one_process_at_a_time(store: ImageStore) -> None:
    context = multiprocessing.get_context("spawn")
    entered, leave = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(store.root, entered, leave))
    process.start()
    try:
        assert await asyncio.to_thread(entered.wait, 60)
        told = asyncio.Event()
        waiting = asyncio.create_task(_enter(store, told.set))
        await asyncio.wait_for(told.wait(), 30)
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        leave.set()
        await asyncio.wait_for(waiting, 30)
    finally:
        leave.set()
        process.join(30)


async def test_a_cancelled_wait_gives_the_lock_back(store: ImageStore) -> None:
    async with store.only_one("golden"):
        waiting = asyncio.create_task(_enter(store))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await asyncio.wait_for(_enter(store), 30)


async def test_many_who_wait_do_not_keep_the_one_who_works_from_ending(store: ImageStore) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    async with store.only_one("golden"):
        told = [asyncio.Event() for _ in range(3)]
        waiting = [asyncio.create_task(_enter(store, one.set)) for one in told]
        for one in told:
            await asyncio.wait_for(one.wait(), 30)
        await asyncio.wait_for(asyncio.to_thread(store.sweep), 30)
    await asyncio.wait_for(asyncio.gather(*waiting), 30)


def _wait_for_it(root: Path, waits: Any) -> None:
    asyncio.run(_enter(ImageStore(root), waits.set))


async def test_who_waits_can_be_interrupted(store: ImageStore) -> None:
    context = multiprocessing.get_context("spawn")
    waits = context.Event()
    process = context.Process(target=_wait_for_it, args=(store.root, waits))
    async with store.only_one("golden"):
        process.start()
        assert await asyncio.to_thread(waits.wait, 60)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        await asyncio.to_thread(process.join, 60)
        assert process.exitcode is not None, "it does not wait for the lock at its end"


async def test_nobody_is_told_of_a_wait_that_is_none(store: ImageStore) -> None:
    told: list[bool] = []
    await _enter(store, lambda: told.append(True))
    await _enter(store, lambda: told.append(True))
    assert told == []


async def _enter(store: ImageStore, on_wait: Callable[[], None] = lambda: None) -> None:
    async with store.only_one("golden", on_wait):
        pass
