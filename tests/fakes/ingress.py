"""Requests for ports as an ASGI server would bring them, from clients and to programs that a test plays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message

from perdure.access.model import LOCAL
from perdure.api.guard import CALLER, Caller
from perdure.api.ingress.front import PathForm
from perdure.api.services import Services
from perdure.api.throttle import Throttle
from perdure.api.traffic import REQUEST_ID
from perdure.api.underway import Underway
from perdure.core.clock import SystemClock
from perdure.core.config import Settings
from perdure.core.ids import RequestId
from perdure.workspaces.model import Context
from tests.fakes.pipe import DEADLINE_S, Peer
from tests.fakes.workspaces import FakeWorkspaces

HEAD = b"HTTP/1.1 200 OK\r\n"
OK = HEAD + b"content-length: 2\r\n\r\nok"
CTX = Context("local", RequestId("req_1"))
#: All tasks that a request has.
TASKS = ("perdure-relay", "perdure-port-request", "perdure-port-answer")


class Asking:
    """One request, as an ASGI server would bring it. ``stalled``: the client does not read."""

    def __init__(
        self, stage: Stage, path: str, *, method: str = "GET", headers: dict[str, str] | None = None, body: bool = False
    ) -> None:
        self.stage = stage
        self.sent: list[Message] = []
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.reading = asyncio.Event()
        self.reading.set()
        self._told = asyncio.Event()
        raw_path, _, query = path.partition("?")
        self.scope = {
            "type": "http",
            "method": method,
            "path": raw_path,
            "raw_path": raw_path.encode(),
            "query_string": query.encode(),
            "scheme": "http",
            "client": ("192.0.2.1", 1234),
            "headers": [
                (name.lower().encode(), value.encode()) for name, value in {"host": "127.0.0.1:1", **(headers or {})}.items()
            ],
            REQUEST_ID: RequestId("req_1"),
            CALLER: Caller(LOCAL, RequestId("req_1")),
        }
        if not body:
            self.messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})

    def start(self, app: ASGIApp | None = None) -> asyncio.Task[Any]:
        self.task = asyncio.ensure_future((app or self.stage.app)(self.scope, self.receive, self.send))
        self.stage.tasks.append(self.task)
        return self.task

    async def receive(self) -> Message:
        return await self.messages.get()

    async def send(self, message: Message) -> None:
        await self.reading.wait()
        self.sent.append(message)
        self._told.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._told.clear()
                await self._told.wait()

    async def ended(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.task

    def put(self, body: bytes, *, more: bool = True) -> None:
        self.messages.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def is_whole(self) -> bool:
        return len(self.sent) > 1 and not self.sent[-1].get("more_body", False)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


class Stage:
    """The path form over fake workspaces; the peers are the connections that were opened to port 80 of ``demo``."""

    def __init__(self, services: Services, workspaces: FakeWorkspaces) -> None:
        self.services = services
        self.workspaces = workspaces
        self.underway = Underway(services)
        self.app = PathForm(the_api, services, self.underway)
        self.peers: asyncio.Queue[Peer] = asyncio.Queue()
        self.tasks: list[asyncio.Future[Any]] = []

    def connect(self) -> Any:
        peer = Peer()
        self.peers.put_nowait(peer)
        return peer.stream

    async def peer(self) -> Peer:
        async with asyncio.timeout(DEADLINE_S):
            return await self.peers.get()

    def call(self, path: str = "/v1/workspaces/demo/ports/80/", **options: Any) -> Asking:
        caller = Asking(self, path, **options)
        caller.start()
        return caller


async def the_api(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b"the API"})


async def settled() -> None:
    """Let everything run that can."""
    for _ in range(300):
        await asyncio.sleep(0)


def unlimited() -> Throttle:
    """Nobody calls too often."""
    return Throttle(Settings(rate_limit_per_s=0, auth_failures_per_min=0), SystemClock())
