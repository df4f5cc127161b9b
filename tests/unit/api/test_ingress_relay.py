"""Requests carried to programs that a test plays, for clients that it plays too: who waits for whom, and who ends what."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from perdure.access.model import LOCAL, VISITOR
from perdure.api.guard import CALLER, Caller
from perdure.api.ingress.front import HostForm, PathForm
from perdure.api.ingress.names import Domain
from perdure.api.services import Services
from perdure.core.config import Settings
from perdure.core.ids import RequestId
from perdure.workspaces.model import Context, CreateWorkspace
from tests.fakes.pipe import DEADLINE_S, WINDOW_BYTES, Peer
from tests.fakes.workspaces import FakeWorkspaces, fake_services

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
        self.closing = asyncio.Event()
        self.app = PathForm(_nobody, services, self.closing)
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


async def _nobody(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b"the API"})


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    settings = Settings(home=tmp_path, url=None, api_key=None, port_answer_s=30, ingress_domain="ws.localhost")
    services, workspaces = fake_services(settings)
    made = Stage(services, workspaces)
    await workspaces.create(CTX, CreateWorkspace("demo"))
    workspaces.world("demo").programs[80] = made.connect
    yield made
    await asyncio.gather(*made.tasks, return_exceptions=True)
    await services.ports.close()
    left = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(TASKS)]
    assert not left, "a request leaves nothing behind"
    assert all(count == 0 for count in workspaces.held.values()), "nor is its workspace held awake"


async def settled() -> None:
    """Let everything run that can."""
    for _ in range(300):
        await asyncio.sleep(0)


async def test_a_request_and_its_answer(stage: Stage) -> None:
    headers = {"authorization": "Bearer pdk_secret", "cookie": "a=1", "x-own": "1", "connection": "keep-alive"}
    caller = stage.call("/v1/workspaces/demo/ports/80/a/../%2Fb?c=%00", headers=headers)
    peer = await stage.peer()
    head = await peer.head()
    assert head[0] == b"GET /a/../%2Fb?c=%00 HTTP/1.1"
    assert sorted(head[1:]) == [
        b"host: localhost:80",
        b"x-forwarded-for: 192.0.2.1",
        b"x-forwarded-host: 127.0.0.1:1",
        b"x-forwarded-prefix: /v1/workspaces/demo/ports/80",
        b"x-forwarded-proto: http",
        b"x-own: 1",
    ]
    await peer.send(HEAD + b"content-length: 2\r\nset-cookie: a=1\r\nx-own: 2\r\nperdure-generation: 99\r\n\r\nok")
    await caller.ended()
    assert (caller.status, caller.body, caller.is_whole) == (200, b"ok", True)
    assert caller.headers["content-security-policy"] == "sandbox" and caller.headers["x-content-type-options"] == "nosniff"
    assert caller.headers["perdure-generation"] == "1" and "set-cookie" not in caller.headers and caller.headers["x-own"] == "2"


async def test_a_sleeping_workspace_is_woken_and_the_request_held(stage: Stage) -> None:
    """Requests wait with a deadline; none is refused for being early (peers: rows 15 and 16)."""
    await stage.workspaces.sleep(CTX, "demo")
    stage.workspaces.hold = asyncio.Event()
    callers = [stage.call() for _ in range(3)]
    await settled()
    assert stage.peers.empty() and not any(caller.sent for caller in callers)
    stage.workspaces.hold.set()
    for _ in callers:
        await (await stage.peer()).send(OK)
    for caller in callers:
        await caller.ended()
        assert caller.status == 200
    assert "perdure-resume-report" in callers[0].headers, "a wake is never silent"


async def test_who_leaves_during_the_wake_has_asked_nothing(stage: Stage) -> None:
    await stage.workspaces.sleep(CTX, "demo")
    stage.workspaces.hold = asyncio.Event()
    caller = stage.call()
    await settled()
    caller.leave()
    await caller.ended()
    stage.workspaces.hold.set()
    await settled()
    assert stage.peers.empty() and caller.sent == []


async def test_an_upload_goes_no_faster_than_the_program_reads(stage: Stage) -> None:
    """Gigabytes do not gather here: what is taken from the client is what the program's window has room for, and two pieces."""
    caller = stage.call(method="PUT", headers={"transfer-encoding": "chunked"}, body=True)
    for _ in range(64):
        caller.put(b"x" * 65536)
    peer = await stage.peer()
    await settled()
    taken = 64 - caller.messages.qsize()
    assert 0 < taken <= WINDOW_BYTES // 65536 + 4
    await peer.head()
    for _ in range(32):
        await peer.read()
    await settled()
    assert taken < 64 - caller.messages.qsize() <= taken + 33
    caller.put(b"", more=False)
    assert await peer.drain(b"\r\n0\r\n\r\n") > 30 * 65536
    await peer.send(OK)
    await caller.ended()
    assert caller.status == 200


