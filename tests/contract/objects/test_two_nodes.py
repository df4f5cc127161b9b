"""Two nodes of one installation that send the same image at the same time, into every kind of store, over real rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.fleet.objects import StoreCatalogue
from perdure.snapshots.objects.client import Objects
from perdure.snapshots.objects.local import image_key
from perdure.snapshots.objects.remote import manifest_name
from perdure.wire.objects import IMAGES, Catalogue, Item, ItemKey, ItemState, Scope
from tests.contract.objects.test_objects import names, objects
from tests.fakes.catalogue import FakeCatalogue
from tests.fakes.database import fresh_database
from tests.unit.node.test_secondhome import REF, TENANT, Place

__all__ = ["objects"]  # the same stores

KEY = image_key(REF)


@pytest.fixture(params=["fake", "postgresql"])
async def catalogue(request: pytest.FixtureRequest) -> AsyncIterator[Catalogue]:
    if request.param == "fake":
        yield FakeCatalogue()
        return
    async with fresh_database() as database:
        yield StoreCatalogue(database)


@pytest.fixture
def nodes(tmp_path: Path, objects: Objects, catalogue: Catalogue) -> list[Place]:
    places = [Place(tmp_path / name, objects, catalogue) for name in ("one", "two")]
    for place in places:
        place.images.add(REF)
    return places


async def test_both_succeed_and_it_is_sent_once(nodes: list[Place], objects: Objects, catalogue: Catalogue) -> None:
    slept = [await place.slept() for place in nodes]
    snapshots = [snapshot_id for snapshot_id, _ in slept]
    await asyncio.gather(*(place.upload(snapshot_id) for place, snapshot_id in zip(nodes, snapshots, strict=True)))
    assert [ref for place in nodes for ref in place.images_sent] == [REF], "the other has waited"
    image = await catalogue.item(KEY)
    assert set(await names(objects, f"{IMAGES}/items/")) == {manifest_name(KEY, image.attempt)}
    for (snapshot_id, machine), source, other in zip(slept, nodes, reversed(nodes), strict=True):
        item: Item = await catalogue.item(ItemKey(Scope(TENANT), snapshot_id))
        assert (item.state, item.needs) == (ItemState.DURABLE, (KEY,))
        assert not other.home.has(snapshot_id)
        await other.home.fetch(snapshot_id, TENANT)
        await other.is_whole(snapshot_id, machine)
        await source.is_whole(snapshot_id, machine)


async def test_who_waits_sends_it_when_the_other_node_has_died(nodes: list[Place], catalogue: Catalogue) -> None:
    (first, _), (second, _) = [await place.slept() for place in nodes]
    one, two = nodes
    dies = asyncio.create_task(one.upload(first))
    await one.image_begun.wait()
    waits = asyncio.create_task(two.upload(second))
    dies.cancel()
    await asyncio.wait([dies])
    await waits
    assert two.images_sent == [REF] and dies.cancelled()
    assert (await catalogue.item(KEY)).state is ItemState.DURABLE
