"""What every route asks for: the caller's context and the services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import Depends, Query
from pydantic import Field, JsonValue
from starlette.requests import HTTPConnection

from perdure.access.limits import Ask, refuse_exec
from perdure.access.model import Principal
from perdure.api import policy, render
from perdure.api.guard import CALLER, Caller
from perdure.api.services import Services
from perdure.api.trail import trail_of
from perdure.api.underway import Ending, Underway, ending_of
from perdure.core import ids
from perdure.core.clock import epoch_ms
from perdure.core.errors import InvalidRequest, NotFound, Unauthenticated
from perdure.core.ids import ExecId
from perdure.core.paging import Page
from perdure.core.paging import Place as ListPlace
from perdure.runs.service.actors import asked_by
from perdure.wire import public
from perdure.wire.node import ExecHandle, Place
from perdure.wire.paths import place_of
from perdure.workspaces.model import Awake, Context, Workspaces


def _caller(connection: HTTPConnection) -> Caller:
    caller = connection.scope.get(CALLER)
    if not isinstance(caller, Caller):  # fail closed: an application without a guard in front serves nobody
        raise Unauthenticated("This listener is not guarded, so it answers nobody.")
    return caller


async def admit(connection: HTTPConnection) -> None:
    """Before anything else of a route: whether the caller's key is good for it, whether what it names can be a
    name, and a note of what it is about to do."""
    route = getattr(connection.scope.get("route"), "name", "")
    caller, trail = _caller(connection), trail_of(connection)
    target = "/".join(str(part) for part in connection.path_params.values())
    if trail is not None:
        trail.asked(route, target)
    policy.check(caller.principal, route)
    asked_by(caller.principal.name)
    _check_text(connection)
    if trail is not None:
        of_workspace = connection.scope["path"].startswith("/v1/workspaces/")
        await trail.begin(policy.recorded(route, connection.scope.get("method", "")), of_workspace=of_workspace)


def _check_text(connection: HTTPConnection) -> None:
    if any("\0" in str(value) for value in connection.path_params.values()):
        raise NotFound("The address contains NUL, a zero character, and there is nothing of such a name.", hint="Leave it out.")
    if any("\0" in text for pair in connection.query_params.multi_items() for text in pair):
        raise InvalidRequest("The query contains NUL, a zero character, which nothing here can hold.", hint="Leave it out.")


@dataclass(frozen=True, slots=True)
class Bundle:
    """One request: who calls, what serves it, and when it has to end."""

    caller: Principal
    ctx: Context
    services: Services
    closing: Ending  # set when the server stops, or the caller's key counts no more: streams end with an error that says so
    exec_handles: dict[tuple[str, int, str], ExecHandle]
    connection: HTTPConnection

    @property
    def workspaces(self) -> Workspaces:
        return self.services.workspaces

    @property
    def underway(self) -> Underway:
        found: Underway = self.connection.app.state.underway
        return found

    @asynccontextmanager
    async def awake(self, ref: str) -> AsyncIterator[Awake]:
        async with self.services.workspaces.awake(self.ctx, ref) as awake:
            self.about(awake.workspace.id)
            yield awake

    def about(self, target: str) -> None:
        """What the audit says that this call was about: an id, once it is known."""
        if (trail := trail_of(self.connection)) is not None:
            trail.about(target)

    async def check_upload(self) -> None:
        """Raises QuotaExceeded for a body that the tenant's storage has no room for, before any of it is read. One that does not
        declare its length counts when it is stored."""
        declared = self.connection.headers.get("content-length", "0")
        size = int(declared) if declared.isdecimal() else 0
        await self.services.quotas.check(self.ctx.tenant_id, Ask(storage_bytes=size))

    def new_exec_id(self) -> ExecId:
        """For a command whose caller named none."""
        return ExecId(ids.mint("exe", now_ms=epoch_ms(self.services.clock)))

    async def exec_limit(self) -> Callable[[], None]:
        """What raises QuotaExceeded when no further command of the tenant may run. To be called right before one is started, with
        nothing awaited in between: so it counts those of other callers too."""
        limit = (await self.services.quotas.limits(self.ctx.tenant_id)).execs
        if limit is None:
            return lambda: None
        return lambda: refuse_exec(limit, self.workspaces.running_execs(self.ctx.tenant_id))


def bundle(connection: HTTPConnection) -> Bundle:
    state, caller = connection.app.state, _caller(connection)
    principal = caller.principal
    ctx = Context(principal.name, caller.request_id, principal.tenant_id)
    return Bundle(principal, ctx, state.services, ending_of(connection), state.exec_handles, connection)


Call = Annotated[Bundle, Depends(bundle)]


def exact_query(connection: HTTPConnection, name: str) -> str:
    """A query parameter's last value with bytes that are not UTF-8 kept as surrogate escapes."""
    values = parse_qs(connection.scope["query_string"].decode("latin-1"), keep_blank_values=True, errors="surrogateescape")
    return str(values[name][-1])


#: A number of bytes, or an offset of one: as large as an offset in a file can be.
Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
#: Of these the description says how they look; ``place_of`` judges them, and says what is wrong with another one.
_ABSOLUTE: dict[str, JsonValue] = {"pattern": "^/[^\\u0000]*$"}
PathText = Annotated[
    str, Query(description="Absolute path in the workspace; with `root`, below that.", json_schema_extra=_ABSOLUTE)
]
AbsoluteText = Annotated[str, Field(json_schema_extra=_ABSOLUTE)]


def _place(
    connection: HTTPConnection,
    path: PathText,
    root: Annotated[AbsoluteText | None, Query(description="A directory that neither `..` nor links may lead out of.")] = None,
) -> Place:
    return place_of(None if root is None else exact_query(connection, "root"), exact_query(connection, "path"))


GuestPlace = Annotated[Place, Depends(_place)]

PAGE_LIMIT = 100
PAGE_LIMIT_MAX = 1000
Cursor = Annotated[str | None, Query(description="The next_cursor of the page before; none: the first page.", max_length=200)]


def _page(
    limit: Annotated[int, Query(ge=1, le=PAGE_LIMIT_MAX, description="At most so many.")] = PAGE_LIMIT, cursor: Cursor = None
) -> Page:
    return Page(limit, None if cursor is None else ListPlace.of(cursor))


#: Which part of a list that grows.
Paging = Annotated[Page, Depends(_page)]


def awake_headers(awake: Awake) -> dict[str, str]:
    """Headers of every answer that touched an awake workspace; a wake that this call caused is never silent (DESIGN D8)."""
    headers = {public.GENERATION_HEADER: str(awake.workspace.generation)}
    if awake.workspace.confinement is not None:
        headers[public.ISOLATION_HEADER] = awake.workspace.confinement.isolation.value
    if awake.report is not None:
        report = render.resume_report(awake.report)
        # A header has little room for what hooks wrote; the report that can be asked for has it.
        report = report.model_copy(update={"hooks": [hook.model_copy(update={"output": ""}) for hook in report.hooks]})
        headers[public.RESUME_HEADER] = report.model_dump_json(ensure_ascii=True)
    return headers