async def test_a_download_goes_no_faster_than_the_client_reads(stage: Stage) -> None:
    caller = stage.call()
    peer = await stage.peer()
    await peer.head()
    await peer.send(HEAD + b"\r\n")
    await caller.until(lambda: len(caller.sent) == 1)
    caller.reading.clear()
    size = 64 * 65536
    flood = asyncio.create_task(peer.send(b"x" * size))
    await settled()
    assert not flood.done()
    assert peer.accepted <= WINDOW_BYTES + 4 * 65536
    caller.reading.set()
    await flood
    peer.end()
    await caller.ended()
    assert len(caller.body) == size and caller.is_whole


async def test_events_pass_at_once(stage: Stage) -> None:
    caller = stage.call()
    peer = await stage.peer()
    await peer.head()
    await peer.send(HEAD + b"content-type: text/event-stream\r\n\r\n")
    for count in range(1, 4):
        await peer.send(b"data: %d\n\n" % count)
        await caller.until(lambda count=count: caller.body.endswith(b"data: %d\n\n" % count))  # type: ignore[misc]
    peer.end()
    await caller.ended()
    assert caller.is_whole and len(caller.sent) == 5


@pytest.mark.parametrize("when", ["sending", "waiting", "answering"])
async def test_a_client_that_leaves_takes_the_programs_connection_along(stage: Stage, when: str) -> None:
    caller = stage.call(method="PUT", headers={"content-length": "10"}, body=True) if when == "sending" else stage.call()
    peer = await stage.peer()
    await peer.head()
    if when == "sending":
        caller.put(b"12345")
        await peer.read()
    if when == "answering":
        await peer.send(HEAD + b"content-length: 10\r\n\r\n12345")
        await caller.until(lambda: caller.body == b"12345")
    caller.leave()
    await caller.ended()
    await peer.left()


@pytest.mark.parametrize(
    ("sent", "code", "status", "phase"),
    [
        (b"", "port_closed", 502, "waiting"),
        (b"HTTP/1.1 20", "port_closed", 502, "waiting"),
        (b"SMTP ready\r\n\r\n", "port_malformed", 502, "waiting"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 80_000, "port_malformed", 502, "waiting"),
    ],
)
async def test_a_program_that_does_not_answer_properly(stage: Stage, sent: bytes, code: str, status: int, phase: str) -> None:
    caller = stage.call()
    peer = await stage.peer()
    await peer.head()
    sending = asyncio.ensure_future(peer.send(sent)) if sent else None
    await settled()
    peer.end()
    await caller.ended()
    await asyncio.gather(*([sending] if sending else []), return_exceptions=True)
    assert (caller.status, caller.error["code"], caller.error["details"]) == (status, code, {"phase": phase})
    assert caller.headers["perdure-reason"] == code and caller.headers["cache-control"] == "no-store"
    assert caller.error["message"] and caller.error["hint"]


async def test_a_program_that_is_silent_or_not_there(stage: Stage) -> None:
    stage.services = fake_services(stage.services.settings.model_copy(update={"port_answer_s": 0.05}))[0]
    hasty = PathForm(_nobody, stage.services, stage.closing)
    await stage.services.workspaces.create(CTX, CreateWorkspace("demo"))
    stage.services.workspaces.world("demo").programs[80] = stage.connect  # type: ignore[attr-defined]
    caller = Asking(stage, "/v1/workspaces/demo/ports/80/")
    caller.start(hasty)
    await caller.ended()
    assert (caller.status, caller.error["code"], caller.error["ambiguous"]) == (504, "port_silent", True)
    caller = stage.call("/v1/workspaces/demo/ports/81/")
    await caller.ended()
    assert (caller.status, caller.error["code"], caller.error["retryable"]) == (502, "port_refused", True)
    assert "Nothing listens on port 81" in caller.error["message"]


