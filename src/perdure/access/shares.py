"""Which ports of workspaces others may reach without a key, in the database: what is shared, and which links count. The links'
tokens are kept nowhere."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Protocol

from perdure.access import tokens
from perdure.access.model import Principal
from perdure.access.tokens import Grant
from perdure.core.clock import Clock, epoch_ms
from perdure.core.errors import Conflict, Forbidden, NotFound, Unauthenticated
from perdure.core.ids import LinkId, TenantId, WorkspaceId, mint
from perdure.core.paging import WHOLE, Page
from perdure.db.database import Database
from perdure.journal.entries import canonical

SERIES_BITS = 62
#: The end of what was let in by a public port, in seconds since 1970: later than all.
FOREVER_S = 1 << 40
#: Of one port that count at the same time.
LINKS_MAX = 1000


class NotShared(Unauthenticated):
    """Nobody may know whether there is such a port."""

    default_hint = "Ask for a share link, or send an API key: 'Authorization: Bearer KEY'."


class ShareExpired(NotShared):
    code = "share_expired"
    default_hint = "Ask for a new one: perdure share NAME PORT."


class ShareRevoked(NotShared):
    code = "share_revoked"
    default_hint = "Ask for a new one: perdure share NAME PORT."


class ShareElsewhere(Forbidden):
    code = "share_elsewhere"


@dataclass(frozen=True, slots=True)
class Share:
    """A port that is shared: by links, the last of which counts until ``links_until``, or with everybody. ``link`` and
    ``until_s`` are of the link that somebody came by, who was let in (``admit``)."""

    tenant_id: TenantId
    workspace_id: WorkspaceId
    port: int
    is_public: bool
    links_until: datetime | None
    shared_at: datetime
    shared_by: str
    series: int = 0
    link: LinkId | None = None
    until_s: int = FOREVER_S

    @property
    def grant(self) -> Grant:
        """What its visitor has."""
        return Grant(self.tenant_id, self.workspace_id, self.port, self.until_s, self.series, self.link)


@dataclass(frozen=True, slots=True)
class SharedLink:
    """A link that counts. Its token is known to whom it was given."""

    id: LinkId
    port: int
    until: datetime
    made_at: datetime
    made_by: str


@dataclass(frozen=True, slots=True)
class Link:
    """A share's new link with its token."""

    share: Share
    token: str
    link: SharedLink


@dataclass(frozen=True, slots=True)
class PortRef:
    """A port as an address names it: of a workspace of that id, or of that name in a tenant (None: a token's own)."""

    ref: str
    port: int
    tenant_id: TenantId | None = None


class Shares(Protocol):
    """``ref`` is an id or a name in the caller's tenant; what is not there raises NotFound."""

    async def share(self, caller: Principal, ref: str, port: int, *, expires_s: float) -> Link:
        """A new link, which counts for that long, or until the port is unshared."""
        ...

    async def publish(self, caller: Principal, ref: str, port: int) -> Share:
        """Let in everybody, until the port is unshared."""
        ...

    async def links(self, caller: Principal, ref: str, port: int | None = None, page: Page = WHOLE) -> list[SharedLink]:
        """Those that count, of one port or all, the oldest first; ``page.sought`` of them where there are so many. None of a
        workspace that is not there."""
        ...

    async def revoke(self, caller: Principal, ref: str, link_id: str) -> None:
        """Take back one link; the port's others go on to count. Raises NotFound for one that does not count."""
        ...

    async def unshare(self, caller: Principal, ref: str, port: int) -> None:
        """Take back all links of a port, and that it is public. Raises NotFound when it is not shared."""
        ...

    async def shared(self, caller: Principal, ref: str) -> list[Share]:
        """By port."""
        ...

    async def admit(self, token: str, to: PortRef) -> Share:
        """Raises Unauthenticated for a token that is forged, expired or revoked, Forbidden for one of another port."""
        ...

    async def ended(self, grants: Sequence[Grant]) -> list[Grant]:
        """Those of these grants that count no more: taken back, expired, or of a workspace that is gone."""
        ...

    async def public(self, to: PortRef) -> Share | None:
        """The share of a port that is open to everybody."""
        ...


