"""The way from a handler's AWS client to the server: an address on loopback, behind which the worker speaks for it (ADR 32).

So handlers need no key of the server, whatever they sign with; it works where the server has only a Unix socket; and when the
worker dies, nothing that it has left behind reaches the server.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from perdure.sdk._core import Target
from perdure.worker.http import HOST, Loopback, Request, Response
from perdure.worker.upstream import Upstream

#: Of Lambda's and durable executions' API versions; and Step Functions', whose path is the root.
PREFIXES = ("/2015-03-31/functions/", "/2025-12-01/functions/", "/2025-12-01/durable-execution")
#: Of one connection, or of the worker: they are not passed on.
OWN_HEADERS = frozenset(
    {b"host", b"connection", b"keep-alive", b"authorization", b"content-length", b"transfer-encoding", b"expect"}
)
ANSWER_HEADERS = frozenset({"content-type", "date", "retry-after", "perdure-request-id"})
#: AWS clients sign, so they want something to sign with. What is set by the user stays.
REGION = "us-east-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "perdure-worker", "AWS_SECRET_ACCESS_KEY": "of-no-use-elsewhere"}
CREDENTIAL_SOURCES = (
    "AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)  # fmt: skip


class Door:
    """``async with Door(target) as door``: open until the block ends. Its address has a secret in its path, since anybody on this
    host can connect to loopback."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._secret = f"/{secrets.token_urlsafe(24)}"
        self._loopback = Loopback(self._answer)
        self._upstream = Upstream(target)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._loopback.port}{self._secret}"

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """What a handler's process finds, so that AWS's clients of Lambda and Step Functions come here."""
        found = {**inherited, "AWS_ENDPOINT_URL_LAMBDA": self.url, "AWS_ENDPOINT_URL_SFN": self.url}
        region = found.get("AWS_REGION") or found.get("AWS_DEFAULT_REGION") or REGION
        found |= {"AWS_REGION": region, "AWS_DEFAULT_REGION": found.get("AWS_DEFAULT_REGION") or region}
        if not any(found.get(name) for name in CREDENTIAL_SOURCES):
            found |= CREDENTIALS
        return found

    async def __aenter__(self) -> Self:
        await self._loopback.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        await self._loopback.close()
        await self._upstream.close()

    async def _answer(self, request: Request) -> Response:
        target = request.target.removeprefix(self._secret)
        root = "/" if target in {"", "/"} and request.header(b"x-amz-target") else None
        if target == request.target or (root is None and not target.startswith(PREFIXES)):
            return _refused(403, "AccessDeniedException", "This address is not of this service.")
        headers = [(name, value) for name, value in request.headers if name not in OWN_HEADERS]
        try:
            answer = await self._upstream.request(request.method, root or target, headers, request.body)
        except OSError as error:  # an AWS client tries it again; its requests are made for that
            return _refused(503, "ServiceException", f"The server at {self._target.label} does not answer ({error}).")
        kept = {name: value for name, value in answer.headers.items() if name in ANSWER_HEADERS or name.startswith("x-amz")}
        return Response(answer.status, answer.body, kept)


def _refused(status: int, kind: str, why: str) -> Response:
    """As AWS's clients read it."""
    return Response(status, json.dumps({"message": why}).encode(), {"content-type": "application/json", "x-amzn-errortype": kind})
