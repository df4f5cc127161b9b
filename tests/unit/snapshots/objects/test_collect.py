"""Garbage collection: single cases, and the simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from perdure.core.errors import NotFound, PerdureError, StaleGeneration, Unavailable
from perdure.snapshots.objects import upload as upload_module
from perdure.snapshots.objects.remote import manifest_name
from perdure.wire.objects import IMAGES, ItemKey, ItemState, Pack, PackId
from tests.fakes.catalogue import FakeCatalogue
from tests.fakes.objects import Fault
from tests.unit.snapshots.objects.simulation import objects_of, simulate
from tests.unit.snapshots.objects.stores import TENANT, Home

SEEDS = {number: number for number in range(20)}


async def test_what_was_released_is_gone_after_two_passes_and_not_after_one() -> None:
    home = Home()
    await home.upload("snp_1", SEEDS)
    await home.upload("snp_2", {50: 50})
    await home.catalogue.release(ItemKey(TENANT, "snp_1"))
    before = objects_of(home.objects)
    (first,) = await home.collect()
    assert objects_of(home.objects) == before, "one epoch is left to readers"
    assert (first.packs_deleted, first.strays_deleted) == (0, 0)
    (second,) = await home.collect()
    assert second.packs_deleted >= 3
    assert len(objects_of(home.objects)) == 2, "one pack and one manifest"
    assert await home.has("snp_2", {50: 50})


async def test_a_pack_that_is_still_used_stays_whole() -> None:
    home = Home()
    await home.upload("snp_1", SEEDS)
    await home.upload("snp_2", SEEDS)
    await home.catalogue.release(ItemKey(TENANT, "snp_1"))
    await home.collect(passes=4)
    assert await home.has("snp_2", SEEDS)


async def test_reuse_rescues_a_condemned_pack() -> None:
    home = Home()
    await home.upload("snp_1", SEEDS)
    await home.catalogue.release(ItemKey(TENANT, "snp_1"))
    await home.collect()
    _, moved = await home.upload("snp_2", SEEDS)
    assert moved.reused == 20
    await home.collect(passes=4)
    assert await home.has("snp_2", SEEDS)


async def test_a_pack_that_is_being_deleted_is_not_reused() -> None:
    home = Home()
    await home.upload("snp_1", SEEDS)
    await home.catalogue.release(ItemKey(TENANT, "snp_1"))
    await home.collect()
    home.objects.faults = lambda operation, name: Fault.LATE if operation == "delete" else None
    with pytest.raises(Unavailable):
        await home.collect()
    home.objects.faults = lambda operation, name: None
    _, moved = await home.upload("snp_2", SEEDS)
    assert moved.reused == 0
    home.objects.deliver(Random(0))
    await home.collect(passes=3)
    assert await home.has("snp_2", SEEDS)


async def test_a_pin_refused_in_the_middle_makes_the_chunks_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The uploader has read a pack's index; before it pins, the second pass goes by."""
    home = Home()
    await home.upload("snp_1", SEEDS)
    await home.catalogue.release(ItemKey(TENANT, "snp_1"))
    await home.collect()
    original, collected = home.catalogue.pin, list[Any]()

    async def pin(key: ItemKey, attempt: int, packs: Any) -> frozenset[PackId]:
        collected.extend(await home.collect())
        return await original(key, attempt, packs)

    monkeypatch.setattr(home.catalogue, "pin", pin)
    _, moved = await home.upload("snp_2", SEEDS)
    assert collected[0].packs_deleted >= 3
    assert moved.reused == 0
    assert await home.has("snp_2", SEEDS)


async def test_an_image_stays_as_long_as_a_snapshot_needs_it() -> None:
    home = Home()
    image = ItemKey(IMAGES, "base-1")
    await home.upload("base-1", SEEDS, IMAGES)
    await home.upload("snp_1", {1: 1}, needs=[image])
    await home.catalogue.release(image)
    await home.collect(IMAGES, passes=4)
    assert (await home.catalogue.item(image)).state is ItemState.RELEASED
    assert await home.downloader.verify(image) == []
    await home.catalogue.release(ItemKey(TENANT, "snp_1"))
    await home.collect(TENANT)
    await home.collect(IMAGES, passes=2)
    assert objects_of(home.objects) & set(home.objects.data) == {name for name in home.objects.data if name.startswith("ten_a/")}
    await home.collect(TENANT)
    assert objects_of(home.objects) == set()


