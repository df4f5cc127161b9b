"""The image commands over the store: whose recipe is meant, and which old images may go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from perdure.core.errors import Conflict, NotFound, Unavailable
from perdure.images.model import Image
from perdure.images.progress import ProgressSink
from perdure.images.recipe import shipped_recipes
from perdure.images.registry import ImageStore
from perdure.images.service import ImageService
from perdure.wire import public
from tests.unit.images.test_registry import DIGEST, OTHER, put, store

__all__ = ["store"]
THIRD = "ad" * 32


def service(store: ImageStore, users: dict[str, list[str]] | None = None) -> ImageService:
    async def no_golden(_image: Image, _sink: ProgressSink) -> None:
        return None

    @asynccontextmanager
    async def users_of(digest: str) -> AsyncIterator[list[str]]:
        yield (users or {}).get(digest, [])

    return ImageService(store, no_golden, users_of)


def test_prune_removes_what_neither_a_name_nor_a_workspace_needs(store: ImageStore) -> None:
    for digest in (DIGEST, OTHER, THIRD):
        put(store, digest)  # each takes the name from the one before
    images = service(store, {OTHER: ["demo"]})
    assert [(one.digest, one.current) for one in asyncio.run(images.all())] == [(THIRD, True), (DIGEST, False), (OTHER, False)]
    pruned = asyncio.run(images.prune())
    assert [one.digest for one in pruned.removed] == [DIGEST]
    assert [one.digest for one in pruned.kept] == [OTHER]
    assert pruned.freed_bytes > 0
    assert [image.digest for image in store.all()] == [THIRD, OTHER]
    assert asyncio.run(images.prune()).removed == []


def test_shipped_recipes_are_told_with_their_sizes_and_whether_they_are_built(store: ImageStore) -> None:
    put(store, name="node")
    found = {recipe.name: recipe for recipe in asyncio.run(service(store).recipes())}
    assert tuple(found) == shipped_recipes()
    assert [name for name, recipe in found.items() if recipe.built] == ["node"]
    assert (found["base"].memory_mib, found["base"].vcpus, found["base"].disk_gib) == (512, 1, 8)
    assert asyncio.run(service(store).get("node")).min_memory_mib == 0


@pytest.mark.parametrize("name", ["nope", "/etc/passwd", "../base", "base.toml"])
def test_only_shipped_recipes_have_names(store: ImageStore, name: str) -> None:
    with pytest.raises(NotFound, match=rf"There is no recipe named .*; Perdure ships {', '.join(shipped_recipes())}\."):
        asyncio.run(service(store).build_to(public.BuildImage(shipped=name), lambda _progress: None))


async def test_an_image_in_use_stays_as_it_is(store: ImageStore) -> None:
    image = put(store)
    with pytest.raises(Conflict, match=r"used by demo\."):
        await service(store, {DIGEST: ["demo"]}).remove("base")
    assert store.resolve("base") == image


async def test_a_removal_that_cannot_say_that_it_was_alone_to_the_end_takes_itself_back(store: ImageStore) -> None:
    """The database went while it was at it: a create may have begun since."""
    image = put(store)
    seen = []

    @asynccontextmanager
    async def users_of(_digest: str) -> AsyncIterator[list[str]]:
        yield []
        seen.append(list(store.all()))
        raise Unavailable("The database does not answer.")

    with pytest.raises(Unavailable):
        await replace(service(store), users_of=users_of).remove("base")
    assert seen == [[]], "it was gone while it was asked"
    assert store.resolve("base") == image
    assert list((store.root / "tmp").iterdir()) == []
