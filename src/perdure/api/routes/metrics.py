"""What Prometheus scrapes."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Header
from starlette.responses import Response

from perdure.api.deps import Call
from perdure.api.metrics import exposition

router = APIRouter(tags=["server"])
_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get("/metrics", response_class=Response, responses=_TEXT)
async def metrics(call: Call, accept: Annotated[str, Header(include_in_schema=False)] = "") -> Response:
    """The server's numbers, in the format of Prometheus, or of OpenMetrics where that is accepted. For the operator."""
    gauges = await call.services.gauges()
    content, content_type = await asyncio.to_thread(exposition, gauges, accept)
    return Response(content, headers={"content-type": content_type, "cache-control": "no-store"})