async def test_an_abandoned_upload_is_let_go_and_can_be_made_again() -> None:
    home = Home()
    home.objects.faults = lambda operation, name: Fault.REFUSED if operation == "put" and len(home.objects.puts) == 2 else None
    with pytest.raises(Unavailable):
        await home.upload("snp_1", SEEDS)
    home.objects.faults = lambda operation, name: None
    stale = await home.catalogue.item(ItemKey(TENANT, "snp_1"))
    await home.collect()
    await home.collect()
    with pytest.raises(NotFound):
        await home.catalogue.item(stale.key)
    await home.collect(passes=2)
    assert objects_of(home.objects) == set()
    with pytest.raises(StaleGeneration):
        await home.catalogue.announce(stale.key, stale.attempt, Pack(PackId("pck_x"), TENANT, 1, 1))
    await home.upload("snp_1", SEEDS)
    with pytest.raises(StaleGeneration):
        await home.catalogue.commit(stale.key, stale.attempt, frozenset(), (1, "x"))
    assert await home.has("snp_1", SEEDS)


async def test_objects_that_nobody_knows_go_in_the_second_pass_and_foreign_ones_stay() -> None:
    home = Home()
    await home.upload("snp_1", SEEDS)
    strays = {
        f"{TENANT}/packs/pck_{'0' * 26}",
        manifest_name(ItemKey(TENANT, "snp_9"), 4),
        manifest_name(ItemKey(TENANT, "snp_1"), 77),
    }
    foreign = {f"{TENANT}/packs/README", "elsewhere/file"}
    home.objects.data |= dict.fromkeys(strays | foreign, b"?")
    await home.collect()
    assert strays <= home.objects.data.keys()
    (second,) = await home.collect()
    assert second.strays_deleted == 3
    assert not strays & home.objects.data.keys()
    assert foreign <= home.objects.data.keys()
    assert await home.has("snp_1", SEEDS)


# --------------------------------------------------------------------------------------------------------------------- rewrite


async def worn_home() -> Home:
    """One item of 20 chunks gone, of which another uses three from different packs."""
    home = Home(pack_bytes=2500)
    await home.upload("snp_1", SEEDS)
    await home.upload("snp_2", {number: number for number in (0, 9, 19)})
    await home.catalogue.release(ItemKey(TENANT, "snp_1"))
    await home.collect()
    return home


async def test_worn_packs_are_rewritten_and_what_is_alive_stays() -> None:
    home = await worn_home()
    alive = {number: number for number in (0, 9, 19)}
    before = await home.downloader.open(ItemKey(TENANT, "snp_2"))
    done = await home.collector.rewrite(TENANT)
    assert done.packs == 2, "of the third pack one half is alive"
    assert done.bytes_freed > 2000
    assert len(await home.catalogue.holds(ItemKey(TENANT, "snp_2"))) == 2, "two became one"
    await home.collect(passes=2)
    assert len(objects_of(home.objects)) == 3
    assert await Home(home.objects, home.catalogue).has("snp_2", alive)
    found: dict[int, bytes] = {}
    async for window in home.downloader.chunks(before, before.manifest.file("ram")):
        found |= dict(window)
    assert len(found) == 3, "a reader that had looked the packs up before finds them again"
    assert (await home.collector.rewrite(TENANT)).packs == 0


async def test_a_pack_with_a_new_user_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new user needs chunks that the rewrite thought dead."""
    home = await worn_home()
    third = {number: number for number in (1, 10, 18)}
    original = home.catalogue.replace

    async def replace(*args: Any) -> bool:
        await home.upload("snp_3", third)
        return await original(*args)

    monkeypatch.setattr(home.catalogue, "replace", replace)
    assert (await home.collector.rewrite(TENANT)).packs == 0
    await home.collect(passes=5)
    assert await home.has("snp_3", third)
    assert await home.has("snp_2", {number: number for number in (0, 9, 19)})


async def test_a_damaged_worn_pack_is_left_as_it_is() -> None:
    home = await worn_home()
    names = sorted(name for name in home.objects.data if "/packs/" in name)
    data = home.objects.data[names[0]]
    home.objects.data[names[0]] = data[:20] + bytes((data[20] ^ 1,)) + data[21:]
    done = await home.collector.rewrite(TENANT)
    assert done.packs == 1
    await home.collect(passes=3)
    assert names[0] in home.objects.data


# ------------------------------------------------------------------------------------------------------------------ simulation


@pytest.mark.parametrize("seed", range(12))
async def test_nothing_that_is_reachable_is_lost_and_nothing_else_stays(seed: int) -> None:
    await simulate(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1100))
async def test_the_same_of_many_seeds(seed: int) -> None:
    await simulate(seed, rounds=60)


async def test_the_simulation_kills_collects_and_rewrites(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would prove nothing if no process died, nothing were ever deleted and no pack replaced."""
    done: Counter[str] = Counter()
    drop, replace = FakeCatalogue.drop, FakeCatalogue.replace

    async def counted_drop(self: FakeCatalogue, packs: Any) -> None:
        done["dropped"] += len(packs)
        await drop(self, packs)

    async def counted_replace(self: FakeCatalogue, *args: Any) -> bool:
        replaced = await replace(self, *args)
        done["replaced" if replaced else "not replaced"] += 1
        return replaced

    monkeypatch.setattr(FakeCatalogue, "drop", counted_drop)
    monkeypatch.setattr(FakeCatalogue, "replace", counted_replace)
    worlds = [await simulate(seed) for seed in range(20, 28)]
    assert sum(world.kills for world in worlds) > 8
    assert any(len(world.wanted) > 2 for world in worlds)
    assert done["dropped"] > 15
    assert done["replaced"] >= 3


