"""Who may in: by an API key, a share link, or because the port is public.

A link's token comes in the query (``?perdure_share=``), in a header, or in the cookie that it was exchanged for. Refusals of
who has nothing tell nothing: they are the same whether there is such a port or not.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import Headers as StarletteHeaders
from starlette.types import Scope

from perdure.access.model import Principal
from perdure.access.shares import NotShared, PortRef, Share
from perdure.api import policy
from perdure.api.ingress import headers
from perdure.api.ingress.names import path_address, take_share
from perdure.api.services import Services
from perdure.core.errors import Forbidden, PerdureError
from perdure.core.ids import RequestId
from perdure.wire.node import Headers
from perdure.workspaces.model import Context

#: In ``policy.NEEDS``.
ROUTE = "proxy_port"


@dataclass(frozen=True, slots=True)
class Shown:
    """What a request shows: tokens in its query and header, and in its cookies."""

    tokens: tuple[str, ...]
    cookies: tuple[str, ...] = ()


def shown(scope: Scope, cookie: str | None = None) -> Shown:
    found = StarletteHeaders(scope=scope)
    token, _ = take_share(scope["query_string"])
    tokens = tuple(one for one in (token, found.get(headers.SHARE_HEADER)) if one)
    cookies = headers.shares_in_cookies(tuple(scope["headers"]), cookie) if cookie is not None else []
    return Shown(tokens, tuple(cookies))


def is_shared(scope: Scope) -> bool:
    """Whether a request for a port by its path shows a token, be it good or not."""
    if scope["type"] not in {"http", "websocket"} or path_address(scope["raw_path"], b"") is None:
        return False
    return bool(shown(scope).tokens)


def by_key(caller: Principal, request_id: RequestId) -> Context:
    """Raises MissingScope."""
    policy.check(caller, ROUTE)
    return Context(caller.name, request_id, caller.tenant_id)


async def by_token(services: Services, tokens: tuple[str, ...], to: PortRef) -> Share:
    """The share of the first token that counts. Raises what is wrong with the last one."""
    refused: PerdureError = NotShared("This port is private.")
    for token in tokens:
        try:
            return await services.shares.admit(token, to)
        except (NotShared, Forbidden) as error:
            refused = error
    raise refused


def visitor(share: Share, request_id: RequestId) -> Context:
    """Of who comes by a share. The thread of a workspace that is woken says so."""
    return Context(f"{'public' if share.is_public else 'share'}:{share.port}", request_id, share.tenant_id)


def check_same_site(came: Headers, method: str) -> None:
    """Of a request that only a cookie lets in."""
    if headers.is_foreign(came, method):
        raise Forbidden("A page of another site asks for this, which a share link is not for.", hint="Open the link itself.")