async def test_an_answer_that_breaks_off_is_visibly_cut(stage: Stage) -> None:
    caller = stage.call()
    peer = await stage.peer()
    await peer.send(HEAD + b"content-length: 10\r\n\r\n12345")
    await caller.until(lambda: caller.body == b"12345")
    peer.reset()
    await caller.ended()
    assert not caller.is_whole, "without its last piece a server closes the connection"


@pytest.mark.parametrize("begun", [False, True])
async def test_a_server_that_stops_says_so_or_cuts(stage: Stage, begun: bool) -> None:
    caller = stage.call()
    peer = await stage.peer()
    await peer.head()
    if begun:
        await peer.send(HEAD + b"\r\n")
        await caller.until(lambda: bool(caller.sent))
    stage.closing.set()
    await caller.ended()
    await peer.left()
    if begun:
        assert not caller.is_whole
    else:
        assert (caller.status, caller.error["code"], caller.headers["retry-after"]) == (503, "unavailable", "1")
    late = stage.call()
    await late.ended()
    assert late.status == 503 and stage.peers.empty()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/workspaces/absent/ports/80/", 404),
        ("/v1/workspaces/demo/ports/0/", 422),
        ("/v1/workspaces/demo/ports/65536/", 422),
        ("/v1/workspaces/a%2Fb/ports/80/", 404),
    ],
)
async def test_what_leads_nowhere(stage: Stage, path: str, status: int) -> None:
    caller = stage.call(path)
    await caller.ended()
    assert caller.status == status and "perdure-reason" in caller.headers


async def test_everything_else_is_the_apis(stage: Stage) -> None:
    for path in ("/v1/workspaces/demo/ports/80", "/v1/workspaces", "/", "/v1/workspaces/demo/ports/x/"):
        caller = stage.call(path)
        await caller.ended()
        assert caller.status == 299, path


async def test_an_unguarded_listener_lets_nobody_in(stage: Stage) -> None:
    caller = Asking(stage, "/v1/workspaces/demo/ports/80/")
    del caller.scope[CALLER]
    caller.start()
    await caller.ended()
    assert caller.status == 401 and stage.peers.empty()


# --------------------------------------------------------------------------------------------------------------- host form


