"""Images: list, look at, build, remove."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter

from perdure.api.deps import Call
from perdure.api.streams import EventSource, EventStream
from perdure.wire import public

router = APIRouter(prefix="/images", tags=["images"])
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-ndjson": {}}, "model": public.BuildEvent}}


@router.get("")
async def list_images(call: Call) -> public.ImageList:
    """All images, and the recipes that come with the server."""
    images = call.services.images
    return public.ImageList(images=await images.find(call.ctx), recipes=await images.recipes(call.ctx))


@router.post("", response_class=EventStream, status_code=200, responses=_STREAM)
async def build_image(body: public.BuildImage, call: Call) -> EventStream:
    """Build an image; answers an NDJSON stream of build events. Hanging up cancels the build, which then leaves nothing."""
    source = EventSource(
        events=call.services.images.build(call.ctx, body),
        heartbeat=public.BuildEvent(type="heartbeat"),
        failed=lambda error: public.BuildEvent(type="error", error=error),
    )
    return EventStream(source, AsyncExitStack(), call.closing, {})


@router.post("/prune")
async def prune_images(call: Call) -> public.PrunedImages:
    """Remove the images that no name points to and no workspace of this server uses."""
    return await call.services.images.prune(call.ctx)


@router.get("/{ref}")
async def get_image(ref: str, call: Call) -> public.ImageInfo:
    return await call.services.images.get(call.ctx, ref)


@router.delete("/{ref}")
async def remove_image(ref: str, call: Call) -> public.Done:
    """Remove an image that no workspace uses."""
    await call.services.images.remove(call.ctx, ref)
    return public.Done()
