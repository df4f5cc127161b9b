"""Ports of a workspace over HTTP: where they are, and letting others in."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from perdure.core.errors import Conflict
from perdure.sdk import _core
from perdure.sdk._core import Call
from perdure.wire import public

if TYPE_CHECKING:
    from perdure.sdk._async.workspace import AsyncWorkspace


class AsyncPorts:
    """Programs that listen in a workspace. A request to one wakes the workspace and is held until it is awake.

    A port is private: a request needs an API key with the scope ``invoke``, or a share link.
    """

    def __init__(self, workspace: AsyncWorkspace) -> None:
        self._workspace = workspace

    async def get(self, port: int) -> public.PortInfo:
        """Where a port is reached, and whether it is shared. Does not wake the workspace.

        >>> (await ws.ports.get(8000)).port
        8000
        """
        return await self._workspace.fetch(_core.get(_core.port_path(self._workspace.id, "ports", port)), public.PortInfo)

    async def url(self, port: int) -> str:
        """Where a port is reached over HTTP: at a host of its own, where the server has a domain for ports, else below the API.

        It needs a key: ``httpx.get(url, headers={"Authorization": f"Bearer {key}"})``. For others make a link with ``share``.

        >>> await ws.ports.url(8000)
        'http://.../ports/8000/'
        """
        return (await self.get(port)).url

    async def host(self, port: int) -> str:
        """The host of ``url``, such as ``demo--8080.ws.localhost:7070``. Raises Conflict where there is no domain for ports.

        >>> await ws.ports.host(8000)  # doctest: +SKIP
        'demo--8000.ws.localhost:7070'
        """
        info = await self.get(port)
        if info.url.endswith(info.path):
            raise Conflict(
                "This server has no domain for ports, so a port has no host of its own.",
                hint="Use ports.url(), or set PERDURE_INGRESS_DOMAIN where the server is started.",
            )
        return urlsplit(info.url).netloc

    async def share(self, port: int, *, expires_s: float = 3600.0, is_public: bool = False) -> public.SharedPort:
        """Make a link (``url``) that lets whoever has it reach the port for so long. ``is_public`` lets in everybody instead,
        without a link, until the port is unshared.

        >>> link = await ws.ports.share(8000, expires_s=3600)
        >>> link.url
        'http://...'
        """
        body = _core.checked(public.SharePort, port=_core.checked_port(port), expires_s=expires_s, public=is_public)
        call = _core.post(_core.workspace_path(self._workspace.id, "shares"), body.model_dump(mode="json"), repeatable=True)
        return await self._workspace.fetch(call, public.SharedPort)

    async def unshare(self, port: int) -> None:
        """Take back all links of a port, and that it is public. Raises NotFound when it is not shared.

        >>> link = await ws.ports.share(8000)
        >>> await ws.ports.unshare(8000)
        """
        await self._workspace.fetch(Call("DELETE", _core.port_path(self._workspace.id, "shares", port)), public.Done)

    async def shares(self) -> builtins.list[public.ShareInfo]:
        """The ports that are shared.

        >>> link = await ws.ports.share(8000)
        >>> [one.port for one in await ws.ports.shares()]
        [8000]
        """
        return (
            await self._workspace.fetch(_core.get(_core.workspace_path(self._workspace.id, "shares")), public.ShareList)
        ).shares

    async def links(self, port: int | None = None) -> builtins.list[public.LinkInfo]:
        """Share links that count, of one port or of all, the oldest first.

        >>> made = await ws.ports.share(8000)
        >>> [link.id == made.link_id for link in await ws.ports.links(8000)]
        [True]
        """
        query = {} if port is None else {"port": _core.checked_port(port)}
        call = _core.get(_core.workspace_path(self._workspace.id, "links"), limit=_core.PAGE, **query)
        return [link async for page in self._workspace.client.pages(call, public.LinkList) for link in page.links]

    async def revoke_link(self, link_id: str) -> None:
        """Take back one link; the port's others go on to count. Raises NotFound for one that does not count.

        >>> made = await ws.ports.share(8000)
        >>> await ws.ports.revoke_link(made.link_id)
        """
        call = Call("DELETE", _core.workspace_path(self._workspace.id, "links", link_id))
        await self._workspace.fetch(call, public.Done)
