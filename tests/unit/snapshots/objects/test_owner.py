"""Whose store it is: an object that says so, however its own writing went."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from perdure.core.errors import Conflict, CorruptSnapshot, Unavailable
from perdure.snapshots.objects.collect import durable
from perdure.snapshots.objects.remote import OWNER
from perdure.wire.objects import Item
from tests.fakes.catalogue import FakeCatalogue
from tests.fakes.objects import FakeObjects, Fault
from tests.unit.snapshots.objects.stores import TENANT, Home, marked


async def test_the_first_takes_it_and_another_is_refused() -> None:
    home = Home(FakeObjects())
    await home.remote.claim("we")
    await home.remote.claim("we")
    with pytest.raises(Conflict, match="belongs to another installation"):
        await home.remote.claim("they")


async def test_a_claim_that_was_torn_is_made_again() -> None:
    objects = FakeObjects()
    home = Home(objects)
    objects.faults = lambda operation, name: Fault.SHORT if operation == "put" else None
    with pytest.raises(Unavailable, match="does not have it"):
        await home.remote.claim("we")
    assert objects.data[OWNER], "half of it is there"
    objects.faults = lambda operation, name: None
    await home.remote.claim("we")
    with pytest.raises(Conflict):
        await home.remote.claim("they")


async def test_a_damaged_sign_of_a_store_in_use_is_nobodys_to_replace() -> None:
    objects = FakeObjects()
    home = Home(objects)
    await home.remote.claim("we")
    await home.upload("snp_1", {1: 1})
    objects.data[OWNER] = b'{"own'
    with pytest.raises(CorruptSnapshot, match="is damaged"):
        await home.remote.claim("they")
    assert objects.data[OWNER] == b'{"own'


# --------------------------------------------------------------------------------------------------------- a store without a mark


async def test_a_store_that_holds_something_and_says_nothing_is_not_taken() -> None:
    objects = marked("we")
    left = Home(objects, owner="we")
    await left.upload("snp_1", {1: 1})
    del objects.data[OWNER]
    before = dict(objects.data)
    home = Home(objects, FakeCatalogue(), owner="they")
    for claim in (home.remote.claim("they"), home.collect(), home.remote.claim("they", known=await known_elsewhere())):
        with pytest.raises(Conflict, match=r"is not empty \(it holds '.*'\), has no perdure.json") as caught:
            await claim
    assert objects.data == before, "nothing was written or removed"
    way, _, content = caught.value.hint.rpartition("that says ")
    assert "PERDURE_STORE_URL" in way
    objects.data[OWNER] = content.encode()
    await home.remote.claim("they")  # what the hint says is a way on
    with pytest.raises(Conflict, match="another installation"):
        await left.remote.claim("we", known=await durable(left.catalogue, TENANT))


async def known_elsewhere() -> list[Item]:
    """What an installation has uploaded to another store, of the same names."""
    elsewhere = Home(owner="they")
    await elsewhere.upload("snp_1", {1: 2})
    return await durable(elsewhere.catalogue, TENANT)


async def test_our_own_store_is_recognized_when_it_has_lost_its_mark() -> None:
    home = Home()
    await home.upload("snp_1", {1: 1})
    del home.objects.data[OWNER]
    await home.remote.claim("here", known=await durable(home.catalogue, TENANT))
    assert OWNER in home.objects.data
    del home.objects.data[OWNER]
    await home.collect()
    assert OWNER in home.objects.data


async def test_who_looks_while_another_node_of_ours_begins_is_not_refused() -> None:
    """It has seen no mark; before it looks what lies there, the other has made one and uploaded."""
    home = Home(FakeObjects())
    other = Home(home.objects, home.catalogue)
    listed = home.objects.list

    async def later(prefix: str) -> AsyncIterator[tuple[str, int]]:
        home.objects.list = listed  # type: ignore[method-assign]
        await other.remote.claim("here")
        await other.upload("snp_1", {1: 1})
        async for one in listed(prefix):
            yield one

    home.objects.list = later  # type: ignore[method-assign]
    await home.remote.claim("here")
    assert await home.has("snp_1", {1: 1})


async def test_recovery_takes_a_store_without_a_mark() -> None:
    objects = marked()
    await Home(objects).upload("snp_1", {1: 1})
    del objects.data[OWNER]
    await Home(objects, FakeCatalogue()).remote.claim("new", take=True)
    await Home(objects, FakeCatalogue()).remote.claim("new")
