"""The transport: one HTTP client over the Unix socket or TCP, with retries and errors in one place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack
from urllib.parse import quote

import httpx2

from perdure.core.clock import SystemClock
from perdure.core.config import Settings
from perdure.core.errors import PerdureError
from perdure.sdk import _core
from perdure.sdk._acompat import apause
from perdure.sdk._core import Call
from perdure.sdk._feed import FeedReader
from perdure.sdk._options import QuotaOptions
from perdure.sdk.errors import CallTimedOut, ConnectionLost
from perdure.wire import public

Model = TypeVar("Model", bound=public.Answer)
_CLOCK = SystemClock()


class AsyncClient:
    """A connection to one server. Without arguments it finds the server as the CLI does.

    ``timeout_s`` bounds how long any one call waits for its answer (None: as long as it takes); a call that ran out of it goes
    on in the server. Connecting has its own bound of five seconds.
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
        """Close the connections. Workspaces and commands go on."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def request(self, call: Call, *, timeout_s: float | None = None) -> httpx2.Response:
        """Do a call, repeat it where that is safe, and return its answer; raises the error that the answer stands for."""
        attempt = 0
        until = _CLOCK.monotonic() + _core.patience_s(self._timeout_s if timeout_s is None else timeout_s)
        while True:
            attempt += 1
            try:
                return await self._once(call, timeout_s)
            except PerdureError as error:
                delay_s = _core.retry_after_s(call, error, attempt, until - _CLOCK.monotonic())
                if delay_s is None:
                    raise
            await apause(delay_s)

    async def _once(self, call: Call, timeout_s: float | None) -> httpx2.Response:
        options = call.payload
        if timeout_s is not None:
            options["timeout"] = httpx2.Timeout(timeout_s, connect=_core.CONNECT_TIMEOUT_S)
        with self._seam(call):
            response = await self._http.request(call.method, call.url, **options)
        _core.judge(response.status_code, response.content)
        return response

    async def fetch(self, call: Call, kind: type[Model], *, timeout_s: float | None = None) -> Model:
        """Do a call and parse its answer."""
        response = await self.request(call, timeout_s=timeout_s)
        return kind.model_validate_json(response.content)

    async def send(self, call: Call, content: Any, kind: type[Model]) -> Model:
        """Do a call with a streamed body (any iterable of bytes), once."""
        headers = {"content-type": "application/octet-stream"}
        with self._seam(call):
            response = await self._http.request(call.method, call.url, content=content, headers=headers)
        _core.judge(response.status_code, response.content)
        return kind.model_validate_json(response.content)

    @asynccontextmanager
    async def stream(
        self, call: Call, *, silence_s: float | None = _core.SILENCE_S, timeout_s: float | None = None
    ) -> AsyncIterator[httpx2.Response]:
        """Do a call whose answer lasts. It may take ``timeout_s`` to begin; a server that then says nothing for ``silence_s``
        counts as gone. What a program in a workspace answers is passed on, whatever its status."""
        timeout = httpx2.Timeout(timeout_s, connect=_core.CONNECT_TIMEOUT_S)
        with self._seam(call):
            async with self._http.stream(call.method, call.url, timeout=timeout, **call.payload) as response:
                if response.status_code >= 400 and public.ANSWERED_BY_HEADER not in response.headers:
                    _core.judge(response.status_code, await response.aread())
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
    def _seam(self, call: Call) -> Iterator[None]:
        """The one place where transport errors become ours."""
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise _core.unreachable(self.target, str(error)) from error
        except httpx2.TimeoutException as error:
            what = f"{call.method} {call.path}"
            raise CallTimedOut(f"No answer to {what} came in time; the server goes on with it.") from error
        except (httpx2.TransportError, httpx2.StreamError) as error:
            raise ConnectionLost(f"The connection to {self.target.label} ended before the answer to {call.method}.") from error

    # ------------------------------------------------------------------------------------------------------ server, images

    async def health(self) -> public.Health:
        return await self.fetch(_core.get("/v1/health"), public.Health)

    async def doctor(self) -> public.DoctorReport:
        return await self.fetch(_core.get("/v1/doctor"), public.DoctorReport)

    async def log(self, ref: str, *, after_seq: int = 0, limit: int = 1000) -> list[public.LogEntry]:
        """The thread of a workspace by its name or id; by its id also when it is deleted."""
        call = _core.get(_core.workspace_path(ref, "log"), after_seq=after_seq, limit=limit)
        return (await self.fetch(call, public.Log)).entries

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
        or had, it. Raises NotFound when there never was one."""
        query = {"from": _core.instant(since), "to": _core.instant(until), "by": by, "workspace": workspace}
        return await self.fetch(_core.get("/v1/usage", **query), public.UsageReport)

    async def images(self) -> list[public.ImageInfo]:
        return (await self.fetch(_core.get("/v1/images"), public.ImageList)).images

    async def image(self, ref: str) -> public.ImageInfo:
        return await self.fetch(_core.get(f"/v1/images/{quote(ref, safe='')}"), public.ImageInfo)

    async def remove_image(self, ref: str) -> None:
        await self.request(Call("DELETE", f"/v1/images/{quote(ref, safe='')}", repeatable=True))

    async def prune_images(self) -> public.PrunedImages:
        """Remove the images that no name points to and no workspace of the server uses."""
        return await self.fetch(Call("POST", "/v1/images/prune", body={}), public.PrunedImages)

    async def verify(
        self, workspace: str | None = None, *, snapshot: str | None = None, boot: bool = False
    ) -> AsyncIterator[public.VerifyEvent]:
        """Check every stored byte of a workspace's snapshots, of one of them, or of all workspaces; with ``boot`` also start each
        in a throwaway machine. Yields the progress, ``snapshot`` with a result for each, last ``done``. Wakes nothing."""
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
        snapshots are left out, and named in it."""
        body = _core.checked(public.MakeBackup, to=to, with_master_key=with_master_key, skip_damaged=skip_damaged)
        async for line in self.ndjson(_core.post("/v1/backups", body.model_dump(mode="json"))):
            event = _core.backup_event(line)
            if event.type != "heartbeat":
                yield event

    async def shred_tenant(self, tenant: str, *, delete_workspaces: bool = False) -> public.ShreddedTenantInfo:
        """Throw away the key of a tenant: what it has in the encrypted object store can never be read again. With
        ``delete_workspaces`` its workspaces go too; without it a tenant that has any is refused. Repeating it is fine."""
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

    async def create_webhook(self, url: str, events: Sequence[str] = ()) -> public.CreatedWebhook:
        """Send the tenant's events (of these kinds; none: all) to a URL from now on, signed by the scheme of Standard Webhooks.
        No other answer ever has the ``secret``."""
        body = _core.checked(public.CreateWebhook, url=url, events=list(events))
        return await self.fetch(_core.post("/v1/webhooks", body.model_dump(mode="json")), public.CreatedWebhook)

    async def webhooks(self) -> list[public.WebhookInfo]:
        """Oldest first, with what is still to be delivered and what was given up."""
        return (await self.fetch(_core.get("/v1/webhooks"), public.WebhookList)).webhooks

    async def remove_webhook(self, webhook_id: str) -> None:
        """What was still to be delivered is not any more."""
        await self.request(Call("DELETE", f"/v1/webhooks/{quote(webhook_id, safe='')}"))

    async def test_webhook(self, webhook_id: str) -> public.WebhookTested:
        """Have an event of the kind ``test`` sent now, once, and say what became of it."""
        return await self.fetch(_core.post(f"/v1/webhooks/{quote(webhook_id, safe='')}/test"), public.WebhookTested)

    # -------------------------------------------------------------------------------------------------------- keys, tenants

    async def create_key(
        self, name: str, scopes: Iterable[str], *, expires_s: float | None = None, tenant: str | None = None
    ) -> public.CreatedKey:
        """Make an API key; ``scopes`` are of admin, operate, invoke, approve and read. No other answer ever has its ``secret``.

        ``tenant``: another one's, by id or name, for the operator. Raises AlreadyExists for a name in use."""
        body = _core.checked(public.CreateKey, name=name, scopes=list(scopes), expires_s=expires_s, tenant=tenant)
        return await self.fetch(_core.post("/v1/keys", body.model_dump(mode="json")), public.CreatedKey)

    async def keys(self, *, tenant: str | None = None) -> list[public.KeyInfo]:
        """All keys there ever were, newest last, without the server's own."""
        return (await self.fetch(_core.get("/v1/keys", tenant=tenant), public.KeyList)).keys

    async def revoke_key(self, ref: str, *, tenant: str | None = None) -> public.KeyInfo:
        """Revoke a key by its id or name. What begins after this is refused; repeating it, by id, is fine."""
        path = f"/v1/keys/{quote(ref, safe='')}/revoke"
        call = Call("POST", path, _core.query_of({"tenant": tenant}), body={}, repeatable=True)
        return await self.fetch(call, public.KeyInfo)

    async def quota(self, tenant: str | None = None) -> public.QuotaInfo:
        """What the key's own tenant may have, and has; or, for the operator, another one by id or name."""
        path = "/v1/quota" if tenant is None else f"/v1/tenants/{quote(tenant, safe='')}/quota"
        return await self.fetch(_core.get(path), public.QuotaInfo)

    async def set_quota(self, tenant: str, **limits: Unpack[QuotaOptions]) -> public.QuotaInfo:
        """Change limits of a tenant: those that are given; None takes one away. For the operator."""
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
        ``after=page.next``; with ``wait_s`` (30 at most) it waits for a row where there is none yet. ``since`` is aware."""
        query = {"tenant": tenant, "from": _core.instant(since), "after": after, "limit": limit, "wait_s": wait_s}
        return await self.fetch(_core.get("/v1/audit", **query), public.AuditPage)

    async def create_tenant(self, name: str) -> public.TenantInfo:
        """Make a tenant. For the operator; raises AlreadyExists for a name in use."""
        body = _core.checked(public.CreateTenant, name=name)
        return await self.fetch(_core.post("/v1/tenants", body.model_dump(mode="json")), public.TenantInfo)

    async def tenants(self) -> list[public.TenantInfo]:
        """All tenants, oldest first. For the operator."""
        return (await self.fetch(_core.get("/v1/tenants"), public.TenantList)).tenants
