"""The real HTTP server, service, keys and database over a fake node, in the test's own loop."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2

from perdure.access.audit import Audit
from perdure.access.model import OPERATOR, NewKey
from perdure.access.quotas import Quotas
from perdure.access.service import AccessService
from perdure.access.shares import ShareService
from perdure.api.server import ApiServer
from perdure.core.config import Settings
from perdure.core.errors import Unavailable
from perdure.core.scopes import KeyScope
from perdure.journal.feed import Feed
from perdure.runs.service.heads import SignedHeads
from perdure.runs.service.histories import StoredHistories
from perdure.runs.service.service import ExecutionService
from perdure.snapshots.objects.client import open_objects
from perdure.webhooks.sending import Sender
from perdure.webhooks.service import WebhookParts, WebhookService
from perdure.workspaces.exec_keys import KeyedExecs, StoredExecKeys
from tests.fakes.access import SIGNING_KEY
from tests.fakes.control_plane import ControlPlane, control_plane
from tests.fakes.workspaces import KEY, fake_services

#: The same for every request, so that answers can be compared as a whole.
REQUEST_ID = "req-of-a-test"
OPENAPI = Path(__file__).parents[3] / "docs/openapi.json"
#: Method and path by the route's name: all that are in the document, and one that is not.
ROUTES: dict[str, tuple[str, str]] = {
    operation["operationId"]: (method.upper(), path)
    for path, item in json.loads(OPENAPI.read_text())["paths"].items()
    for method, operation in item.items()
} | {"openapi": ("GET", "/v1/openapi.json")}


@dataclass
class Stage:
    plane: ControlPlane
    access: AccessService
    audit: Audit
    http: httpx2.AsyncClient
    settings: Settings
    executions: ExecutionService

    async def tenant(self, name: str) -> str:
        return (await self.access.create_tenant(OPERATOR, name)).id

    async def key(self, *scopes: str, tenant: str | None = None, name: str | None = None) -> str:
        """A new key's secret."""
        chosen = frozenset(KeyScope(scope) for scope in scopes)
        count = len(await self.access.keys(OPERATOR, tenant))
        _, secret = await self.access.create_key(OPERATOR, NewKey(name or f"key-{count}", chosen, tenant=tenant))
        return secret

    async def ask(self, secret: str, method: str, path: str, **options: Any) -> httpx2.Response:
        headers = {"authorization": f"Bearer {secret}", "x-request-id": REQUEST_ID}
        return await self.http.request(method, path, headers=headers, **options)


async def _anywhere(_host: str, _port: int) -> None:
    return None


async def _nobody(host: str, port: int) -> Any:
    raise Unavailable(f"Nobody is at {host}:{port}.")


@asynccontextmanager
async def stage(**given: Any) -> AsyncIterator[Stage]:
    """``given`` are settings."""
    home = Path(tempfile.mkdtemp(prefix="perdure-", dir="/tmp"))
    # Walks over all routes with wrong keys would be too many of them from one address.
    given = {"auth_failures_per_min": 0, **given}
    settings = Settings(home=home, listen_port=0, parallel_starts=2, wake_deadline_s=20, url=None, api_key=None, **given)
    try:
        async with control_plane(settings=settings) as plane:
            access, feed = AccessService(plane.database, plane.clock, KEY, SIGNING_KEY), Feed(plane.database)
            audit = Audit(plane.database, plane.clock, "test", settings.audit_keep_days)
            shares = ShareService(plane.database, b"k" * 32, plane.clock)
            webhooks = WebhookService(WebhookParts(plane.database, plane.clock, feed, Sender(_nobody), _anywhere, b"r" * 32))
            real = {"workspaces": plane.service, "shares": shares, "quotas": Quotas(plane.database), "audit": audit}
            real["keyed_execs"] = KeyedExecs(StoredExecKeys(plane.database))
            executions = ExecutionService(plane.database, plane.clock)
            heads = SignedHeads(plane.database, open_objects("memory:///"), b"h" * 32)
            real |= {"executions": executions, "histories": StoredHistories(plane.database, heads)}
            services = replace(fake_services(settings, access)[0], **real, feed=feed, webhooks=webhooks)
            server = ApiServer(services)
            await server.start()
            await feed.start()
            await executions.start()
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60, verify=False) as http:
                yield Stage(plane, access, audit, http, settings, executions)
            await server.stop()
            await services.ports.close()
            await executions.close()
            await feed.close()
    finally:
        shutil.rmtree(home)
