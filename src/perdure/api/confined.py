"""What every answer of the API says of its host (ADR 33): the isolation grade of workspaces here, and which protections hold.

It stands around the application and behind the guards: who has not shown that he may ask learns nothing of the host, and what a
program in a workspace answers to its visitors is not the API's.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.wire.node import Confinement
from perdure.wire.public import CONFINEMENT_HEADER

#: In the order of the header.
PROTECTIONS = ("jail", "seccomp", "own_user", "memory_limit", "cpu_limit", "pids_limit", "readonly_base")
NO_WORKSPACE = "none"
_BEGINNINGS = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})


def stated(confinement: Confinement | None) -> str:
    """The header's value, such as ``vm-emulated;jail=?1;own_user=?0``; why something is missing, the doctor tells."""
    if confinement is None:
        return NO_WORKSPACE
    return ";".join((confinement.isolation.value, *(f"{name}=?{int(getattr(confinement, name))}" for name in PROTECTIONS)))


class Confined:
    """The application, whose answers say it."""

    def __init__(self, app: ASGIApp, confinement: Confinement | None) -> None:
        self._app = app
        self._stamp = (CONFINEMENT_HEADER.encode(), stated(confinement).encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] in _BEGINNINGS:
                message = {**message, "headers": [*message.get("headers", ()), self._stamp]}
            await send(message)

        await self._app(scope, receive, sent)
