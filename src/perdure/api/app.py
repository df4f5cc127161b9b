"""``create_app``: the ASGI application under ``/v1``, and what AWS's clients speak beside it. Put a guard of ``guard`` in front
of it; without one it answers nobody."""

from __future__ import annotations

from functools import cache

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.routing import BaseRoute

import perdure
from perdure.api import errors
from perdure.api.aws.routes import routes as aws_routes
from perdure.api.deps import Call, admit
from perdure.api.document import ANSWERS, describe
from perdure.api.routes import (
    audit,
    backups,
    callbacks,
    events,
    exec_sockets,
    execs,
    executions,
    files,
    histories,
    images,
    integrity,
    invocations,
    keys,
    lineage,
    metrics,
    ports,
    programs,
    python,
    quotas,
    server,
    tenants,
    transfers,
    tunnels,
    usage,
    workers,
    workspaces,
)
from perdure.api.services import Services
from perdure.api.underway import Underway


def create_app(services: Services) -> FastAPI:
    """The application. ``app.state.underway`` is told by the server when it stops, so that streams end."""
    app = FastAPI(
        title="Perdure",
        version=perdure.__version__,
        description="Persistent machines for AI agents that sleep and wake with memory, files and processes intact.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        strict_content_type=True,
    )
    app.state.services = services
    app.state.underway = Underway(services)
    app.state.exec_handles = {}
    errors.install(app)
    app.router.routes.extend(_routes())
    describe(app)
    return app


@cache
def _routes() -> tuple[BaseRoute, ...]:
    """All that can be asked. Made once in a process: working out what each takes and gives costs most of a second, and what came
    of that is kept in these. They know an application by the request only."""
    inside = (execs, exec_sockets, files, transfers, tunnels, ports, programs, invocations, python)
    records = (backups, tenants, keys, usage, quotas, audit, events)
    v1 = APIRouter(prefix="/v1", responses=ANSWERS, dependencies=[Depends(admit)])
    runs = (executions, callbacks, workers)
    for module in (server, images, workspaces, lineage, integrity, histories, *inside, *runs, *records):
        v1.include_router(module.router)

    @v1.get("/openapi.json", include_in_schema=False)
    async def openapi(call: Call, request: Request) -> JSONResponse:
        return JSONResponse(request.app.openapi())

    whole = APIRouter(generate_unique_id_function=lambda route: route.name, strict_content_type=True)
    whole.include_router(v1)
    whole.include_router(metrics.router, responses=ANSWERS, dependencies=[Depends(admit)])  # where scrapers look for it
    return (*whole.routes, *aws_routes())
