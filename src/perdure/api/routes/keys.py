"""API keys of a tenant."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from perdure.access.model import NewKey
from perdure.api import render
from perdure.api.deps import Call, Paging
from perdure.core.paging import Place, cut
from perdure.wire import public

router = APIRouter(prefix="/keys", tags=["keys"])
OfTenant = Annotated[str | None, Query(description="Another tenant's, by id or name; for the operator only.")]


@router.post("", status_code=201)
async def create_key(body: public.CreateKey, call: Call) -> public.CreatedKey:
    """Make a key. No other answer ever has its secret, and the server keeps a hash only."""
    new = NewKey(body.name, frozenset(body.scopes), body.expires_s, body.tenant)
    key, secret = await call.services.access.create_key(call.caller, new)
    call.about(key.id)
    pair = call.services.access.pair_of(key)
    return public.CreatedKey(
        key=render.key(key),
        secret=secret,
        aws_access_key_id=pair.access_key_id,
        aws_secret_access_key=pair.secret_access_key,
    )


@router.get("/aws")
async def aws_access(call: Call) -> public.AwsAccess:
    """The pair for AWS's clients that belongs to the key of this call, or over the Unix socket to the operator's."""
    pair = call.services.access.pair(call.caller)
    return public.AwsAccess(
        aws_access_key_id=pair.access_key_id,
        aws_secret_access_key=pair.secret_access_key,
        port=call.connection.app.state.port,
    )


@router.get("")
async def list_keys(call: Call, page: Paging, tenant: OfTenant = None) -> public.KeyList:
    """All keys of the tenant there ever were, newest last, in pages. The one in the server's key file is not among them."""
    shown = cut(await call.services.access.keys(call.caller, tenant, page), page, lambda one: Place(one.created_at, one.id))
    return public.KeyList(keys=[render.key(key) for key in shown.items], next_cursor=shown.next_cursor)


@router.post("/{ref}/revoke")
async def revoke_key(ref: str, call: Call, tenant: OfTenant = None) -> public.KeyInfo:
    """By id or name. What begins after this answer is refused, and what lasts is ended: streams, WebSockets, connections and
    uploads; other servers of the same database do that within five seconds. Commands that were started go on."""
    revoked = await call.services.access.revoke(call.caller, ref, tenant)
    await call.underway.look()
    return render.key(revoked)
