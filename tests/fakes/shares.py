"""Shares in memory, with real tokens and the real judgement of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

from perdure.access import tokens
from perdure.access.model import Principal
from perdure.access.shares import Link, NotShared, PortRef, Share, SharedLink, judge
from perdure.access.tokens import Grant
from perdure.core.clock import Clock, epoch_ms
from perdure.core.errors import NotFound
from perdure.core.ids import LinkId, WorkspaceId, mint
from perdure.core.paging import WHOLE, Page, Place
from perdure.workspaces.model import Workspace

KEY = b"k" * 32


class FakeShares:
    """Of the workspaces that ``rows`` gives."""

    def __init__(self, rows: Callable[[], Mapping[WorkspaceId, Workspace]], clock: Clock) -> None:
        self._rows = rows
        self._clock = clock
        self._shares: dict[tuple[WorkspaceId, int], tuple[Share, int]] = {}
        self._links: dict[LinkId, tuple[WorkspaceId, SharedLink]] = {}
        self._series = itertools.count(1)

    def _find(self, ref: str) -> Workspace:
        for row in self._rows().values():
            if ref in {row.id, row.name}:
                return row
        raise NotFound(f"There is no workspace {ref!r}.", hint="List them with 'perdure ls'.")

    def forget(self) -> None:
        self._shares.clear()
        self._links.clear()

    async def share(self, caller: Principal, ref: str, port: int, *, expires_s: float) -> Link:
        now = self._clock.now()
        until = now + timedelta(seconds=expires_s)
        share, series = self._put(caller, ref, port)
        share = replace(share, links_until=max(until, share.links_until or until))
        self._shares[share.workspace_id, port] = share, series
        link = SharedLink(LinkId(mint("lnk", now_ms=epoch_ms(self._clock))), port, until, now, caller.name)
        self._links[link.id] = share.workspace_id, link
        grant = Grant(share.tenant_id, share.workspace_id, port, math.ceil(until.timestamp()), series, link.id)
        return Link(share, tokens.sign(KEY, grant), link)

    async def links(self, caller: Principal, ref: str, port: int | None = None, page: Page = WHOLE) -> list[SharedLink]:
        row, now = self._find(ref), self._clock.now()
        ours = [link for owner, link in self._links.values() if owner == row.id and link.until > now]
        found = [link for link in ours if port in {None, link.port} and page.holds(Place(link.made_at, link.id))]
        return sorted(found, key=lambda link: (link.made_at, link.id))[: page.sought]

    async def revoke(self, caller: Principal, ref: str, link_id: str) -> None:
        row = self._find(ref)
        link = next((one for one in await self.links(caller, ref) if one.id == link_id), None)
        if link is None:
            raise NotFound(
                f"There is no link {link_id!r} of {ref!r} that counts.", hint="'perdure share NAME --links' lists those that do."
            )
        del self._links[link.id]
        share, series = self._shares[row.id, link.port]
        last = max((one.until for one in await self.links(caller, ref, link.port)), default=None)
        if last is None and not share.is_public:
            del self._shares[row.id, link.port]
        else:
            self._shares[row.id, link.port] = replace(share, links_until=last), series

    async def publish(self, caller: Principal, ref: str, port: int) -> Share:
        share, series = self._put(caller, ref, port)
        self._shares[share.workspace_id, port] = replace(share, is_public=True), series
        return self._shares[share.workspace_id, port][0]

    def _put(self, caller: Principal, ref: str, port: int) -> tuple[Share, int]:
        row = self._find(ref)
        if (found := self._shares.get((row.id, port))) is not None:
            return found
        series = next(self._series)
        return Share(row.tenant_id, row.id, port, False, None, self._clock.now(), caller.name, series), series

    async def unshare(self, caller: Principal, ref: str, port: int) -> None:
        row = self._find(ref)
        if self._shares.pop((row.id, port), None) is None:
            raise NotFound(f"Port {port} of {ref!r} is not shared.", hint="'perdure share NAME' lists what is.")
        self._links = {key: (owner, link) for key, (owner, link) in self._links.items() if (owner, link.port) != (row.id, port)}

    async def shared(self, caller: Principal, ref: str) -> list[Share]:
        row = self._find(ref)
        return [share for (owner, _), (share, _) in sorted(self._shares.items()) if owner == row.id]

    async def admit(self, token: str, to: PortRef) -> Share:
        grant = tokens.read(KEY, token)
        if grant is None:
            raise NotShared("This is not a share link of this server.")
        row = self._rows().get(grant.workspace_id)
        share, series = self._shares.get((grant.workspace_id, grant.port), (None, 0))
        now_s = self._clock.now().timestamp()
        is_there = grant.link is None or grant.link in self._links or grant.until_s <= now_s
        found = share if row is not None and is_there and series == grant.series else None
        share = judge(grant, to, row.name if row else None, found, now_s)
        return replace(share, link=grant.link, until_s=grant.until_s)

    async def ended(self, grants: Sequence[Grant]) -> list[Grant]:
        def counts(grant: Grant) -> bool:
            _, series = self._shares.get((grant.workspace_id, grant.port), (None, 0))
            is_there = grant.link is None or grant.link in self._links
            is_ours = series == grant.series and grant.workspace_id in self._rows()
            return is_ours and is_there and grant.until_s > self._clock.now().timestamp()

        return [grant for grant in grants if not counts(grant)]

    async def public(self, to: PortRef) -> Share | None:
        for share, _ in self._shares.values():
            row = self._rows().get(share.workspace_id)
            named = row is not None and (to.ref == row.id or (to.ref == row.name and to.tenant_id == row.tenant_id))
            if named and share.port == to.port and share.is_public:
                return share
        return None
