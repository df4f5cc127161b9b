"""What the rows of the object store promise, of the fake and of PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from perdure.core.errors import Conflict, InvalidRequest, NotFound, StaleGeneration
from perdure.fleet.objects import StoreCatalogue
from perdure.wire.objects import IMAGES, Catalogue, Item, ItemKey, ItemState, Pack, PackId, PackState, Scope
from tests.fakes.catalogue import FakeCatalogue
from tests.fakes.database import fresh_database
from tests.unit.snapshots.objects.simulation import simulate

TENANT, OTHER = Scope("ten_a"), Scope("ten_b")
ONE, TWO, THREE = (ItemKey(TENANT, f"snp_{number}") for number in (1, 2, 3))
P1, P2, P3 = (PackId(f"pck_{number}") for number in (1, 2, 3))
SUM = "5" * 64


@dataclass
class Hourly:
    """Two servers of one installation, whose epochs last an hour."""

    servers: tuple[Catalogue, Catalogue]
    sleep: Callable[[float], None]  # seconds go by, for whoever keeps the time of both


@pytest.fixture(params=["fake", "postgresql"])
async def hourly(request: pytest.FixtureRequest) -> AsyncIterator[Hourly]:
    if request.param == "fake":
        fake = FakeCatalogue(epoch_s=3600)

        def sleep(seconds: float) -> None:
            fake.now_s += seconds

        yield Hourly((fake, fake), sleep)
        return
    async with fresh_database() as database:
        yield Hourly((StoreCatalogue(database, epoch_s=3600), StoreCatalogue(database, epoch_s=3600)), database.shift_clock)


@pytest.fixture(params=["fake", "postgresql"])
async def catalogue(request: pytest.FixtureRequest) -> AsyncIterator[Catalogue]:
    if request.param == "fake":
        yield FakeCatalogue()
        return
    async with fresh_database() as database:
        yield StoreCatalogue(database)


async def send(catalogue: Catalogue, item: Item, *packs: PackId) -> None:
    for pack_id in packs:
        await catalogue.announce(item.key, item.attempt, Pack(pack_id, item.key.scope, 1000, 100))
        await catalogue.stored(item.key, item.attempt, pack_id)


async def make(catalogue: Catalogue, key: ItemKey, *packs: PackId, needs: tuple[ItemKey, ...] = ()) -> Item:
    item = await catalogue.begin(key, needs)
    await send(catalogue, item, *packs)
    return await catalogue.commit(key, item.attempt, frozenset(packs), (77, SUM))


async def held(catalogue: Catalogue, key: ItemKey) -> dict[PackId, PackState]:
    return {pack.pack_id: pack.state for pack in await catalogue.holds(key)}


async def begin_epoch(catalogue: Catalogue, scope: Scope = TENANT) -> int:
    epoch = await catalogue.advance(scope)
    assert epoch is not None
    return epoch


async def pass_by(catalogue: Catalogue, scope: Scope = TENANT) -> list[PackId]:
    """One pass of a collector that deletes and drops."""
    doomed = await catalogue.condemn(scope, await begin_epoch(catalogue, scope))
    await catalogue.drop([pack.pack_id for pack in doomed])
    return [pack.pack_id for pack in doomed]


async def test_an_upload_from_begin_to_commit(catalogue: Catalogue) -> None:
    item = await catalogue.begin(ONE)
    assert (item.key, item.state, item.checksum) == (ONE, ItemState.UPLOADING, None)
    await catalogue.announce(ONE, item.attempt, Pack(P1, TENANT, 1000, 100))
    assert await held(catalogue, ONE) == {P1: PackState.PENDING}
    assert await catalogue.packs(TENANT) == []
    await catalogue.stored(ONE, item.attempt, P1)
    assert await catalogue.packs(TENANT) == [Pack(P1, TENANT, 1000, 100, PackState.STORED)] == await catalogue.holds(ONE)
    done = await catalogue.commit(ONE, item.attempt, frozenset((P1,)), (77, SUM))
    assert done == Item(ONE, ItemState.DURABLE, item.attempt, (), 77, SUM)
    assert await catalogue.item(ONE) == done == (await catalogue.items(TENANT))[0]
    assert await catalogue.begin(ONE) == done
    assert await catalogue.commit(ONE, item.attempt, frozenset((P1,)), (77, SUM)) == done, "an answer may be lost"


async def test_what_is_not_there(catalogue: Catalogue) -> None:
    with pytest.raises(NotFound, match="ten_a/snp_1"):
        await catalogue.item(ONE)
    assert (await catalogue.items(TENANT), await catalogue.packs(TENANT), await catalogue.holds(ONE)) == ([], [], [])
    await catalogue.release(ONE)
    await catalogue.drop([P1])
    with pytest.raises(StaleGeneration):
        await catalogue.pin(ONE, 1, [P1])
    with pytest.raises(InvalidRequest):
        await catalogue.packs(Scope("nobody"))


async def test_nothing_is_durable_before_all_packs_are(catalogue: Catalogue) -> None:
    item = await catalogue.begin(ONE)
    await send(catalogue, item, P1)
    await catalogue.announce(ONE, item.attempt, Pack(P2, TENANT, 1000, 100))
    for packs in (frozenset((P1, P2)), frozenset((P1, P3))):
        with pytest.raises(Conflict):
            await catalogue.commit(ONE, item.attempt, packs, (77, SUM))
    assert (await catalogue.item(ONE)).state is ItemState.UPLOADING
    await catalogue.commit(ONE, item.attempt, frozenset((P1,)), (77, SUM))
    assert await held(catalogue, ONE) == {P1: PackState.STORED}, "what was not used is let go"


async def test_an_older_attempt_changes_nothing(catalogue: Catalogue) -> None:
    old = await catalogue.begin(ONE)
    await send(catalogue, old, P1)
    new = await catalogue.begin(ONE)
    assert new.attempt > old.attempt
    assert await held(catalogue, ONE) == {P1: PackState.STORED}, "what the old one sent is kept"
    calls = [
        lambda: catalogue.pin(ONE, old.attempt, [P1]),
        lambda: catalogue.announce(ONE, old.attempt, Pack(P2, TENANT, 1000, 100)),
        lambda: catalogue.stored(ONE, old.attempt, P1),
        lambda: catalogue.commit(ONE, old.attempt, frozenset((P1,)), (77, SUM)),
        lambda: catalogue.replace(ONE, old.attempt, P1, None, frozenset()),
    ]
    for call in calls:
        with pytest.raises(StaleGeneration):
            await call()
    await catalogue.commit(ONE, new.attempt, frozenset((P1,)), (77, SUM))
    for call in calls[:3]:
        with pytest.raises(StaleGeneration):
            await call()


async def test_packs_are_announced_once_and_belong_to_a_scope(catalogue: Catalogue) -> None:
    item = await make(catalogue, ONE, P1)
    two, stranger = await catalogue.begin(TWO), await catalogue.begin(ItemKey(OTHER, "snp_9"))
    with pytest.raises(Conflict):
        await catalogue.announce(TWO, two.attempt, Pack(P1, TENANT, 1000, 100))
    with pytest.raises(Conflict):
        await catalogue.announce(TWO, two.attempt, Pack(P2, OTHER, 1000, 100))
    with pytest.raises(Conflict):
        await catalogue.stored(TWO, two.attempt, P1)
    assert await catalogue.pin(stranger.key, stranger.attempt, [P1]) == frozenset()
    assert await catalogue.pin(TWO, two.attempt, [P1, P3]) == {P1}
    await catalogue.announce(TWO, two.attempt, Pack(P2, TENANT, 1000, 100))
    assert await catalogue.pin(TWO, two.attempt, [P2]) == frozenset(), "nobody saw its object yet"
    assert item.attempt != two.attempt


async def test_two_passes(catalogue: Catalogue) -> None:
    await make(catalogue, ONE, P1, P2)
    two = await catalogue.begin(TWO)
    await catalogue.pin(TWO, two.attempt, [P2])
    await catalogue.release(ONE)
    epoch = await begin_epoch(catalogue)
    assert await catalogue.condemn(TENANT, epoch) == []
    with pytest.raises(NotFound):
        await catalogue.item(ONE)
    assert {pack.pack_id: pack.state for pack in await catalogue.packs(TENANT)} == {P1: PackState.CONDEMNED, P2: PackState.STORED}
    assert await catalogue.condemn(TENANT, epoch) == [], "the same epoch again is no later one"
    await catalogue.pin(TWO, two.attempt, [])
    epoch = await begin_epoch(catalogue)
    assert await catalogue.condemn(TENANT, epoch) == [Pack(P1, TENANT, 1000, 100, PackState.DELETING)]
    assert await catalogue.pin(TWO, two.attempt, [P1]) == frozenset()
    assert [pack.pack_id for pack in await catalogue.condemn(TENANT, epoch)] == [P1], "until it is dropped"
    await catalogue.drop([P1, P2])
    assert [pack.pack_id for pack in await catalogue.packs(TENANT)] == [P2]
    assert await catalogue.condemn(TENANT, epoch) == []


async def test_a_pin_rescues(catalogue: Catalogue) -> None:
    await make(catalogue, ONE, P1)
    await catalogue.release(ONE)
    await pass_by(catalogue)
    two = await catalogue.begin(TWO)
    assert await catalogue.pin(TWO, two.attempt, [P1]) == {P1}
    assert await pass_by(catalogue) == []
    await catalogue.commit(TWO, two.attempt, frozenset((P1,)), (77, SUM))
    assert [await pass_by(catalogue) for _ in range(4)] == [[]] * 4
    await catalogue.release(TWO)
    assert [await pass_by(catalogue) for _ in range(3)] == [[], [P1], []], "and then it begins anew"


async def test_an_upload_that_is_silent_for_an_epoch_is_given_up(catalogue: Catalogue) -> None:
    one, two = await catalogue.begin(ONE), await catalogue.begin(TWO)
    await send(catalogue, one, P1)
    await catalogue.announce(ONE, one.attempt, Pack(P2, TENANT, 1000, 100))
    await pass_by(catalogue)
    assert await held(catalogue, ONE) == {P1: PackState.STORED, P2: PackState.PENDING}
    await catalogue.pin(TWO, two.attempt, [])
    await pass_by(catalogue)
    with pytest.raises(NotFound):
        await catalogue.item(ONE)
    assert (await catalogue.item(TWO)).attempt == two.attempt
    with pytest.raises(StaleGeneration):
        await catalogue.stored(ONE, one.attempt, P2)
    assert await pass_by(catalogue) == [P1, P2]
    again = await catalogue.begin(ONE)
    assert again.attempt > one.attempt


async def test_what_is_needed_outlives_its_release(catalogue: Catalogue) -> None:
    image, layer = ItemKey(IMAGES, "base"), ItemKey(IMAGES, "below")
    with pytest.raises(Conflict, match="images/base"):
        await catalogue.begin(ONE, [image])
    await make(catalogue, layer, P1)
    await make(catalogue, image, P2, needs=(layer,))
    assert (await make(catalogue, ONE, P3, needs=(image,))).needs == (image,)
    assert (await catalogue.item(ONE)).needs == (image,)
    for key in (image, layer):
        await catalogue.release(key)
    with pytest.raises(Conflict):
        await catalogue.begin(TWO, [image])
    with pytest.raises(Conflict, match="released"):
        await catalogue.begin(image)
    for _ in range(3):
        assert await pass_by(catalogue, IMAGES) == []
    assert (await catalogue.item(image)).checksum == SUM
    await catalogue.release(ONE)
    await pass_by(catalogue)
    assert [await pass_by(catalogue, IMAGES) for _ in range(2)] == [[], [P1, P2]], "both go at once"


async def test_strays_are_told_in_a_later_epoch(catalogue: Catalogue) -> None:
    item = await make(catalogue, ONE, P1)
    listed = [P1, P2], [("snp_1", item.attempt), ("snp_1", 3), ("snp_7", 4)]
    epoch = await begin_epoch(catalogue)
    assert await catalogue.strays(TENANT, epoch, *listed) == []
    assert await catalogue.strays(TENANT, epoch, *listed) == []
    epoch = await begin_epoch(catalogue)
    assert await catalogue.strays(TENANT, epoch, *listed) == [P2, "snp_1.3", "snp_7.4"]
    assert await catalogue.strays(TENANT, epoch, [P1], [("snp_7", 4)]) == ["snp_7.4"]
    assert await catalogue.strays(TENANT, epoch, *listed) == ["snp_7.4"], "what was away for a while is new"


async def test_replacing_a_pack(catalogue: Catalogue) -> None:
    await make(catalogue, ONE, P1)
    two = await catalogue.begin(TWO)
    await catalogue.pin(TWO, two.attempt, [P1])
    await catalogue.commit(TWO, two.attempt, frozenset((P1,)), (77, SUM))
    job = await catalogue.begin(THREE)
    with pytest.raises(Conflict):
        await catalogue.replace(THREE, job.attempt, P1, P2, frozenset((ONE, TWO)))
    await send(catalogue, job, P2)
    assert not await catalogue.replace(THREE, job.attempt, P1, P2, frozenset((ONE,))), "another user"
    assert not await catalogue.replace(THREE, job.attempt, P3, P2, frozenset((ONE, TWO))), "no user"
    assert await catalogue.replace(THREE, job.attempt, P1, P2, frozenset((ONE, TWO, THREE)))
    assert await held(catalogue, ONE) == await held(catalogue, TWO) == {P2: PackState.STORED}
    await catalogue.release(THREE)
    assert [await pass_by(catalogue) for _ in range(3)] == [[], [P1], []]
    again = await catalogue.begin(ItemKey(TENANT, "snp_4"))
    assert await catalogue.replace(again.key, again.attempt, P2, None, frozenset((ONE, TWO)))
    assert await held(catalogue, ONE) == {}


async def test_a_pack_that_an_upload_has_pinned_is_not_replaced(catalogue: Catalogue) -> None:
    await make(catalogue, ONE, P1)
    two, job = await catalogue.begin(TWO), await catalogue.begin(THREE)
    await catalogue.pin(TWO, two.attempt, [P1])
    await send(catalogue, job, P2)
    assert not await catalogue.replace(THREE, job.attempt, P1, P2, frozenset((ONE, TWO)))
    assert await held(catalogue, TWO) == {P1: PackState.STORED}


async def test_pins_and_passes_at_the_same_time(catalogue: Catalogue) -> None:
    """Whatever the order: a pin that was granted holds."""
    for number in range(12):
        key, pack_id = ItemKey(TENANT, f"old-{number}"), PackId(f"pck_old{number}")
        await make(catalogue, key, pack_id)
        await catalogue.release(key)
        await pass_by(catalogue)
        new = await catalogue.begin(ItemKey(TENANT, f"new-{number}"))
        epoch = await begin_epoch(catalogue)
        granted, doomed = await asyncio.gather(catalogue.pin(new.key, new.attempt, [pack_id]), catalogue.condemn(TENANT, epoch))
        assert (pack_id in granted) != (pack_id in [pack.pack_id for pack in doomed])
        await catalogue.drop([pack.pack_id for pack in doomed])
        await catalogue.release(new.key)


async def test_many_begin_at_once_and_one_remains(catalogue: Catalogue) -> None:
    items = await asyncio.gather(*(catalogue.begin(ONE) for _ in range(8)))
    assert len({item.attempt for item in items}) == 8
    results = await asyncio.gather(
        *(catalogue.commit(ONE, item.attempt, frozenset(), (77, SUM)) for item in items), return_exceptions=True
    )
    done = [result for result in results if isinstance(result, Item)]
    assert len(done) == 1
    assert done[0].attempt == max(item.attempt for item in items)


@pytest.mark.parametrize("seed", [3, 4])
async def test_a_simulation_with_crashes_holds(catalogue: Catalogue, seed: int) -> None:
    await simulate(seed, rounds=12, catalogue=catalogue)


async def test_an_epoch_lasts_its_time_whoever_collects(hourly: Hourly) -> None:
    one, two = hourly.servers
    assert await one.advance(TENANT) == 1
    assert await two.advance(TENANT) is None
    assert await two.advance(OTHER) == 1, "each scope has its own"
    hourly.sleep(3599)
    assert (await one.advance(TENANT), await two.advance(TENANT)) == (None, None)
    hourly.sleep(1)
    assert sorted([await two.advance(TENANT) or 0, await one.advance(TENANT) or 0]) == [0, 2], "one of the two"


async def test_what_is_condemned_late_in_an_epoch_has_all_of_one(hourly: Hourly) -> None:
    """A listing took half an hour; the other server comes after the other half."""
    one, two = hourly.servers
    await make(one, ONE, P1)
    await one.release(ONE)
    epoch = await begin_epoch(one)
    hourly.sleep(1800)
    assert await one.condemn(TENANT, epoch) == []
    assert await one.strays(TENANT, epoch, [P3], []) == []
    hourly.sleep(1800)
    assert await two.advance(TENANT) is None
    hourly.sleep(1800)
    epoch = await begin_epoch(two)
    assert [pack.pack_id for pack in await two.condemn(TENANT, epoch)] == [P1]
    assert await two.strays(TENANT, epoch, [P3], []) == [P3]


async def test_who_comes_when_his_epoch_is_over_condemns_nothing(hourly: Hourly) -> None:
    """It stood still for longer than an epoch; the other server has gone on without it."""
    one, two = hourly.servers
    await make(one, ONE, P1)
    old = await begin_epoch(one)
    hourly.sleep(3600)
    new = await begin_epoch(two)
    assert await two.condemn(TENANT, new) == []
    await two.release(ONE)
    assert await one.condemn(TENANT, old) == []
    assert await one.strays(TENANT, old, [P3], []) == []
    assert (await one.item(ONE)).state is ItemState.RELEASED
    assert [pack.state for pack in await one.packs(TENANT)] == [PackState.STORED]
    hourly.sleep(3600)
    epoch = await begin_epoch(one)
    assert await one.condemn(TENANT, epoch) == [], "its first pass"
    assert await one.strays(TENANT, epoch, [P3], []) == []


async def test_many_servers_that_ask_at_once_begin_one_epoch(hourly: Hourly) -> None:
    for epoch in (1, 2, 3):
        asked = await asyncio.gather(*(hourly.servers[number % 2].advance(TENANT) for number in range(8)))
        assert [found for found in asked if found is not None] == [epoch]
        hourly.sleep(3600)
