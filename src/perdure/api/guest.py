"""What a program inside a workspace reaches at ``http://127.0.0.1:7071``: its own workspace, and nothing else.

The host binds the identity: it puts a ``wire.node.Identity`` into ``scope["state"]["identity"]``, so no token is needed inside. A
connection of an older generation (that a fork or a wake left over) is refused, and so is a handle that was issued to another one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from perdure.api import render
from perdure.api.errors import error_response, internal_error, validation_sentence
from perdure.api.handles import Handles
from perdure.api.traffic import REQUEST_ID, Traffic
from perdure.core import logs
from perdure.core.clock import Clock
from perdure.core.errors import InvalidRequest, NotFound, PerdureError, StaleGeneration, Unauthenticated
from perdure.wire import public
from perdure.wire.node import Identity
from perdure.workspaces.model import Context, Workspace, Workspaces

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=BaseModel)
KEEP_AWAKE_MAX_S = 30 * 86400.0


class GuestApi:
    """The routes' common ground."""

    def __init__(self, workspaces: Workspaces, handles: Handles) -> None:
        self._workspaces = workspaces
        self._handles = handles
        self._sleeping: set[asyncio.Task[None]] = set()

    async def _self(self, request: Request) -> tuple[Context, Workspace]:
        identity = request.scope.get("state", {}).get("identity")
        if not isinstance(identity, Identity):
            raise Unauthenticated("No workspace is bound to this connection.", hint="Reach this address from inside a workspace.")
        principal = f"workspace:{identity.workspace_id}"
        facts = {"workspace": identity.workspace_id, "generation": identity.generation, "tenant": identity.tenant_id}
        logs.note(by=principal, **facts)
        ctx = Context(principal, request.scope[REQUEST_ID], identity.tenant_id)
        workspace = await self._workspaces.get(ctx, identity.workspace_id)
        if workspace.generation != identity.generation:
            raise StaleGeneration("This connection belongs to an earlier generation of the workspace.", hint="Connect again.")
        return ctx, workspace

    async def show(self, request: Request) -> Response:
        _, workspace = await self._self(request)
        return _json(render.workspace(workspace))

    async def handle(self, request: Request) -> Response:
        await self._self(request)
        return _json(public.HandleAnswer(handle=self._handles.issue(request.scope["state"]["identity"])))

    async def check_handle(self, request: Request) -> Response:
        await self._self(request)
        body = await _body(request, public.CheckHandle)
        self._handles.check(request.scope["state"]["identity"], body.handle)
        return _json(public.Done())

    async def keep_awake(self, request: Request) -> Response:
        ctx, workspace = await self._self(request)
        body = await _body(request, public.KeepAwake)
        if body.seconds > KEEP_AWAKE_MAX_S:
            raise InvalidRequest("A workspace cannot keep itself awake for more than 30 days.", hint="Ask again in time.")
        return _json(render.workspace(await self._workspaces.keep_awake(ctx, workspace.id, body.seconds)))

    async def checkpoint(self, request: Request) -> Response:
        ctx, workspace = await self._self(request)
        body = await _body(request, public.CheckpointWorkspace)
        return _json(render.snapshot(await self._workspaces.checkpoint(ctx, workspace.id, name=body.name)))

    async def sleep(self, request: Request) -> Response:
        """Answers 202 first: the caller itself is about to stop."""
        ctx, workspace = await self._self(request)
        request.scope["state"]["after"] = lambda: self._sleep_soon(ctx, workspace)
        return _json(public.Accepted(), status=202)

    def _sleep_soon(self, ctx: Context, workspace: Workspace) -> None:
        task = asyncio.create_task(self._sleep(ctx, workspace))
        self._sleeping.add(task)
        task.add_done_callback(self._sleeping.discard)

    async def _sleep(self, ctx: Context, workspace: Workspace) -> None:
        try:
            await self._workspaces.sleep(ctx, workspace.id)
        except PerdureError as error:
            log.warning("workspace %s asked to sleep and could not: %s", workspace.id, error)


def create_guest_app(workspaces: Workspaces, clock: Clock, handles: Handles) -> Traffic:
    """The ASGI application for the bridge in ``gateway.selfservice``."""
    api = GuestApi(workspaces, handles)

    def answering(handler: Any) -> Any:
        async def endpoint(request: Request) -> Response:
            response: Response = await handler(request)
            after = request.scope.get("state", {}).pop("after", None)
            return _Then(response, after) if after else response

        return endpoint

    routes = [
        Route("/v1/workspace", answering(api.show), methods=["GET"], name="guest_show"),
        Route("/v1/workspace/handle", answering(api.handle), methods=["GET"], name="guest_handle"),
        Route("/v1/workspace/handle/check", answering(api.check_handle), methods=["POST"], name="guest_check_handle"),
        Route("/v1/workspace/keep-awake", answering(api.keep_awake), methods=["POST"], name="guest_keep_awake"),
        Route("/v1/workspace/sleep", answering(api.sleep), methods=["POST"], name="guest_sleep"),
        Route("/v1/workspace/checkpoint", answering(api.checkpoint), methods=["POST"], name="guest_checkpoint"),
    ]

    async def on_perdure(_: Request, error: Exception) -> Response:
        assert isinstance(error, PerdureError)
        return error_response(error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = "GET /v1/workspace, GET /v1/workspace/handle and POST /v1/workspace/{keep-awake,sleep,checkpoint,handle/check}"
        missing = NotFound(f"There is no {request.method} {request.url.path} here.", hint=f"A workspace can ask: {known}.")
        missing.status = error.status_code  # type: ignore[misc]
        return error_response(missing)

    async def on_defect(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": internal_error().model_dump()}, status_code=500)

    handlers: dict[Any, Any] = {PerdureError: on_perdure, HTTPException: on_http, Exception: on_defect}
    return Traffic(Starlette(routes=routes, exception_handlers=handlers), clock)


class _Then(Response):
    """A response that starts something when it has been sent."""

    def __init__(self, response: Response, after: Any) -> None:
        super().__init__()
        self._response = response
        self._after = after

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._response(scope, receive, send)
        self._after()


def _json(answer: BaseModel, status: int = 200) -> Response:
    return JSONResponse(answer.model_dump(mode="json"), status_code=status)


async def _body(request: Request, kind: type[Model]) -> Model:
    raw = await request.body()
    try:
        return kind.model_validate_json(raw or b"{}")
    except ValidationError as error:
        raise InvalidRequest(validation_sentence(error.errors())) from error
