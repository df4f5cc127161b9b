"""The image commands of the API and the CLI over the store and the build."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace

from perdure.core.errors import Conflict, NotFound, PerdureError
from perdure.images.build import BuildOptions, build_image
from perdure.images.golden import GoldenSpec, ensure_golden
from perdure.images.model import Image
from perdure.images.progress import Progress, ProgressSink
from perdure.images.recipe import Recipe, load_recipe, parse_recipe, shipped_recipes
from perdure.images.registry import ImageStore, Withdrawn
from perdure.wire import public

#: Makes the spec of a golden for an image at its default size on this host; None where no golden can be made here.
GoldenFor = Callable[[Image, ProgressSink], Awaitable[GoldenSpec | None]]
#: Names of workspaces that need an image, and of snapshots that have outlived theirs. Until it ends nobody begins to need it.
UsersOf = Callable[[str], AbstractAsyncContextManager[list[str]]]


@dataclass(frozen=True, slots=True)
class ImageService:
    """Implements the API's ``Images`` and the workspaces' ``ImageCatalog``."""

    store: ImageStore
    golden_for: GoldenFor
    users_of: UsersOf

    async def find_one(self, ref: str) -> Image:
        return await asyncio.to_thread(self.store.resolve, ref)

    async def all(self) -> list[public.ImageInfo]:
        images = await asyncio.to_thread(self.store.all)
        return [await asyncio.to_thread(self._info, image) for image in images]

    async def recipes(self) -> list[public.RecipeInfo]:
        """The recipes that come with Perdure, and whether each is built."""
        return await asyncio.to_thread(self._recipes)

    def _recipes(self) -> list[public.RecipeInfo]:
        built = self.store.names()
        return [_recipe_info(load_recipe(name), is_built=name in built) for name in shipped_recipes()]

    async def get(self, ref: str) -> public.ImageInfo:
        return await asyncio.to_thread(self._info, await self.find_one(ref))

    async def remove(self, ref: str) -> None:
        """Raises Conflict naming the workspaces that still need it."""
        image = await self.find_one(ref)
        users, _ = await self._remove(image)
        if users:
            shown = ", ".join(users[:5]) + (f" and {len(users) - 5} more" if len(users) > 5 else "")
            raise Conflict(f"The image {image.name} is used by {shown}.", hint="Remove those workspaces first (perdure rm).")

    async def prune(self) -> public.PrunedImages:
        """Remove every image, with its goldens, that no name points to and neither a workspace nor a snapshot needs."""
        removed, kept, freed = list[public.ImageInfo](), list[public.ImageInfo](), 0
        for image in await asyncio.to_thread(self.store.unnamed):
            info = await asyncio.to_thread(self._info, image)
            try:
                users, bytes_freed = await self._remove(image)
            except NotFound:
                continue  # somebody else was quicker
            (kept if users else removed).append(info)
            freed += bytes_freed
        return public.PrunedImages(removed=removed, kept=kept, freed_bytes=freed)

    async def _remove(self, image: Image) -> tuple[list[str], int]:
        """Who needs it; if nobody does it is removed, and the bytes that became free. A create that begins meanwhile either
        is one of those, or waits until it is no image any more and fails."""
        withdrawn: Withdrawn | None = None
        try:
            async with self.users_of(image.digest) as users:
                if users:
                    return users, 0
                withdrawn = self.store.withdraw(image)  # a rename: no thread, which would go on after a caller that goes away
        except (PerdureError, asyncio.CancelledError):
            if withdrawn is not None:  # nobody can say that it was needed by nobody to the end
                self.store.put_back(withdrawn)
            raise
        return [], await asyncio.shield(asyncio.to_thread(self.store.discard, withdrawn))

    async def build_to(self, spec: public.BuildImage, sink: ProgressSink) -> public.ImageInfo:
        """Build an image and the golden snapshot of its default size. Cancel-safe: nothing half made is left."""
        recipe = _recipe(spec)
        image = await build_image(recipe, self.store, BuildOptions(if_missing=spec.if_missing, name=spec.name, progress=sink))
        golden = await self.golden_for(image, sink)
        if golden is not None:
            await ensure_golden(replace(golden, progress=sink))
        return await asyncio.to_thread(self._info, image)

    async def build(self, spec: public.BuildImage) -> AsyncGenerator[public.BuildEvent, None]:
        """Progress as it comes, then ``done`` or ``error``. Closing the iterator cancels the build."""
        events: asyncio.Queue[public.BuildEvent | None] = asyncio.Queue()

        async def work() -> None:
            try:
                image = await self.build_to(spec, lambda progress: events.put_nowait(as_event(progress)))
                events.put_nowait(public.BuildEvent(type="done", image=image))
            except PerdureError as error:
                events.put_nowait(public.BuildEvent(type="error", error=public.ErrorInfo(**error.public())))
            finally:
                events.put_nowait(None)

        task = asyncio.create_task(work(), name="image-build")
        try:
            while (event := await events.get()) is not None:
                yield event
            await task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def _info(self, image: Image) -> public.ImageInfo:
        return public.ImageInfo(
            name=image.name,
            digest=image.digest,
            created_at=image.created_at,
            memory_mib=image.default_size.memory_mib,
            min_memory_mib=image.min_memory_mib,
            vcpus=image.default_size.vcpus,
            disk_gib=image.disk_gib,
            kernel_version=image.kernel_version,
            agent_protocol=image.agent_protocol,
            packages=len(image.packages),
            egress_allow=list(image.egress_allow),
            stored_bytes=self.store.sizes(image).total,
            ready=sorted({f"{one.size.memory_mib}x{one.size.vcpus}" for one in self.store.goldens(image)}),
            current=image.digest in self.store.names().values(),
        )


def as_event(progress: Progress) -> public.BuildEvent:
    """One line of the build's stream."""
    return public.BuildEvent(
        type="log" if progress.log else "step",
        step=progress.step.value,
        detail=progress.detail,
        done=float(progress.done) if progress.total else None,
        total=float(progress.total) if progress.total else None,
    )


def _recipe_info(recipe: Recipe, *, is_built: bool) -> public.RecipeInfo:
    size = {"memory_mib": recipe.memory_mib, "vcpus": recipe.vcpus, "disk_gib": recipe.disk_gib}
    return public.RecipeInfo(name=recipe.name, built=is_built, **size)


def _recipe(spec: public.BuildImage) -> Recipe:
    if spec.recipe is not None:
        return parse_recipe(spec.recipe.encode(), where="the recipe", beside=None, sources=spec.source_bytes)
    name = spec.shipped or "base"
    if name not in shipped_recipes():  # a path would be one on the server, which is nobody's business
        shipped = ", ".join(shipped_recipes())
        raise NotFound(
            f"There is no recipe named {name!r}; Perdure ships {shipped}.",
            hint="Name one of these, or give the path of a recipe file ending in .toml.",
        )
    return load_recipe(name)
