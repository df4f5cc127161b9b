"""Addresses and shares of ports. What listens there is reached by ``api.ingress``, beside these routes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from perdure.access.shares import Share
from perdure.api.deps import Bundle, Call, Paging
from perdure.api.ingress.names import SHARE_PARAMETER, Domain, id_label, label_of
from perdure.core.errors import Conflict
from perdure.core.ids import DEFAULT_TENANT
from perdure.core.paging import Place, cut
from perdure.wire import public
from perdure.workspaces.model import Workspace

router = APIRouter(prefix="/workspaces/{ref}", tags=["ports"])
Port = Annotated[int, Path(ge=1, le=65535)]
PortQuery = Annotated[int | None, Query(ge=1, le=65535, description="Of this port only.")]
_ANYWHERE = {"0.0.0.0", "::", ""}


@router.get("/ports/{port}")
async def describe_port(ref: str, port: Port, call: Call) -> public.PortInfo:
    """Where a port is reached, and whether it is shared. Never wakes the workspace. What listens there is below
    ``/ports/{port}/``, with any method."""
    workspace = await call.workspaces.get(call.ctx, ref)
    shares = await call.services.shares.shared(call.caller, workspace.id)
    share = next((_info(call, workspace, one) for one in shares if one.port == port), None)
    path = _path(workspace, port)
    return public.PortInfo(workspace_id=workspace.id, port=port, url=_url(call, workspace, port), path=path, share=share)


@router.get("/shares")
async def list_shares(ref: str, call: Call) -> public.ShareList:
    """Ports that are shared."""
    workspace = await call.workspaces.get(call.ctx, ref)
    shares = await call.services.shares.shared(call.caller, workspace.id)
    return public.ShareList(shares=[_info(call, workspace, share) for share in shares])


@router.post("/shares", status_code=201)
async def share_port(ref: str, body: public.SharePort, call: Call) -> public.SharedPort:
    """Make a link that lets whoever has it reach a port, waking the workspace; or, with ``public``, let in everybody. Links that
    were made before go on to count."""
    workspace = await call.workspaces.get(call.ctx, ref)
    url = _url(call, workspace, body.port)
    if body.public:
        _check_domain(call)
        share = await call.services.shares.publish(call.caller, workspace.id, body.port)
        return public.SharedPort(share=_info(call, workspace, share), url=url, token=None, expires_at=None)
    link = await call.services.shares.share(call.caller, workspace.id, body.port, expires_s=body.expires_s)
    return public.SharedPort(
        share=_info(call, workspace, link.share),
        url=f"{url}?{SHARE_PARAMETER}={link.token}",
        token=link.token,
        link_id=link.link.id,
        expires_at=link.link.until,
    )


@router.delete("/shares/{port}")
async def unshare_port(ref: str, port: Port, call: Call) -> public.Done:
    """Take back every link of a port, and that it is public. Requests of visitors that are under way are ended; other servers of
    the same database do that within five seconds."""
    workspace = await call.workspaces.get(call.ctx, ref)
    await call.services.shares.unshare(call.caller, workspace.id, port)
    await call.underway.look()
    return public.Done()


@router.get("/links")
async def list_links(ref: str, call: Call, page: Paging, port: PortQuery = None) -> public.LinkList:
    """Share links that count, the oldest first, in pages. Those that were given out before links had ids are not among them."""
    workspace = await call.workspaces.get(call.ctx, ref)
    found = await call.services.shares.links(call.caller, workspace.id, port, page)
    shown = cut(found, page, lambda one: Place(one.made_at, one.id))
    links = [
        public.LinkInfo(id=one.id, port=one.port, expires_at=one.until, made_at=one.made_at, made_by=one.made_by)
        for one in shown.items
    ]
    return public.LinkList(links=links, next_cursor=shown.next_cursor)


@router.delete("/links/{link_id}")
async def revoke_link(ref: str, link_id: str, call: Call) -> public.Done:
    """Take back one share link, and end what is under way by it. The others of its port go on to count."""
    workspace = await call.workspaces.get(call.ctx, ref)
    await call.services.shares.revoke(call.caller, workspace.id, link_id)
    await call.underway.look()
    return public.Done()


def _check_domain(call: Bundle) -> None:
    if call.services.settings.ingress_domain is None:
        raise Conflict(
            "This server has no domain for ports, and nobody is let in by the API's own.",
            hint="Set PERDURE_INGRESS_DOMAIN, such as ws.localhost, and start the server again.",
        )


def _info(call: Bundle, workspace: Workspace, share: Share) -> public.ShareInfo:
    return public.ShareInfo(
        workspace_id=share.workspace_id,
        port=share.port,
        url=_url(call, workspace, share.port),
        public=share.is_public,
        links_until=share.links_until,
        shared_at=share.shared_at,
        shared_by=share.shared_by,
    )


def _path(workspace: Workspace, port: int) -> str:
    return f"/v1/workspaces/{workspace.id}/ports/{port}/"


def _url(call: Bundle, workspace: Workspace, port: int) -> str:
    """Where it is reached from where the caller is."""
    settings, connection = call.services.settings, call.connection
    listens = int(connection.app.state.port)
    if settings.ingress_domain is not None:
        by_name = label_of(workspace.name) if workspace.tenant_id == DEFAULT_TENANT else None
        return Domain.parse(settings.ingress_domain).url(by_name or id_label(workspace.id), port, listens)
    if connection.client is not None and connection.client.host:  # by TCP: the host that it called is ours
        base = f"{connection.url.scheme}://{connection.headers['host']}"
    else:
        host = "127.0.0.1" if settings.listen_host in _ANYWHERE else settings.listen_host
        base = f"http://[{host}]:{listens}" if ":" in host else f"http://{host}:{listens}"
    return base + _path(workspace, port)