# The simulation is worth what it finds. Each of these is a defect that somebody could ship.


def believe_a_pin_without_a_row(patch: pytest.MonkeyPatch) -> None:
    async def pin(self: FakeCatalogue, key: ItemKey, attempt: int, packs: Any) -> frozenset[PackId]:
        return frozenset(packs)

    async def commit(self: FakeCatalogue, key: ItemKey, attempt: int, packs: frozenset[PackId], manifest: Any) -> Any:
        self.held |= {(key, pack_id) for pack_id in packs if pack_id in self.rows}
        return await original(self, key, attempt, frozenset(packs & self.rows.keys()), manifest)

    original = FakeCatalogue.commit
    patch.setattr(FakeCatalogue, "pin", pin)
    patch.setattr(FakeCatalogue, "commit", commit)


def collect_what_is_only_pinned(patch: pytest.MonkeyPatch) -> None:
    original = FakeCatalogue.condemn

    async def condemn(self: FakeCatalogue, scope: Any, epoch: int) -> Any:
        durable = {key for key, item in self.items_by_key.items() if item.checksum is not None}
        pinned = {(key, pack_id) for key, pack_id in self.held if key not in durable}
        self.held -= pinned
        doomed = await original(self, scope, epoch)
        self.held |= {(key, pack_id) for key, pack_id in pinned if key in self.items_by_key}
        return doomed

    patch.setattr(FakeCatalogue, "condemn", condemn)


def replace_packs_of_unseen_users(patch: pytest.MonkeyPatch) -> None:
    original = FakeCatalogue.replace

    async def replace(self: FakeCatalogue, key: ItemKey, attempt: int, old: PackId, new: Any, seen: Any) -> bool:
        return await original(self, key, attempt, old, new, seen | {other for other, pack_id in self.held if pack_id == old})

    patch.setattr(FakeCatalogue, "replace", replace)


def acknowledge_before_the_put(patch: pytest.MonkeyPatch) -> None:
    async def put(remote: Any, name: str, data: bytes) -> None:
        try:
            await remote.objects.put(name, data)
        except Unavailable:
            return

    patch.setattr(upload_module, "put", put)


def let_an_old_attempt_commit(patch: pytest.MonkeyPatch) -> None:
    original = FakeCatalogue._touch

    def touch(self: FakeCatalogue, key: ItemKey, attempt: int) -> Any:
        row = self.items_by_key.get(key)
        return original(self, key, attempt if row is None else row.attempt)

    patch.setattr(FakeCatalogue, "_touch", touch)


def forget_to_delete_late_objects(patch: pytest.MonkeyPatch) -> None:
    async def strays(self: FakeCatalogue, *args: Any) -> list[str]:
        return []

    patch.setattr(FakeCatalogue, "strays", strays)


def drop_rows_before_the_objects(patch: pytest.MonkeyPatch) -> None:
    """And count on the deletion to succeed."""
    original = FakeCatalogue.condemn

    async def condemn(self: FakeCatalogue, scope: Any, epoch: int) -> Any:
        doomed = await original(self, scope, epoch)
        await self.drop([pack.pack_id for pack in doomed])
        return doomed

    async def strays(self: FakeCatalogue, *args: Any) -> list[str]:
        return []

    patch.setattr(FakeCatalogue, "condemn", condemn)
    patch.setattr(FakeCatalogue, "strays", strays)


#: With the seed from which on it is looked for: the first ones would not find it, and take their time.
DEFECTS = {
    believe_a_pin_without_a_row: 34,
    collect_what_is_only_pinned: 0,
    replace_packs_of_unseen_users: 0,
    acknowledge_before_the_put: 9,
    let_an_old_attempt_commit: 0,
    forget_to_delete_late_objects: 0,
    drop_rows_before_the_objects: 0,
}


async def is_found(seed: int) -> bool:
    try:
        await simulate(seed)
    except (AssertionError, KeyError, PerdureError):
        return True
    return False


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
async def test_the_simulation_finds(defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    first = DEFECTS[defect]
    for seed in range(first, first + 60):
        if await is_found(seed):
            return
    pytest.fail(f"60 simulations with the defect {defect.__name__}, and none found it")