def host_call(stage: Stage, path: str = "/", host: str = "demo--80.ws.localhost:7070", **headers: str) -> Asking:
    caller = Asking(stage, path, headers={"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}})
    caller.start(HostForm(_nobody, stage.services, Domain.parse("ws.localhost"), stage.closing))
    return caller


async def answered(stage: Stage, caller: Asking) -> list[bytes]:
    """The program's side of a request that is let in."""
    peer = await stage.peer()
    head = await peer.head()
    await peer.send(HEAD + b"content-length: 2\r\nset-cookie: a=1; Domain=ws.localhost\r\nconnection: close\r\n\r\nok")
    await caller.ended()
    assert caller.status == 200, caller.sent
    return head


async def link(stage: Stage, port: int = 80, **options: Any) -> str:
    return (await stage.services.shares.share(LOCAL, "demo", port, expires_s=3600, **options)).token


async def test_a_port_is_private_and_nobody_learns_what_exists(stage: Stage) -> None:
    answers = []
    for host in ("demo--80", "demo--81", "absent--80", "ws-" + "0" * 26 + "--80"):
        caller = host_call(stage, host=f"{host}.ws.localhost")
        await caller.ended()
        answers.append(
            (caller.status, caller.body, [pair for pair in caller.sent[0]["headers"] if pair[0] != b"perdure-request-id"])
        )
    assert answers[0][0] == 401 and all(answer == answers[0] for answer in answers)
    assert stage.peers.empty()


async def test_a_person_gets_a_page_and_a_program_json(stage: Stage) -> None:
    caller = host_call(stage, accept="text/html,*/*")
    await caller.ended()
    assert (
        caller.headers["content-type"].startswith("text/html")
        and "default-src 'none'" in caller.headers["content-security-policy"]
    )
    assert b"share link" in caller.body
    caller = host_call(stage)
    await caller.ended()
    assert caller.error["code"] == "unauthenticated" and "Authorization: Bearer" in caller.error["hint"]


async def test_a_link_is_exchanged_for_a_cookie_on_the_first_visit(stage: Stage) -> None:
    token = await link(stage)
    caller = host_call(stage, f"/a//b?x=%20&perdure_share={token}&y", accept="text/html")
    await caller.ended()
    assert caller.status == 303 and stage.peers.empty()
    assert caller.headers["location"] == "http://demo--80.ws.localhost:7070/a//b?x=%20&y"
    assert caller.headers["referrer-policy"] == "no-referrer" and caller.headers["cache-control"] == "no-store"
    cookie, *attributes = caller.headers["set-cookie"].split("; ")
    assert cookie == f"perdure-share={token}" and attributes == ["Path=/", "HttpOnly", "SameSite=Lax"]
    again = host_call(stage, "/a//b?x=%20&y", cookie=f"{cookie}; own=1", accept="text/html")
    head = await answered(stage, again)
    assert head[0] == b"GET /a//b?x=%20&y HTTP/1.1" and b"cookie: own=1" in head
    assert b"host: demo--80.ws.localhost:7070" in head
    assert token.encode() not in b"".join(head)
    assert again.headers["set-cookie"] == "a=1", "and no other host gets it"
    assert "perdure-generation" not in again.headers and "content-security-policy" not in again.headers


async def test_a_link_never_leads_to_another_host(stage: Stage) -> None:
    token = await link(stage)
    caller = host_call(stage, f"//evil.example/?perdure_share={token}", accept="text/html")
    await caller.ended()
    assert caller.headers["location"] == "http://demo--80.ws.localhost:7070//evil.example/"


async def test_with_tls_before_it_no_other_host_can_plant_the_cookie(stage: Stage) -> None:
    token = await link(stage)
    app = HostForm(_nobody, stage.services, Domain.parse("https://ws.example.com"), stage.closing)
    headers = {"host": "demo--80.ws.example.com", "accept": "text/html"}
    caller = Asking(stage, f"/?perdure_share={token}", headers=headers)
    caller.start(app)
    await caller.ended()
    assert caller.headers["set-cookie"] == f"__Host-perdure-share={token}; Path=/; HttpOnly; SameSite=Lax; Secure"
    assert caller.headers["location"] == "https://demo--80.ws.example.com/"
    planted = f"__Host-perdure-share=planted; __Host-perdure-share={token}"
    caller = Asking(stage, "/", headers={"host": "demo--80.ws.example.com", "cookie": planted})
    caller.start(app)
    assert b"x-forwarded-proto: https" in await answered(stage, caller)


async def test_programs_show_the_token_in_the_query_or_in_a_header(stage: Stage) -> None:
    token = await link(stage)
    head = await answered(stage, host_call(stage, f"/x?perdure_share={token}"))
    assert head[0] == b"GET /x HTTP/1.1"
    head = await answered(stage, host_call(stage, perdure_share=token))
    assert not any(b"perdure" in line.lower() for line in head)
    caller = Asking(
        stage, f"/?perdure_share={token}", method="POST", headers={"host": "demo--80.ws.localhost", "accept": "text/html"}
    )
    caller.start(HostForm(_nobody, stage.services, Domain.parse("ws.localhost"), stage.closing))
    await answered(stage, caller)


async def test_the_path_form_takes_a_token_too(stage: Stage) -> None:
    token = await link(stage)
    for path, headers in ((f"/?perdure_share={token}&a=1", {}), ("/?a=1", {"perdure-share": token})):
        caller = Asking(stage, "/v1/workspaces/demo/ports/80" + path, headers=headers)
        caller.scope[CALLER] = Caller(VISITOR, RequestId("req_1"))
        caller.start()
        assert (await answered(stage, caller))[0] == b"GET /?a=1 HTTP/1.1"
        assert "perdure-generation" not in caller.headers and caller.headers["content-security-policy"] == "sandbox"
    caller = Asking(stage, "/v1/workspaces/demo/ports/80/")
    caller.scope[CALLER] = Caller(VISITOR, RequestId("req_1"))
    caller.start()
    await caller.ended()
    assert caller.status == 401


async def test_tokens_that_do_not_count(stage: Stage) -> None:
    good, other = await link(stage), await link(stage, 81)
    expired = (await stage.services.shares.share(LOCAL, "demo", 80, expires_s=-60)).token

    async def refused(token: str, host: str = "demo--80") -> tuple[int, str]:
        caller = host_call(stage, f"/?perdure_share={token}", f"{host}.ws.localhost")
        await caller.ended()
        return caller.status, caller.error["code"]

    assert await refused("pds_forged") == (401, "unauthenticated")
    assert await refused("") == (401, "unauthenticated")
    assert await refused(good[:-2] + ("AA" if good[-2:] != "AA" else "BB")) == (401, "unauthenticated")
    assert await refused(other) == (403, "share_elsewhere")
    assert await refused(good, "absent--80") == await refused(good, "demo--81") == (403, "share_elsewhere")
    assert await refused(expired) == (401, "share_expired")
    await stage.services.shares.unshare(LOCAL, "demo", 80)
    assert await refused(good) == (401, "share_revoked")
    renewed = await link(stage)
    assert await refused(good) == (401, "share_revoked"), "a later share does not bring earlier links back"
    await answered(stage, host_call(stage, f"/?perdure_share={renewed}"))
    await stage.workspaces.delete(CTX, "demo")
    assert await refused(renewed) == (403, "share_elsewhere")
    assert await refused(renewed, "ws-" + "0" * 25 + "1--80") == (401, "share_revoked")
    assert stage.peers.empty()


async def test_another_sites_page_cannot_use_a_visitors_cookie(stage: Stage) -> None:
    """Workspaces of one domain are one site to a browser, so it would add the cookie."""
    cookie = f"perdure-share={await link(stage)}"
    for headers in (
        {"origin": "http://evil--80.ws.localhost:7070"},
        {"origin": "null"},
        {"sec_fetch_site": "same-site", "sec_fetch_mode": "no-cors"},
    ):
        caller = host_call(stage, cookie=cookie, **headers)
        await caller.ended()
        assert (caller.status, caller.error["code"]) == (403, "forbidden")
    await answered(stage, host_call(stage, cookie=cookie, origin="http://demo--80.ws.localhost:7070"))
    navigation = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    await answered(stage, host_call(stage, cookie=cookie, **navigation))


async def test_a_public_port_is_open_until_it_is_unshared(stage: Stage) -> None:
    await stage.services.shares.publish(LOCAL, "demo", 80)
    await answered(stage, host_call(stage))
    await answered(stage, host_call(stage, host="ws-" + "0" * 25 + "1--80.ws.localhost", accept="text/html"))
    await answered(stage, host_call(stage, "/?perdure_share=stale", accept="text/html"))
    caller = host_call(stage, host="demo--81.ws.localhost")
    await caller.ended()
    assert caller.status == 401
    await stage.services.shares.unshare(LOCAL, "demo", 80)
    caller = host_call(stage)
    await caller.ended()
    assert caller.status == 401


async def test_an_api_key_opens_the_host_form_and_stays_here(stage: Stage) -> None:
    caller = host_call(stage, authorization="Bearer pdk_test-key")
    head = await answered(stage, caller)
    assert not any(b"pdk_" in line for line in head)
    assert caller.headers["perdure-generation"] == "1"
    caller = host_call(stage, authorization="Bearer pdk_wrong")
    await caller.ended()
    assert (caller.status, caller.error["code"]) == (401, "unauthenticated")
    token = await link(stage)
    head = await answered(stage, host_call(stage, perdure_share=token, authorization="Bearer of-the-app"))
    assert b"authorization: Bearer of-the-app" in head, "what is not ours is the program's"


async def test_hosts_that_name_nothing_and_those_of_the_api(stage: Stage) -> None:
    for host in ("demo.ws.localhost", "a.demo--80.ws.localhost", "demo--0.ws.localhost"):
        caller = host_call(stage, host=host)
        await caller.ended()
        assert caller.status == 404, "never the API"
    for host in ("127.0.0.1:7070", "localhost", "ws.localhost", "demo--80.ws.localhost.example"):
        caller = host_call(stage, host=host)
        await caller.ended()
        assert caller.status == 299


async def test_the_apis_paths_are_the_programs_on_its_own_host(stage: Stage) -> None:
    await stage.services.shares.publish(LOCAL, "demo", 80)
    for path in ("/v1/workspaces", "/v1/workspaces/demo/ports/81/", "http://other.example/x"):
        head = await answered(stage, host_call(stage, path))
        assert head[0] == f"GET {'/x' if path.startswith('http') else path} HTTP/1.1".encode()
