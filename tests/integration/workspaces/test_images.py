"""An image that is being removed, and a workspace that is being made of it: the one waits for the other. One that is damaged."""

from __future__ import annotations

import asyncio

import pytest

from perdure.core.errors import CorruptSnapshot, NotFound
from perdure.wire.node import MemoryFate
from perdure.workspaces.model import CreateWorkspace
from tests.fakes.control_plane import CTX, ControlPlane
from tests.fakes.node import FakeImages
from tests.integration.workspaces.test_second_home import NEVER, Homes, homes

__all__ = ["homes"]  # a fixture

DIGEST = "ab" * 32


async def time_enough(plane: ControlPlane) -> None:
    """For who does not wait."""
    for _ in range(30):
        await plane.database.one("clock.now")


async def test_what_begins_during_a_removal_waits_for_its_end(plane: ControlPlane) -> None:
    assert "start" not in plane.node.calls
    plane.node.fail("start", NotFound(f"There is no image {DIGEST[:12]} on this node."))
    async with plane.service._store.needing_image(DIGEST) as users:
        assert users == []
        made = asyncio.create_task(plane.create())
        await time_enough(plane)
        assert not made.done()
        assert "start" not in plane.node.calls
    with pytest.raises(NotFound, match="There is no image"):
        await made
    await plane.create()  # its name is free again


async def test_a_removal_waits_for_what_has_begun(plane: ControlPlane) -> None:
    store = plane.service._store
    new = plane.service._new_workspace(CTX, CreateWorkspace("demo"), FakeImages().images[0])

    async def ask() -> list[str]:
        async with store.needing_image(DIGEST) as users:
            return users

    async with plane.database.transaction() as tx:
        await store.insert(new, {}, tx)
        asked = asyncio.create_task(ask())
        await time_enough(plane)
        assert not asked.done()
        async with store.needing_image("cd" * 32) as others:
            assert others == [], "that of another image does not wait"
    assert await asked == ["demo"]


async def test_a_damaged_image_is_mended_from_the_store(homes: Homes) -> None:
    await homes.plane.create(**NEVER)
    head = await homes.slept()
    await homes.uploaded()
    stored = homes.node.stored[head]
    file = "images/blobs/base/root.raw"
    homes.bucket.images.add(file)
    homes.node.fail("start", CorruptSnapshot(f"The file {file} is damaged: its checksum does not hold.", file=file))
    _, report = await homes.service.wake(CTX, "demo")
    assert report.memory is MemoryFate.KEPT
    assert homes.node.stored[head] is stored, "no more than that file was fetched"
    assert homes.home.calls.count("mend_image") == 1
