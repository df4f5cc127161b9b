"""Upload and download on a fake store: what is reused, what a crash costs, what damage is told, what encryption hides."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from random import Random

import pytest

from perdure.core.errors import (
    Conflict,
    CorruptSnapshot,
    InvalidRequest,
    NotFound,
    PerdureError,
    Shredded,
    StaleGeneration,
    Unavailable,
)
from perdure.snapshots.objects.chunks import BLOCK, Kind, Source, bytes_source, file_source
from perdure.snapshots.objects.keys import TenantKeyring
from perdure.snapshots.objects.remote import manifest_name, pack_name
from perdure.snapshots.objects.upload import Contents
from perdure.wire.objects import IMAGES, ItemKey, ItemState
from tests.fakes.catalogue import FakeCatalogue
from tests.fakes.damage import last_byte_flipped
from tests.fakes.objects import FakeObjects, Fault, Killed, Turns
from tests.unit.snapshots.objects.stores import OTHER, TENANT, Home, block, source

SEEDS = {number: number for number in range(20)}


def packs_of(objects: FakeObjects, scope: str = TENANT) -> list[str]:
    return [name for name in objects.data if name.startswith(f"{scope}/packs/")]


async def test_what_was_uploaded_is_read_back_by_another_process() -> None:
    home = Home()
    item, moved = await home.upload("snp_1", SEEDS, facts={"generation": 4})
    assert item.state is ItemState.DURABLE
    assert (moved.chunks, moved.reused) == (20, 0)
    assert moved.packs == len(packs_of(home.objects)) >= 3, "several packs, far fewer than chunks"
    again = Home(home.objects, home.catalogue)
    assert await again.has("snp_1", SEEDS)
    opened = await again.downloader.open(item.key)
    assert opened.manifest.facts == {"generation": 4}
    assert await again.downloader.verify(item.key) == []


async def test_a_durable_item_is_not_uploaded_again() -> None:
    home = Home()
    await home.upload("snp_1", SEEDS)
    home.objects.puts.clear()
    assert (await home.upload("snp_1", SEEDS))[1].chunks == 0
    assert home.objects.puts == []


async def test_chunks_are_shared_within_a_tenant_and_never_across() -> None:
    home = Home()
    await home.upload("snp_1", SEEDS)
    _, same = await home.upload("snp_2", {**SEEDS, 3: 99})
    assert (same.reused, same.packs) == (19, 1)
    _, other = await home.upload("snp_3", SEEDS, OTHER)
    assert other.reused == 0
    _, image = await home.upload("base-1", SEEDS, IMAGES)
    assert image.reused == 0
    assert await home.has("snp_2", {**SEEDS, 3: 99})


async def test_one_content_in_many_places_is_sent_once() -> None:
    home = Home()
    _, moved = await home.upload("snp_1", dict.fromkeys(range(50), 7))
    assert (moved.chunks, moved.reused, moved.packs) == (50, 49, 1)
    assert await home.has("snp_1", dict.fromkeys(range(50), 7))


async def test_an_empty_item_is_durable() -> None:
    home = Home()
    await home.upload("snp_1", {})
    assert await home.read("snp_1") == {}
    assert packs_of(home.objects) == []


async def test_it_is_durable_by_the_row_and_by_nothing_before() -> None:
    """Killed at every step in turn: as long as the row does not say so, nobody can open it, and the next upload finishes it."""
    for fatal in itertools.count():
        home, turns = Home(), Turns(Random(fatal))
        dying = Home(turns.wrap(home.objects, "p"), turns.wrap(home.catalogue, "p"))

        def is_fatal(turns: Turns = turns, fatal: int = fatal) -> bool:
            return turns.steps > fatal

        result = (await turns.run({"p": dying.upload("snp_1", SEEDS)}, kill_if=is_fatal))["p"]
        rows = await home.catalogue.items(TENANT)
        if not isinstance(result, Killed):
            assert fatal > 30, "killed at many points"
            break
        if not rows or rows[0].state is not ItemState.DURABLE:
            with pytest.raises(NotFound):
                await home.downloader.open(ItemKey(TENANT, "snp_1"))
        sent = set(home.objects.data)
        home.objects.puts.clear()
        again = Home(home.objects, home.catalogue, clock=itertools.count(1000).__next__)
        await again.upload("snp_1", SEEDS)
        assert await again.has("snp_1", SEEDS)
        assert not sent & set(home.objects.puts), "what is there is not sent again"
        whole = sum(1 for name in sent if "/packs/" in name)
        assert len([name for name in home.objects.puts if "/packs/" in name]) <= max(0, 5 - whole) + 1


async def test_of_two_uploads_of_one_item_the_later_wins() -> None:
    home = Home()
    first = await home.catalogue.begin(ItemKey(TENANT, "snp_1"))
    await home.upload("snp_1", SEEDS)
    for call in (
        home.catalogue.pin(first.key, first.attempt, []),
        home.catalogue.commit(first.key, first.attempt, frozenset(), (1, "x")),
    ):
        with pytest.raises(StaleGeneration):
            await call
    assert await home.has("snp_1", SEEDS)


async def test_what_an_item_needs_must_be_durable() -> None:
    home = Home()
    image = ItemKey(IMAGES, "base-1")
    with pytest.raises(Conflict, match="base-1"):
        await home.upload("snp_1", SEEDS, needs=[image])
    await home.upload("base-1", SEEDS, IMAGES)
    item, _ = await home.upload("snp_1", SEEDS, needs=[image])
    assert (await home.downloader.open(item.key)).manifest.needs == (image,)


async def test_a_released_item_is_not_uploaded_again() -> None:
    home = Home()
    item, _ = await home.upload("snp_1", SEEDS)
    await home.catalogue.release(item.key)
    with pytest.raises(Conflict):
        await home.upload("snp_1", SEEDS)


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.LATE, Fault.SHORT])
async def test_a_failed_put_is_no_durability(fault: Fault) -> None:
    home = Home()
    home.objects.faults = lambda operation, name: fault if operation == "put" and len(home.objects.puts) == 1 else None
    with pytest.raises(Unavailable) as caught:
        await home.upload("snp_1", SEEDS)
    assert caught.value.ambiguous
    assert (await home.catalogue.item(ItemKey(TENANT, "snp_1"))).state is ItemState.UPLOADING
    home.objects.faults = lambda operation, name: None
    home.objects.deliver(Random(1))
    await home.upload("snp_1", SEEDS)
    assert await home.has("snp_1", SEEDS)


async def test_a_put_whose_answer_was_lost_is_looked_for() -> None:
    home = Home()
    home.objects.faults = lambda operation, name: Fault.LOST if operation == "put" else None
    await home.upload("snp_1", SEEDS)
    assert len(home.objects.puts) == len(set(home.objects.puts)), "nothing was sent twice"
    assert await home.has("snp_1", SEEDS)


@pytest.mark.parametrize("operation", ["read", "get", "size", "list", "put"])
async def test_a_store_that_answers_500_at_random_never_lies(operation: str) -> None:
    home, random = Home(), Random(5)
    home.objects.faults = lambda what, name: Fault.REFUSED if what == operation and random.random() < 0.4 else None
    for number in range(3):
        seeds = {at: at + number for at in range(10)}
        while True:
            try:
                await Home(home.objects, home.catalogue, clock=itertools.count(random.getrandbits(40)).__next__).upload(
                    f"snp_{number}", seeds
                )
                break
            except Unavailable:
                continue
    home.objects.faults = lambda what, name: None
    for number in range(3):
        assert await home.has(f"snp_{number}", {at: at + number for at in range(10)})


async def test_chunks_out_of_order_are_refused() -> None:
    wrong = Source("ram", Kind.REGIONS, 5 * BLOCK, iter([(2, b"a"), (1, b"b")]))
    with pytest.raises(InvalidRequest, match="ram"):
        await Home().uploader.upload(Contents(ItemKey(TENANT, "x"), [wrong]))


# ---------------------------------------------------------------------------------------------------------------------- damage


async def test_a_missing_pack_is_named_before_anything_is_read() -> None:
    home = Home()
    item, _ = await home.upload("snp_1", SEEDS)
    del home.objects.data[packs_of(home.objects)[1]]
    fresh = Home(home.objects, home.catalogue)
    with pytest.raises(CorruptSnapshot, match="ten_a/snp_1 is incomplete: parts of ram"):
        await fresh.downloader.open(item.key)
    damages = await fresh.downloader.verify(item.key)
    assert damages
    assert {damage.why for damage in damages} == {"it is missing"}
    assert len(damages) < len(SEEDS)


async def test_a_missing_manifest_and_one_that_was_exchanged_are_named() -> None:
    home = Home()
    item, _ = await home.upload("snp_1", SEEDS)
    await home.upload("snp_2", SEEDS)
    other = await home.catalogue.item(ItemKey(TENANT, "snp_2"))
    name = manifest_name(item.key, item.attempt)
    home.objects.data[name] = home.objects.data[manifest_name(other.key, other.attempt)]
    with pytest.raises(CorruptSnapshot, match="not the one that was committed"):
        await home.read("snp_1")
    del home.objects.data[name]
    with pytest.raises(CorruptSnapshot, match="manifest of ten_a/snp_1 is missing"):
        await home.read("snp_1")


async def test_every_flipped_byte_of_a_pack_is_told_or_harmless() -> None:
    home = Home(pack_bytes=1 << 20)
    seeds = {number: number for number in range(3)}
    await home.upload("snp_1", seeds)
    (name,) = packs_of(home.objects)
    whole, told = home.objects.data[name], 0
    for at in range(len(whole)):
        home.objects.data[name] = whole[:at] + bytes((whole[at] ^ 0x20,)) + whole[at + 1 :]
        fresh = Home(home.objects, home.catalogue)
        told += not await fresh.has("snp_1", seeds)  # has() compares whatever is not told
    assert told >= len(whole) - 20


async def test_damage_in_the_middle_names_chunk_and_pack() -> None:
    home = Home()
    item, _ = await home.upload("snp_1", SEEDS)
    name = packs_of(home.objects)[0]
    data = home.objects.data[name]
    home.objects.data[name] = data[:100] + bytes((data[100] ^ 1,)) + data[101:]
    (damage,) = await home.downloader.verify(item.key)
    assert damage.file == "ram"
    assert name.rpartition("/")[2] in damage.why
    with pytest.raises(CorruptSnapshot, match=name.rpartition("/")[2]):
        await home.read("snp_1")


async def test_a_bit_flipped_on_the_way_is_told() -> None:
    home = Home()
    await home.upload("snp_1", SEEDS)
    home.objects.faults = lambda operation, name: Fault.FLIPPED if operation == "read" else None
    assert not await Home(home.objects, home.catalogue).has("snp_1", SEEDS)


async def test_what_a_damaged_pack_held_is_sent_again() -> None:
    home = Home()
    await home.upload("snp_1", SEEDS)
    for name in packs_of(home.objects):
        home.objects.data[name] = last_byte_flipped(home.objects.data[name])
    again = Home(home.objects, home.catalogue, clock=itertools.count(1000).__next__)
    assert (await again.upload("snp_2", SEEDS))[1].reused == 0
    assert await again.has("snp_2", SEEDS)


# ----------------------------------------------------------------------------------------------------------------------- files


async def test_a_file_comes_back_with_its_holes(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with path.open("wb") as file:
        file.write(os.urandom(3 * BLOCK + 17))
        file.seek(4000 * BLOCK)
        file.write(b"late")
        file.truncate(5000 * BLOCK + 5)
    home = Home(pack_bytes=4 * BLOCK)
    key = ItemKey(TENANT, "snp_1")
    await home.uploader.upload(
        Contents(key, [file_source("disk", path), bytes_source("devices", b"d" * 100), bytes_source("none", b"")])
    )
    item = await home.downloader.open(key)
    await home.downloader.fetch_file(item, "disk", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()
    assert (tmp_path / "back").stat().st_blocks * 512 < 10 * BLOCK, "holes stay holes"
    await home.downloader.fetch_file(item, "devices", tmp_path / "devices")
    await home.downloader.fetch_file(item, "none", tmp_path / "none")
    assert ((tmp_path / "devices").read_bytes(), (tmp_path / "none").read_bytes()) == (b"d" * 100, b"")


async def test_a_file_that_cannot_be_fetched_leaves_nothing(tmp_path: Path) -> None:
    home = Home(pack_bytes=2 * BLOCK)
    key = ItemKey(TENANT, "snp_1")
    await home.uploader.upload(Contents(key, [bytes_source("disk", os.urandom(20 * BLOCK)), source("ram", {1: 1})]))
    item = await home.downloader.open(key)
    for name in packs_of(home.objects)[-3:]:
        del home.objects.data[name]
    with pytest.raises(CorruptSnapshot):
        await home.downloader.fetch_file(item, "disk", tmp_path / "back")
    with pytest.raises(CorruptSnapshot, match="is memory"):
        await home.downloader.fetch_file(item, "ram", tmp_path / "back")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------------ encryption


async def test_with_keys_nothing_of_the_content_is_in_the_store(tmp_path: Path) -> None:
    home = Home(keyring=TenantKeyring(tmp_path, b"m" * 32))
    key = ItemKey(TENANT, "snp_1")
    marker = b"the tenant's own words"
    await home.uploader.upload(Contents(key, [bytes_source("file", marker * 20)], facts={"workspace": "marker-name"}))
    assert b"marker-name" not in b"".join(home.objects.data.values())
    assert marker not in b"".join(home.objects.data.values())
    assert home.remote.keyring.of(TENANT).chunk_id(marker * 20) not in b"".join(home.objects.data.values())
    await home.downloader.open(key)
    assert await home.downloader.verify(key) == []


async def test_shredding_one_tenant_leaves_the_others(tmp_path: Path) -> None:
    ring = TenantKeyring(tmp_path, b"m" * 32)
    home = Home(keyring=ring)
    await home.upload("snp_1", SEEDS)
    await home.upload("snp_1", SEEDS, OTHER)
    ring.shred(TENANT)
    fresh = Home(home.objects, home.catalogue, keyring=TenantKeyring(tmp_path, b"m" * 32))
    for call in (fresh.read("snp_1"), fresh.upload("snp_2", SEEDS), fresh.downloader.survey(TENANT)):
        with pytest.raises(Shredded):
            await call
    assert await fresh.has("snp_1", SEEDS, OTHER)
    await fresh.catalogue.release(ItemKey(TENANT, "snp_1"))
    await fresh.collect(TENANT, passes=3)
    assert packs_of(home.objects) == [], "what cannot be read can still be removed"


async def test_packs_of_another_tenant_are_no_use(tmp_path: Path) -> None:
    home = Home(keyring=TenantKeyring(tmp_path, b"m" * 32))
    item, _ = await home.upload("snp_1", SEEDS)
    await home.upload("snp_1", SEEDS, OTHER)
    for mine, theirs in zip(packs_of(home.objects), packs_of(home.objects, OTHER), strict=True):
        home.objects.data[mine] = home.objects.data[theirs]
    fresh = Home(home.objects, home.catalogue, keyring=TenantKeyring(tmp_path, b"m" * 32))
    with pytest.raises(CorruptSnapshot):
        await fresh.downloader.open(item.key)


# ------------------------------------------------------------------------------------------------------ without any database


async def test_a_catalogue_can_be_made_from_the_store_alone() -> None:
    home = Home()
    await home.upload("snp_1", SEEDS, facts={"workspace": "ws_1", "generation": 2})
    await home.upload("snp_2", {**SEEDS, 1: 77}, facts={"workspace": "ws_1", "generation": 3})
    await home.upload("base-1", SEEDS, IMAGES)
    blind = Home(home.objects, FakeCatalogue())
    found = await blind.downloader.survey(TENANT)
    assert [item.manifest.key.name for item in found.items] == ["snp_1", "snp_2"]
    assert [item.manifest.facts["generation"] for item in found.items] == [2, 3]
    assert (found.incomplete, found.damaged) == ((), {})
    contents = {}
    async for window in blind.downloader.chunks(found.items[1], found.items[1].manifest.file("ram")):
        contents |= dict(window)
    assert contents[1] == block(77)


async def test_a_survey_names_what_is_broken() -> None:
    home = Home()
    item, _ = await home.upload("snp_1", SEEDS)
    name = packs_of(home.objects)[0]
    home.objects.data[name] = home.objects.data[name][:50]
    home.objects.data[manifest_name(item.key, 99)] = b"nonsense"
    home.objects.data[pack_name(TENANT, "pck_strange")] = b"none of ours"
    found = await Home(home.objects, FakeCatalogue()).downloader.survey(TENANT)
    assert found.items == ()
    assert [manifest.key.name for manifest in found.incomplete] == ["snp_1"]
    assert sorted(found.damaged) == sorted([name, manifest_name(item.key, 99)])


async def test_a_store_of_another_installation_is_left_alone() -> None:
    home = Home()
    await home.remote.claim("here")
    await home.upload("snp_1", SEEDS)
    stranger = Home(home.objects, FakeCatalogue(), owner="there")
    for _ in range(3):
        with pytest.raises(Conflict, match="another installation"):
            await stranger.collect()
    assert await home.has("snp_1", SEEDS)
    await stranger.remote.claim("there", take=True)
    with pytest.raises(Conflict):
        await home.remote.claim("here")
    home.objects.data["perdure.json"] = b"{"
    with pytest.raises(PerdureError, match=r"perdure\.json"):
        await home.remote.claim("here")
