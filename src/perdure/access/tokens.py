"""Share links' tokens: what is signed, and with what. Pure.

A token says to which port of which workspace of which tenant it leads, until when, in which series of links it was given out and
which of them it is; a MAC over all of it makes it true. It is no secret what it says. Taking a port's links back ends their
series, taking one back ends its id.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from perdure.core import base64url
from perdure.core.ids import LinkId, TenantId, WorkspaceId

PREFIX = "pds_"
#: What the signing key is derived from the master key for.
PURPOSE = "share-link"
TOKEN_MAX = 512
_MAC_BYTES = 32


@dataclass(frozen=True, slots=True)
class Grant:
    """``until_s``: seconds since 1970. ``series``: a number that no other series of the same port has. ``link``: None of one that
    was given out before links had ids, which counts as long as its series."""

    tenant_id: TenantId
    workspace_id: WorkspaceId
    port: int
    until_s: int
    series: int
    link: LinkId | None = None


def sign(key: bytes, grant: Grant) -> str:
    said = _said(grant)
    return PREFIX + base64url.encode(_mac(key, said) + said)


def read(key: bytes, token: str) -> Grant | None:
    """What a token grants; None for one that was not signed with this key. Whether it still counts is not its own to say."""
    if not token.startswith(PREFIX) or len(token) > TOKEN_MAX:
        return None
    try:
        raw = base64url.decode(token.removeprefix(PREFIX))
    except ValueError:
        return None
    mac, said = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(key, said)):
        return None
    tenant_id, workspace_id, port, until_s, series, *link = said.decode("ascii").split("\n")
    link_id = LinkId(link[0]) if link else None
    return Grant(TenantId(tenant_id), WorkspaceId(workspace_id), int(port), int(until_s), int(series), link_id)


def _said(grant: Grant) -> bytes:
    parts = (grant.tenant_id, grant.workspace_id, grant.port, grant.until_s, grant.series, *([grant.link] if grant.link else []))
    return "\n".join(map(str, parts)).encode("ascii")


def _mac(key: bytes, said: bytes) -> bytes:
    return hmac.digest(key, b"1\n" + said, "sha256")
