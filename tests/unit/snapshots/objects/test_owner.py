"""Whose store it is: an object that says so, however its own writing went."""

from __future__ import annotations

import pytest

from perdure.core.errors import Conflict, CorruptSnapshot, Unavailable
from perdure.snapshots.objects.remote import OWNER
from tests.fakes.objects import FakeObjects, Fault
from tests.unit.snapshots.objects.stores import Home


async def test_the_first_takes_it_and_another_is_refused() -> None:
    home = Home()
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
