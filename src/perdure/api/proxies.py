"""Who asks, where a proxy stands in front of TCP: by what a proxy that the operator trusts says of its clients.

Without a trusted proxy nothing that a client says about where it comes from counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from perdure.core.errors import InvalidRequest

Network = IPv4Network | IPv6Network
_SECURE = {"http": "https", "ws": "wss"}


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Raises InvalidRequest for what is neither an address nor a network."""
    found: list[Network] = []
    for text in texts:
        try:
            found.append(ip_network(text))
        except ValueError as error:
            raise InvalidRequest(
                f"{text!r} in PERDURE_TRUSTED_PROXIES is not an address: {error}.",
                hint="Write addresses or networks, such as 10.0.0.2,192.168.1.0/24.",
            ) from error
    return tuple(found)


def client_of(peer: str, chain: str, trusted: Sequence[Network]) -> str:
    """The address of whoever asked: the nearest one of ``X-Forwarded-For`` that is not a trusted proxy's. Each proxy adds its
    client at the end, so what stands before the first untrusted one, seen from the end, may be anybody's invention."""
    client, before = peer, [part.strip() for part in chain.split(",")]
    while before and is_of(client, trusted):
        told = before.pop()
        try:
            client = str(ip_address(told))
        except ValueError:
            break
    return client


def is_of(address: str, trusted: Sequence[Network]) -> bool:
    try:
        found = ip_address(address)
    except ValueError:
        return False
    plain = found.ipv4_mapped if isinstance(found, IPv6Address) else None  # what a socket for both kinds calls an IPv4 one
    return any((plain or found) in network for network in trusted)


class BehindProxies:
    """Before everything else of TCP."""

    def __init__(self, app: ASGIApp, trusted: Sequence[Network]) -> None:
        self._app = app
        self._trusted = trusted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        if client and is_of(client[0], self._trusted):
            headers = Headers(scope=scope)
            chain = ",".join(headers.getlist("x-forwarded-for"))
            scope["client"] = (client_of(client[0], chain, self._trusted), 0)
            if headers.get("x-forwarded-proto", "").rpartition(",")[2].strip().lower() == "https":
                scope["scheme"] = _SECURE.get(scope["scheme"], scope["scheme"])
        await self._app(scope, receive, send)
