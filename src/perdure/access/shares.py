"""Which ports of workspaces others may reach without a key, in the database. The links themselves are kept nowhere."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from perdure.access import tokens
from perdure.access.model import Principal
from perdure.access.tokens import Grant
from perdure.core.errors import Forbidden, NotFound, Unauthenticated
from perdure.core.ids import TenantId, WorkspaceId
from perdure.db.database import Database
from perdure.journal.entries import canonical

SERIES_BITS = 62


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
    """A port that is shared: by links, the last of which counts until ``links_until``, or with everybody."""

    tenant_id: TenantId
    workspace_id: WorkspaceId
    port: int
    is_public: bool
    links_until: datetime | None
    shared_at: datetime
    shared_by: str


@dataclass(frozen=True, slots=True)
class Link:
    """A share's new link: its token, and until when that counts."""

    share: Share
    token: str
    until: datetime


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

    async def unshare(self, caller: Principal, ref: str, port: int) -> None:
        """Take back all links of a port, and that it is public. Raises NotFound when it is not shared."""
        ...

    async def shared(self, caller: Principal, ref: str) -> list[Share]:
        """By port."""
        ...

    async def admit(self, token: str, to: PortRef) -> Share:
        """Raises Unauthenticated for a token that is forged, expired or revoked, Forbidden for one of another port."""
        ...

    async def public(self, to: PortRef) -> Share | None:
        """The share of a port that is open to everybody."""
        ...


class ShareService:
    """Implements ``Shares``; ``key`` is derived from the master key for ``tokens.PURPOSE``."""

    def __init__(self, database: Database, key: bytes) -> None:
        self._database = database
        self._key = key

    async def share(self, caller: Principal, ref: str, port: int, *, expires_s: float) -> Link:
        row = await self._put(caller, ref, port, expires_s, is_public=False)
        found, until = _share(row), row["until"]
        grant = Grant(found.tenant_id, found.workspace_id, port, math.ceil(until.timestamp()), int(row["series"]))
        return Link(found, tokens.sign(self._key, grant), until)

    async def publish(self, caller: Principal, ref: str, port: int) -> Share:
        return _share(await self._put(caller, ref, port, None, is_public=True))

    async def _put(self, caller: Principal, ref: str, port: int, expires_s: float | None, *, is_public: bool) -> dict[str, Any]:
        body = {"port": port, "by": caller.name, **({"public": True} if is_public else {"expires_s": expires_s})}
        row = await self._database.one(
            "shares.put",
            **{"tenant_id": caller.tenant_id, "ref": ref, "port": port, "expires_s": expires_s, "is_public": is_public},
            **{"series": secrets.randbits(SERIES_BITS), "by": caller.name, "body": canonical(body)},
        )
        if row is None:
            raise _no_workspace(ref)
        return row

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
        row = await self._database.one("shares.of_grant", workspace_id=grant.workspace_id, port=grant.port)
        assert row is not None, "the clock is always there"
        return judge(grant, to, row["name"], _share(row) if row["series"] == grant.series else None, float(row["now_s"]))

    async def public(self, to: PortRef) -> Share | None:
        row = await self._database.one("shares.public", ref=to.ref, port=to.port, tenant_id=to.tenant_id)
        return None if row is None else _share(row)


def judge(grant: Grant, to: PortRef, name: str | None, share: Share | None, now_s: float) -> Share:
    """Whether what a token grants counts for the port that was asked for. ``share`` is that of the token's series, if it is still
    there; ``name`` is the workspace's. What is said of a token of another port is the same whether there is one here or not."""
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
    )
