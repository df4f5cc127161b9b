"""The transport: one HTTP client over the Unix socket or TCP, with retries and errors in one place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack
from urllib.parse import quote

import httpx2

from perdure.core.config import Settings
from perdure.core.errors import PerdureError
from perdure.sdk import _answers, _core
from perdure.sdk._acompat import AsyncSent, apause
from perdure.sdk._async.executions import AsyncDurable
from perdure.sdk._async.webhooks import AsyncWebhooks
from perdure.sdk._attempts import Attempts, qualified
from perdure.sdk._core import Call
from perdure.sdk._feed import FeedReader
from perdure.sdk._options import QuotaOptions
from perdure.sdk.errors import CallTimedOut, ConnectionLost
from perdure.wire import public

Model = TypeVar("Model", bound=public.Answer)
Page = TypeVar("Page", bound=public.Paged)


class AsyncClient(AsyncDurable, AsyncWebhooks):
    """A connection to one server. Without arguments it finds the server as the CLI does.

    ``timeout_s`` bounds how long any one call waits for its answer, repetitions included (None: as long as it takes); a call that
    ran out of it goes on in the server, and nothing is stopped by it. Connecting has its own bound of five seconds.

    >>> async with AsyncClient() as client:
    ...     (await client.health()).status
    'ok'
    """

    def __init__(
        self,
        *,
        url: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
        timeout_s: float | None = None,
    ) -> None:
        settings = settings or Settings()
        if url is not None:
            settings = settings.model_copy(update={"url": url})
        if api_key is not None:
            settings = settings.model_copy(update={"api_key": api_key})
        self.target = _core.find_server(settings)
        self._timeout_s = timeout_s
        socket = self.target.socket
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
        alive = None if socket else _core.KEEPALIVE  # a wait without timeout must notice a peer that is gone
        self._http = httpx2.AsyncClient(
            base_url=self.target.base_url,
            headers=self.target.headers,
            transport=httpx2.AsyncHTTPTransport(
                verify=self.target.has_tls, uds=str(socket) if socket else None, limits=limits, socket_options=alive
            ),
            timeout=httpx2.Timeout(timeout_s, connect=_core.CONNECT_TIMEOUT_S),
            follow_redirects=False,
        )

    async def aclose(self) -> None:
        """Close the connections. Workspaces and commands go on.

        >>> client = AsyncClient(timeout_s=30)
        >>> await client.aclose()
        """
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def request(self, call: Call, *, timeout_s: float | None = None) -> httpx2.Response:
        """Do a call, repeat it where that is safe, and return its answer; raises the error that the answer stands for."""
        attempts = Attempts(call, self._timeout_s if timeout_s is None else timeout_s)
        while True:
            sent = AsyncSent()
            try:
                return await self._once(call, attempts.patience.left_s(), sent)
            except PerdureError as error:
                delay_s = attempts.pause_s(error, was_sent=sent.is_whole)
            await apause(delay_s)

    async def _once(self, call: Call, left_s: float | None, sent: AsyncSent) -> httpx2.Response:
        options = call.payload
        connect_s = _core.CONNECT_TIMEOUT_S if left_s is None else min(left_s, _core.CONNECT_TIMEOUT_S)
        options["timeout"] = httpx2.Timeout(left_s, connect=connect_s)
        with self._seam(call, sent):
            response = await self._http.request(call.method, call.url, extensions={"trace": sent}, **options)
        _answers.judge(response.status_code, response.content, response.headers)
        return response

    async def fetch(self, call: Call, kind: type[Model], *, timeout_s: float | None = None) -> Model:
        """Do a call and parse its answer."""
        response = await self.request(call, timeout_s=timeout_s)
        return _answers.parsed(call, kind, response.content)

    async def pages(self, call: Call, kind: type[Page]) -> AsyncIterator[Page]:
        """Do a call that answers a list in pages, and go on to its end."""
        while True:
            page = await self.fetch(call, kind)
            yield page
            if page.next_cursor is None:
                return
            call = _core.next_page(call, page.next_cursor)

    async def send(self, call: Call, content: Any, kind: type[Model]) -> Model:
        """Do a call with a streamed body (any iterable of bytes), once. What came of a part of it may have been used."""
        headers = {"content-type": "application/octet-stream"}
        with self._seam(call, None):
            response = await self._http.request(call.method, call.url, content=content, headers=headers)
        _answers.judge(response.status_code, response.content, response.headers)
        return _answers.parsed(call, kind, response.content)

    @asynccontextmanager
    async def stream(
        self, call: Call, *, silence_s: float | None = _core.SILENCE_S, timeout_s: float | None = None
    ) -> AsyncIterator[httpx2.Response]:
        """Do a call whose answer lasts. It may take ``timeout_s`` to begin; a server that then says nothing for ``silence_s``
        counts as gone. What a program in a workspace answers is passed on, whatever its status."""
        timeout = httpx2.Timeout(timeout_s, connect=_core.CONNECT_TIMEOUT_S)
        sent = AsyncSent()
        options = {**call.payload, "timeout": timeout, "extensions": {"trace": sent}}
        with self._seam(call, sent):
            async with self._http.stream(call.method, call.url, **options) as response:
                if response.status_code >= 400 and public.ANSWERED_BY_HEADER not in response.headers:
                    _answers.judge(response.status_code, await response.aread(), response.headers)
                response.request.extensions["timeout"] = {**response.request.extensions["timeout"], "read": silence_s}
                yield response

    async def ndjson(self, call: Call) -> AsyncIterator[bytes]:
        """The lines of an NDJSON answer."""
        async with self.stream(call) as response:
            buffer = bytearray()
            async for chunk in response.aiter_raw():
                for line in _core.lines(buffer, chunk):
                    yield line

    @contextmanager
    def _seam(self, call: Call, sent: AsyncSent | None) -> Iterator[None]:
        """The one place where transport errors become ours. ``sent`` None: whatever has left may have been used."""
        lost: PerdureError
        cause: Exception
        try:
            yield
            return
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise _core.unreachable(self.target, str(error)) from error
        except httpx2.TimeoutException as error:
            lost, cause = CallTimedOut(f"No answer to {call.method} {call.path} came in time; the server goes on with it."), error
        except (httpx2.TransportError, httpx2.StreamError) as error:
            lost = ConnectionLost(f"The connection to {self.target.label} ended before the answer to {call.method}.")
            cause = error
        raise qualified(lost, call, may_be_done=sent is None or sent.is_whole) from cause

    # ------------------------------------------------------------------------------------------------------ server, images

    async def health(self) -> public.Health:
        """Whether it serves, and which version.

        >>> (await client.health()).status
        'ok'
        """
        return await self.fetch(_core.get("/v1/health"), public.Health)

    async def doctor(self) -> public.DoctorReport:
        """What the server's host can do, and what mends the rest.

        >>> report = await client.doctor()
        >>> report.ok, report.isolation.value
        (True, 'vm-emulated')
        """
        return await self.fetch(_core.get("/v1/doctor"), public.DoctorReport)

    async def log(self, ref: str, *, after_seq: int = 0, limit: int | None = None) -> list[public.LogEntry]:
        """The thread of a workspace by its name or id, from the first entry after a number; by its id also when it is deleted.
        At most ``limit`` entries; None: to its end.

        >>> [entry.kind for entry in await client.log("demo", limit=1)]
        ['awake']
        """
        entries: list[public.LogEntry] = []
        call = _core.get(_core.workspace_path(ref, "log"), after_seq=after_seq, limit=min(limit or _core.PAGE, _core.PAGE))
        async for page in self.pages(call, public.Log):
            entries += page.entries
            if limit is not None and len(entries) >= limit:
                break
        return entries[:limit]

    async def usage(
        self,
        workspace: str | None = None,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        by: public.UsageBy = "workspace",
    ) -> public.UsageReport:
        """What workspaces used between two instants (aware; without them from the beginning, and until now): a row for each
        workspace, deleted ones included, or one for the whole tenant. ``workspace`` is an id or a name: only those that have,
        or had, it. Raises NotFound when there never was one.

        >>> (row,) = (await client.usage("demo")).rows
        >>> row.name, row.awake_s / 3600
        ('demo', 1.5)
        """
        query = {"from": _core.instant(since), "to": _core.instant(until), "by": by, "workspace": workspace}
        return await self.fetch(_core.get("/v1/usage", **query), public.UsageReport)

    async def meters(self) -> public.MeterReadings:
        """What the meters of the workspaces that are awake say now. They only grow, so two readings make a rate.

        >>> [one.name for one in (await client.meters()).meters]
        ['demo']
        """
        return await self.fetch(_core.get("/v1/meters"), public.MeterReadings)

    async def images(self) -> list[public.ImageInfo]:
        """All images of the server, old ones that workspaces still need too.

        >>> [image.name for image in await client.images() if image.current]
        ['base']
        """
        return (await self.fetch(_core.get("/v1/images"), public.ImageList)).images

    async def recipes(self) -> list[public.RecipeInfo]:
        """The recipes that come with the server: what ``build_image(shipped=…)`` can build.

        >>> [recipe.name for recipe in await client.recipes() if not recipe.built]
        ['node']
        """
        return (await self.fetch(_core.get("/v1/images"), public.ImageList)).recipes

    async def image(self, ref: str) -> public.ImageInfo:
        """One image, by name or digest. Raises NotFound.

        >>> (await client.image("base")).memory_mib
        512
        """
        return await self.fetch(_core.get(f"/v1/images/{quote(ref, safe='')}"), public.ImageInfo)

    async def remove_image(self, ref: str) -> None:
        """Remove an image that no workspace uses. Raises Conflict with the names of those that do.

        >>> await client.remove_image("base")
        """
        await self.request(Call("DELETE", f"/v1/images/{quote(ref, safe='')}", repeatable=True))

    async def prune_images(self) -> public.PrunedImages:
        """Remove the images that no name points to and no workspace of the server uses.

        >>> (await client.prune_images()).removed
        []
        """
        return await self.fetch(Call("POST", "/v1/images/prune", body={}), public.PrunedImages)

    async def verify(
        self, workspace: str | None = None, *, snapshot: str | None = None, boot: bool = False
    ) -> AsyncIterator[public.VerifyEvent]:
        """Check every stored byte of a workspace's snapshots, of one of them, or of all workspaces; with ``boot`` also start each
        in a throwaway machine. Yields the progress, ``snapshot`` with a result for each, last ``done``. Wakes nothing.

        >>> snapshot = await ws.checkpoint("before")
        >>> async for event in client.verify("demo"):
        ...     if event.result is not None:
        ...         print(event.result.name, event.result.intact)
        before True
        """
        body = _core.checked(public.VerifySnapshots, workspace=workspace, snapshot=snapshot, boot=boot)
        async for line in self.ndjson(_core.post("/v1/snapshots/verify", body.model_dump(mode="json"))):
            event = _core.verify_event(line)
            if event.type != "heartbeat":
                yield event

    async def backup(
        self, to: str, *, with_master_key: bool = False, skip_damaged: bool = False
    ) -> AsyncIterator[public.BackupEvent]:
        """Back up the whole server into a directory on its machine (absolute), or s3://, gs:// or az:// with a prefix, while it
        works. Yields the progress, last ``done`` with the backup; whoever leaves before that ends it. ``skip_damaged``: damaged
        snapshots are left out, and named in it.

        >>> async for event in client.backup("/srv/backups"):
        ...     if event.backup is not None:
        ...         print(event.backup.workspaces, event.backup.snapshots)
        2 2
        """
        body = _core.checked(public.MakeBackup, to=to, with_master_key=with_master_key, skip_damaged=skip_damaged)
        async for line in self.ndjson(_core.post("/v1/backups", body.model_dump(mode="json"))):
            event = _core.backup_event(line)
            if event.type != "heartbeat":
                yield event

    async def shred_tenant(self, tenant: str, *, delete_workspaces: bool = False) -> public.ShreddedTenantInfo:
        """Throw away the key of a tenant: what it has in the encrypted object store can never be read again. With
        ``delete_workspaces`` its workspaces go too; without it a tenant that has any is refused. Repeating it is fine.

        >>> tenant = await client.create_tenant("acme")
        >>> (await client.shred_tenant("acme")).deleted
        []
        """
        body = _core.checked(public.ShredTenant, delete_workspaces=delete_workspaces)
        call = Call("POST", f"/v1/tenants/{quote(tenant, safe='')}/shred", body=body.model_dump(mode="json"), repeatable=True)
        return await self.fetch(call, public.ShreddedTenantInfo)

    async def build_image(
        self,
        recipe: str | None = None,
        *,
        shipped: str | None = None,
        sources: Mapping[str, bytes] | None = None,
        name: str | None = None,
        if_missing: bool = False,
    ) -> AsyncIterator[public.BuildEvent]:
        """Build an image from a recipe's TOML text or a shipped recipe's name (neither: ``base``).

        ``sources`` are the contents of the files that the recipe names as ``source``. Yields the progress, last ``done``.

        >>> async for event in client.build_image(shipped="base", if_missing=True):
        ...     if event.image is not None:
        ...         print(event.image.name)
        base
        """
        body = _core.build_image(recipe, sources or {}, shipped=shipped, name=name, if_missing=if_missing)
        async for line in self.ndjson(_core.post("/v1/images", body.model_dump(mode="json"))):
            yield _core.image_event(line)

    # -------------------------------------------------------------------------------------------------------------- events

    async def events(
        self,
        *,
        after: int | None = None,
        last: int | None = None,
        workspace: str | None = None,
        kinds: Sequence[str] = (),
        follow: bool = True,
    ) -> AsyncIterator[public.FeedEvent]:
        """What happens to the tenant's workspaces, in one order, none left out; a broken connection is taken up where it broke.

        ``after``: the ``seq`` that was read last (0: from the beginning); ``last``: begin so many events before the end; neither:
        from now on, or everything when it does not ``follow``. ``workspace``: an id or a name, also of a deleted one.

        >>> kinds = [event.kind async for event in client.events(after=0, follow=False)]
        """
        query = {"after": after, "last": last, "workspace": workspace, "follow": follow}
        reader = FeedReader(query, kinds)
        while True:
            try:
                async with self.stream(reader.next_call()) as response:
                    buffer = bytearray()
                    async for chunk in response.aiter_raw():
                        for line in _core.lines(buffer, chunk):
                            event = reader.feed(line)
                            if event is not None:
                                yield event
                if not follow:
                    return
                raise ConnectionLost("The server ended the feed.")
            except PerdureError as error:
                await apause(reader.broke(error))

    # -------------------------------------------------------------------------------------------------------- keys, tenants

    async def create_key(
        self, name: str, scopes: Iterable[str], *, expires_s: float | None = None, tenant: str | None = None
    ) -> public.CreatedKey:
        """Make an API key; ``scopes`` are of admin, operate, invoke, approve and read. No other answer ever has its ``secret``.

        ``tenant``: another one's, by id or name, for the operator. Raises AlreadyExists for a name in use.

        >>> made = await client.create_key("agent", ["invoke"], expires_s=30 * 86400)
        >>> made.secret[:4], made.key.state.value
        ('pdk_', 'active')
        """
        body = _core.checked(public.CreateKey, name=name, scopes=list(scopes), expires_s=expires_s, tenant=tenant)
        return await self.fetch(_core.post("/v1/keys", body.model_dump(mode="json")), public.CreatedKey)

    async def keys(self, *, tenant: str | None = None) -> list[public.KeyInfo]:
        """All keys there ever were, newest last, without the server's own.

        >>> made = await client.create_key("agent", ["read"])
        >>> [key.name for key in await client.keys()]
        ['agent']
        """
        pages = self.pages(_core.get("/v1/keys", tenant=tenant, limit=_core.PAGE), public.KeyList)
        return [key async for page in pages for key in page.keys]

    async def revoke_key(self, ref: str, *, tenant: str | None = None) -> public.KeyInfo:
        """Revoke a key by its id or name. What begins after this is refused; repeating it, by id, is fine.

        >>> made = await client.create_key("agent", ["read"])
        >>> (await client.revoke_key("agent")).state.value
        'revoked'
        """
        path = f"/v1/keys/{quote(ref, safe='')}/revoke"
        call = Call("POST", path, _core.query_of({"tenant": tenant}), body={}, repeatable=True)
        return await self.fetch(call, public.KeyInfo)

    async def quota(self, tenant: str | None = None) -> public.QuotaInfo:
        """What the key's own tenant may have, and has; or, for the operator, another one by id or name.

        >>> quota = await client.quota()  # doctest: +SKIP
        """
        path = "/v1/quota" if tenant is None else f"/v1/tenants/{quote(tenant, safe='')}/quota"
        return await self.fetch(_core.get(path), public.QuotaInfo)

    async def set_quota(self, tenant: str, **limits: Unpack[QuotaOptions]) -> public.QuotaInfo:
        """Change limits of a tenant: those that are given; None takes one away. For the operator.

        >>> quota = await client.set_quota("acme", workspaces=10)  # doctest: +SKIP
        """
        body = _core.checked(public.SetQuota, **limits).model_dump(mode="json", exclude_unset=True)
        call = Call("PATCH", f"/v1/tenants/{quote(tenant, safe='')}/quota", body=body, repeatable=True)
        return await self.fetch(call, public.QuotaInfo)

    async def audit(
        self,
        *,
        tenant: str | None = None,
        since: datetime | None = None,
        after: int = 0,
        limit: int = 100,
        wait_s: float = 0.0,
    ) -> public.AuditPage:
        """Who did what, oldest first: of the key's own tenant, for the operator of all or of ``tenant``. Goes on with
        ``after=page.next``; with ``wait_s`` (30 at most) it waits for a row where there is none yet. ``since`` is aware.

        >>> page = await client.audit(limit=100)  # doctest: +SKIP
        """
        query = {"tenant": tenant, "from": _core.instant(since), "after": after, "limit": limit, "wait_s": wait_s}
        return await self.fetch(_core.get("/v1/audit", **query), public.AuditPage)

    async def create_tenant(self, name: str) -> public.TenantInfo:
        """Make a tenant. For the operator; raises AlreadyExists for a name in use.

        >>> (await client.create_tenant("acme")).name
        'acme'
        """
        body = _core.checked(public.CreateTenant, name=name)
        return await self.fetch(_core.post("/v1/tenants", body.model_dump(mode="json")), public.TenantInfo)

    async def tenants(self) -> list[public.TenantInfo]:
        """All tenants, oldest first. For the operator.

        >>> [tenant.name for tenant in await client.tenants()]
        ['default']
        """
        pages = self.pages(_core.get("/v1/tenants", limit=_core.PAGE), public.TenantList)
        return [tenant async for page in pages for tenant in page.tenants]
