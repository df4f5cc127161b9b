"""Who has signed a request. Its body is signed too, so it is read before anybody knows who sends it; but not for a key of which
nobody has heard, and no more of it than a body may have."""

from __future__ import annotations

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from perdure.access import signatures
from perdure.access.model import Principal
from perdure.access.signatures import Signed
from perdure.api.services import Services
from perdure.api.throttle import Throttle
from perdure.core.errors import SignatureRefused, Unauthenticated


async def signer(services: Services, throttle: Throttle, scope: Scope, receive: Receive, peer: str) -> tuple[Principal, Receive]:
    """Who it is, and how the body that was read is received again. Raises SignatureRefused, Unauthenticated, RateLimited."""
    request = Signed(scope["method"], scope["raw_path"], scope["query_string"], scope["headers"])
    try:
        signature = signatures.read(request, services.clock.now())
        found = await services.access.signer(signature.access_key_id)
        if found is None:
            hint = "Make a pair with 'perdure key create', or ask for that of a key with 'perdure key aws'."
            raise Unauthenticated("The access key id is not known to this server, or no longer.", hint=hint)
        principal, secret = found
        body = await _read(receive)
        signatures.verify(signature, secret, request, body)
    except (SignatureRefused, Unauthenticated):
        throttle.failed(peer)
        raise
    return principal, _again(body, receive)


async def _read(receive: Receive) -> bytes:
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


def _again(body: bytes, receive: Receive) -> Receive:
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
