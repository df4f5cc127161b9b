"""Machines that wait are dropped when image, VMM or agent disk changes: the real node, images and goldens, over fake machines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

from perdure.core.clock import SystemClock
from perdure.core.config import Settings
from perdure.core.errors import Busy
from perdure.core.ids import NodeId, RequestId
from perdure.images.golden import GoldenSpec, find_golden, golden_parts
from perdure.images.model import Golden, Image
from perdure.images.registry import ImageStore, golden_to_json, image_to_json, load_golden
from perdure.images.sparse import file_facts
from perdure.machines.driver import Accelerator, LaunchSpec, MachineState
from perdure.machines.fingerprint import fingerprint
from perdure.node.pool import WarmPool
from perdure.node.supervisor import NodeParts, NodeSupervisor
from perdure.wire import public
from perdure.wire.guest import PROTOCOL
from perdure.wire.node import MachineSize
from perdure.wiring import _ApiImages
from perdure.workspaces.model import Context
from tests.fakes.machine import FakeDriver, FakeMachine
from tests.unit.images.test_registry import DIGEST, OTHER, put

SIZE = MachineSize(1, 1)
CTX = Context("test", RequestId("req_1"))


async def golden_of(spec: GoldenSpec) -> Golden:
    """What ``ensure_golden`` finds or makes, without a boot."""
    if (found := await find_golden(spec)) is not None:
        return found
    mark = fingerprint(await golden_parts(spec))
    directory = spec.image.directory / "golden" / f"{spec.size.memory_mib}m{spec.size.vcpus}c-{mark[:16]}"
    directory.mkdir()
    for name in ("ram.base", "devices.state", "disk.qcow2"):
        (directory / name).write_bytes(bytes(spec.size.memory_mib << 20 if name == "ram.base" else 1))
    now = datetime(2026, 1, 1, tzinfo=UTC)
    golden = Golden(spec.image.digest, spec.size, directory, mark, mark, 1.0, now, 1, 1)
    (directory / "golden.json").write_bytes(golden_to_json(golden, {path.name: file_facts(path) for path in directory.iterdir()}))
    return load_golden(directory)


def put_image(store: ImageStore, digest: str) -> Image:
    """With the agent that is spoken here, under the name ``base``."""
    image = replace(put(store, digest), agent_protocol=PROTOCOL)
    described = image.directory / "image.json"
    described.unlink()
    facts = {path.name: file_facts(path) for path in image.directory.iterdir() if path.is_file()}
    described.write_bytes(image_to_json(image, facts))
    return image


class Place:
    """A node, its driver and its images."""

    def __init__(self, home: Path) -> None:
        settings = Settings(home=home / "home", image_dir=home / "images", pool_size=2)
        self.driver, self.images, nothing = FakeDriver(), ImageStore(home / "images"), cast("Any", None)
        put_image(self.images, DIGEST)
        parts = NodeParts(NodeId("n"), settings, SystemClock(), self.driver, Accelerator.TCG, self.images, nothing, nothing)
        self.node = NodeSupervisor(parts)

    @property
    def pool(self) -> WarmPool[tuple[str, str]]:
        return self.node._pool

    async def key(self, digest: str = DIGEST) -> tuple[str, str]:
        return (await self.node._goldens.origin(digest, SIZE)).key

    async def warm(self, digest: str = DIGEST) -> list[FakeMachine]:
        """Those that wait from here on, and were not there before."""
        before = len(self.driver.machines)
        await self.node.warm(digest, SIZE)
        await self.pool.filled(await self.key(digest))
        return self.driver.machines[before:]

    def alive(self) -> list[FakeMachine]:
        return [machine for machine in self.driver.machines if machine.state is not MachineState.DEAD]


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr("perdure.node.goldens.ensure_golden", golden_of)
    made = Place(tmp_path)
    yield made
    await made.pool.close()
    assert made.alive() == []


async def test_nothing_that_waits_is_dropped_while_all_is_as_it_was(place: Place) -> None:
    waiting = await place.warm()
    assert len(waiting) == 2 and await place.warm() == []
    machine, pooled = await place.pool.claim(await place.key())
    assert pooled and machine in waiting
    await machine.kill()


async def test_another_vmm_gets_machines_of_its_own_and_those_of_the_old_one_are_gone(place: Place) -> None:
    old_key, old = await place.key(), await place.warm()
    place.driver.upgrade("fake 2")
    new = await place.warm()
    assert [machine.state for machine in old] == [MachineState.DEAD] * 2
    assert place.alive() == new and len(new) == 2
    assert place.pool.count(old_key) == 0 and place.pool.count(await place.key()) == 2
    place.driver.upgrade("fake 1")  # and back again: nothing of what waited then is left to be found
    back, pooled = await place.pool.claim(await place.key())
    assert await place.key() == old_key and not pooled and back not in (*old, *new)
    await back.kill()


async def test_a_golden_that_was_made_again_gets_machines_of_its_own(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    old = await place.warm()
    golden = old[0].spec.ram.path.parent
    for path in golden.iterdir():
        path.unlink()
    golden.rmdir()

    async def another(spec: GoldenSpec) -> Golden:
        made = await golden_of(spec)
        return replace(made, base_id="another" * 4)

    monkeypatch.setattr("perdure.node.goldens.ensure_golden", another)
    new = await place.warm()
    assert len(new) == 2 and place.alive() == new


async def test_a_vmm_that_is_replaced_while_a_machine_starts_leaves_no_machine_under_the_old_key(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, prepare = await place.key(), place.driver.prepare

    async def replaced(spec: LaunchSpec) -> FakeMachine:
        place.driver.upgrade("fake 2")
        return await prepare(spec)

    monkeypatch.setattr(place.driver, "prepare", replaced)
    with pytest.raises(Busy, match="was replaced"):
        await place.pool.claim(key)
    place.pool.refill(key)
    await place.pool.filled(key)
    assert (place.pool.count(), place.alive()) == (0, [])


async def test_a_start_that_is_broken_off_while_it_drops_them_leaves_none_for_long(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_key, old = await place.key(), await place.warm()
    place.driver.upgrade("fake 2")
    ending, may_end = asyncio.Event(), asyncio.Event()
    kill = old[0].kill

    async def slowly() -> None:
        ending.set()
        await may_end.wait()
        await kill()

    monkeypatch.setattr(old[0], "kill", slowly)
    starting = asyncio.create_task(place.node.warm(DIGEST, SIZE))
    async with asyncio.timeout(10):
        await ending.wait()
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled() and place.pool.count(old_key) == 0
    may_end.set()
    new = await place.warm()
    assert place.alive() == new and len(new) == 2


class Builds:
    """Images of a server, of which the next build gives ``base`` to another one, as a new agent disk does."""

    def __init__(self, store: ImageStore) -> None:
        self.store = store

    async def build(self, _spec: public.BuildImage) -> AsyncIterator[public.BuildEvent]:
        yield public.BuildEvent(type="step", step="agent", done=0, total=1)
        put_image(self.store, OTHER)

    async def find_one(self, ref: str) -> Image:
        return self.store.resolve(ref)

    async def remove(self, _ref: str) -> None:
        return None

    async def prune(self) -> public.PrunedImages:
        return public.PrunedImages.model_construct(removed=[public.ImageInfo.model_construct(digest=DIGEST)])


@pytest.mark.parametrize("change", ["build", "remove", "prune"])
async def test_no_machine_waits_for_an_image_that_lost_its_name_or_is_gone(
    place: Place, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.wiring._warm", _nobody)
    images = _ApiImages(cast("Any", Builds(place.images)), place.node)
    old = await place.warm()
    if change == "build":
        async for _ in images.build(CTX, public.BuildImage()):
            assert place.alive() == old, "it has its name still"
    elif change == "remove":
        await images.remove(CTX, "base")
    else:
        await images.prune(CTX)
    assert place.alive() == [] and place.pool.count() == 0
    if change == "build":
        assert place.images.resolve("base").digest == OTHER
        new = await place.warm(OTHER)
        assert place.alive() == new and len(new) == 2
        assert {machine.spec.shape.agent_disk for machine in new} == {place.images.resolve(OTHER).directory / "agent.raw"}


async def _nobody(*_: object) -> None:
    return None
