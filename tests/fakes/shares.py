"""Shares in memory, with real tokens and the real judgement of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta

from perdure.access import tokens
from perdure.access.model import Principal
from perdure.access.shares import Link, NotShared, PortRef, Share, judge
from perdure.access.tokens import Grant
from perdure.core.clock import Clock
from perdure.core.errors import NotFound
from perdure.core.ids import WorkspaceId
from perdure.workspaces.model import Workspace

KEY = b"k" * 32


class FakeShares:
    """Of the workspaces that ``rows`` gives."""

    def __init__(self, rows: Callable[[], Mapping[WorkspaceId, Workspace]], clock: Clock) -> None:
        self._rows = rows
        self._clock = clock
        self._shares: dict[tuple[WorkspaceId, int], tuple[Share, int]] = {}
        self._series = itertools.count(1)

    def _find(self, ref: str) -> Workspace:
        for row in self._rows().values():
            if ref in {row.id, row.name}:
                return row
        raise NotFound(f"There is no workspace {ref!r}.", hint="List them with 'perdure ls'.")

    def forget(self) -> None:
        self._shares.clear()

    async def share(self, caller: Principal, ref: str, port: int, *, expires_s: float) -> Link:
        until = self._clock.now() + timedelta(seconds=expires_s)
        share, series = self._put(caller, ref, port)
        share = replace(share, links_until=max(until, share.links_until or until))
        self._shares[share.workspace_id, port] = share, series
        grant = Grant(share.tenant_id, share.workspace_id, port, math.ceil(until.timestamp()), series)
        return Link(share, tokens.sign(KEY, grant), until)

    async def publish(self, caller: Principal, ref: str, port: int) -> Share:
        share, series = self._put(caller, ref, port)
        self._shares[share.workspace_id, port] = replace(share, is_public=True), series
        return self._shares[share.workspace_id, port][0]

    def _put(self, caller: Principal, ref: str, port: int) -> tuple[Share, int]:
        row = self._find(ref)
        made = Share(row.tenant_id, row.id, port, False, None, self._clock.now(), caller.name)
        return self._shares.get((row.id, port)) or (made, next(self._series))

    async def unshare(self, caller: Principal, ref: str, port: int) -> None:
        if self._shares.pop((self._find(ref).id, port), None) is None:
            raise NotFound(f"Port {port} of {ref!r} is not shared.", hint="'perdure share NAME' lists what is.")

    async def shared(self, caller: Principal, ref: str) -> list[Share]:
        row = self._find(ref)
        return [share for (owner, _), (share, _) in sorted(self._shares.items()) if owner == row.id]

    async def admit(self, token: str, to: PortRef) -> Share:
        grant = tokens.read(KEY, token)
        if grant is None:
            raise NotShared("This is not a share link of this server.")
        row = self._rows().get(grant.workspace_id)
        share, series = self._shares.get((grant.workspace_id, grant.port), (None, 0))
        found = share if row is not None and series == grant.series else None
        return judge(grant, to, row.name if row else None, found, self._clock.now().timestamp())

    async def public(self, to: PortRef) -> Share | None:
        for share, _ in self._shares.values():
            row = self._rows().get(share.workspace_id)
            named = row is not None and (to.ref == row.id or (to.ref == row.name and to.tenant_id == row.tenant_id))
            if named and share.port == to.port and share.is_public:
                return share
        return None