class ShareService:
    """Implements ``Shares``; ``key`` is derived from the master key for ``tokens.PURPOSE``."""

    def __init__(self, database: Database, key: bytes, clock: Clock) -> None:
        self._database = database
        self._key = key
        self._clock = clock

    async def share(self, caller: Principal, ref: str, port: int, *, expires_s: float) -> Link:
        link_id = LinkId(mint("lnk", now_ms=epoch_ms(self._clock)))
        row = await self._put(caller, ref, port, {"link": link_id, "expires_s": expires_s})
        found = _share(row)
        link = SharedLink(link_id, port, row["until"], row["made_at"], caller.name)
        until_s = math.ceil(link.until.timestamp())
        grant = Grant(found.tenant_id, found.workspace_id, port, until_s, int(row["series"]), link_id)
        return Link(found, tokens.sign(self._key, grant), link)

    async def publish(self, caller: Principal, ref: str, port: int) -> Share:
        return _share(await self._put(caller, ref, port, {"public": True}))

    async def _put(self, caller: Principal, ref: str, port: int, what: dict[str, Any]) -> dict[str, Any]:
        row = await self._database.one(
            "shares.put",
            **{"tenant_id": caller.tenant_id, "ref": ref, "port": port, "most": LINKS_MAX},
            **{"link_id": what.get("link"), "expires_s": what.get("expires_s"), "is_public": "public" in what},
            **{"series": secrets.randbits(SERIES_BITS), "by": caller.name},
            body=canonical({"port": port, "by": caller.name, **what}),
        )
        if row is None:
            raise _no_workspace(ref)
        if row["port"] is None:
            raise Conflict(
                f"{LINKS_MAX} links of port {port} count already.",
                hint=f"Take some back: perdure unshare NAME {port}, or --link ID.",
            )
        return row

    async def links(self, caller: Principal, ref: str, port: int | None = None, page: Page = WHOLE) -> list[SharedLink]:
        rows = await self._database.all(
            "shares.links",
            **{"tenant_id": caller.tenant_id, "ref": ref, "port": port},
            **{"after_at": page.after_at, "after_id": page.after_id, "limit": page.sought},
        )
        return [SharedLink(LinkId(row["id"]), row["port"], row["until"], row["made_at"], row["made_by"]) for row in rows]

    async def revoke(self, caller: Principal, ref: str, link_id: str) -> None:
        async with self._database.transaction() as tx:  # each statement sees what was committed before the lock was had
            at = await tx.one("shares.lock", tenant_id=caller.tenant_id, ref=ref)
            if at is None:
                raise _no_workspace(ref)
            which = {"tenant_id": caller.tenant_id, "workspace_id": at["id"]}
            gone = await tx.one("shares.revoke", **which, id=link_id)
            if gone is None:
                raise NotFound(
                    f"There is no link {link_id!r} of {ref!r} that counts.",
                    hint="'perdure share NAME --links' lists those that do.",
                )
            body = canonical({"port": gone["port"], "link": link_id, "by": caller.name})
            await tx.one("shares.revoked", **which, **gone, generation=at["generation"], body=body)

    async def unshare(self, caller: Principal, ref: str, port: int) -> None:
        body = canonical({"port": port, "by": caller.name})
        row = await self._database.one("shares.remove", tenant_id=caller.tenant_id, ref=ref, port=port, body=body)
        if row is None:
            raise _no_workspace(ref)
        if not row["removed"]:
            raise NotFound(f"Port {port} of {ref!r} is not shared.", hint="'perdure share NAME' lists what is.")

    async def shared(self, caller: Principal, ref: str) -> list[Share]:
        rows = await self._database.all("shares.of_workspace", tenant_id=caller.tenant_id, ref=ref)
        if not rows:
            raise _no_workspace(ref)
        return [_share(row) for row in rows if row["port"] is not None]

    async def admit(self, token: str, to: PortRef) -> Share:
        grant = tokens.read(self._key, token)
        if grant is None:
            raise NotShared("This is not a share link of this server.")
        row = await self._database.one("shares.of_grant", workspace_id=grant.workspace_id, port=grant.port, link=grant.link)
        assert row is not None, "the clock is always there"
        now_s = float(row["now_s"])
        # Rows of links that have ended go by and by: of those the token itself says why it counts no more.
        is_there = grant.link is None or row["has_link"] or grant.until_s <= now_s
        share = judge(grant, to, row["name"], _share(row) if is_there and row["series"] == grant.series else None, now_s)
        return replace(share, link=grant.link, until_s=grant.until_s)

    async def ended(self, grants: Sequence[Grant]) -> list[Grant]:
        rows = await self._database.all(
            "shares.ended",
            **{"workspaces": [one.workspace_id for one in grants], "ports": [one.port for one in grants]},
            **{"series": [one.series for one in grants], "links": [one.link for one in grants]},
            untils=[one.until_s for one in grants],
        )
        return [grants[row["n"] - 1] for row in rows]

    async def public(self, to: PortRef) -> Share | None:
        row = await self._database.one("shares.public", ref=to.ref, port=to.port, tenant_id=to.tenant_id)
        return None if row is None else _share(row)


def judge(grant: Grant, to: PortRef, name: str | None, share: Share | None, now_s: float) -> Share:
    """Whether what a token grants counts for the port that was asked for. ``share`` is that of the token's series, if it and the
    token's own link are still there; ``name`` is the workspace's. What is said of a token of another port is the same whether
    there is one here or not."""
    is_named = to.tenant_id in {None, grant.tenant_id} and to.ref == name
    if grant.port != to.port or not (to.ref == grant.workspace_id or is_named):
        raise ShareElsewhere("This share link is for another port.", hint="Open it as it was given to you.")
    if share is None:
        raise ShareRevoked("This share link has been taken back.")
    if grant.until_s <= now_s:
        raise ShareExpired("This share link has expired.")
    return share


def _no_workspace(ref: str) -> NotFound:
    return NotFound(f"There is no workspace {ref!r}.", hint="List them with 'perdure ls'.")


def _share(row: dict[str, Any]) -> Share:
    return Share(
        tenant_id=TenantId(row["tenant_id"]),
        workspace_id=WorkspaceId(row["workspace_id"]),
        port=row["port"],
        is_public=row["is_public"],
        links_until=row["links_until"],
        shared_at=row["shared_at"],
        shared_by=row["shared_by"],
        series=int(row["series"]),
    )
