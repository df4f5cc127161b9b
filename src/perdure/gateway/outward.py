"""Connections that the server itself opens to where a tenant wants it: the rules of workspaces, with a list of their own.

Whoever may name a host may not thereby reach the server's own network: an address that is not public is refused unless the
operator has opened it for this, and what is connected to is what has been judged.
"""

from __future__ import annotations

from perdure.core.errors import InvalidRequest
from perdure.gateway.egress import Dialer, EgressRefused
from perdure.gateway.rules import EgressRules, parse_host, show
from perdure.gateway.streams import SocketStream


class Outward:
    """``dialer`` has the operator's list."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer

    async def check(self, host: str, port: int) -> None:
        """Raises InvalidRequest for what is no host, EgressRefused for one that leads where nobody may go. One that is not found
        in time may come to be."""
        where = _where(host, port)
        for sentence in await self._dialer.foresee([where]):
            raise EgressRefused(sentence, hint="Name a host on the public internet, or ask the operator of this server.")

    async def open(self, host: str, port: int) -> SocketStream:
        """Connect. Raises EgressRefused or EgressFailed."""
        outbound = await self._dialer.open(host, port, EgressRules.parse([_where(host, port)]))
        return outbound.stream


def _where(host: str, port: int) -> str:
    try:
        return f"{show(parse_host(host))}:{port}"
    except InvalidRequest as error:
        raise InvalidRequest(error.message) from error  # its hint is about allow lists
