"""Images of the API without a build."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from perdure.core.errors import BuildFailed, NotFound
from perdure.wire import public
from perdure.workspaces.model import Context
from tests.fakes.memory_guest import MOMENT

IMAGE = public.ImageInfo(
    name="base",
    digest="ab" * 32,
    created_at=MOMENT,
    memory_mib=512,
    vcpus=1,
    disk_gib=8,
    kernel_version="6.12.1",
    agent_protocol=1,
    packages=150,
    stored_bytes=600 << 20,
    ready=["512x1"],
)


RECIPES = (("base", 512, 8), ("node", 1024, 8))


class FakeImages:
    """One image, ``base``. A recipe that contains ``broken`` fails; one with ``endless`` builds until it is cancelled."""

    def __init__(self) -> None:
        self.images = {"base": IMAGE}
        self.asked: public.BuildImage | None = None
        self.cancelled = asyncio.Event()

    async def find(self, ctx: Context) -> list[public.ImageInfo]:
        return list(self.images.values())

    async def recipes(self, ctx: Context) -> list[public.RecipeInfo]:
        return [
            public.RecipeInfo(name=name, memory_mib=memory, vcpus=1, disk_gib=disk, built=name in self.images)
            for name, memory, disk in RECIPES
        ]

    async def get(self, ctx: Context, ref: str) -> public.ImageInfo:
        if ref not in self.images:
            raise NotFound(f"There is no image {ref!r}.", hint=f"Images: {', '.join(self.images)}.")
        return self.images[ref]

    async def remove(self, ctx: Context, ref: str) -> None:
        del self.images[(await self.get(ctx, ref)).name]

    async def prune(self, ctx: Context) -> public.PrunedImages:
        old = [image for image in self.images.values() if not image.current]
        self.images = {name: image for name, image in self.images.items() if image.current}
        return public.PrunedImages(removed=old, kept=[], freed_bytes=5_000_000 * len(old))

    async def build(self, ctx: Context, spec: public.BuildImage) -> AsyncIterator[public.BuildEvent]:
        self.asked = spec
        yield public.BuildEvent(type="step", step="packages", done=1, total=3)
        if spec.recipe and "broken" in spec.recipe:
            raise BuildFailed("The command 'make' failed with exit code 2.", hint="See its output above.")
        if spec.recipe and "endless" in spec.recipe:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        yield public.BuildEvent(type="log", detail="unpacked")
        yield public.BuildEvent(type="done", image=IMAGE)
