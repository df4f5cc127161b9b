"""Requests carried to programs that a test plays, for clients that it plays too: who waits for whom, and who ends what."""

from __future__ import annotations

import asyncio

import pytest

from perdure.api.guard import CALLER
from perdure.api.ingress.front import PathForm
from perdure.workspaces.model import CreateWorkspace
from tests.fakes.ingress import CTX, HEAD, OK, Asking, Stage, settled, the_api
from tests.fakes.pipe import WINDOW_BYTES
from tests.fakes.workspaces import fake_services


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


async def test_who_leaves_during_the_wake_with_a_short_body_has_asked_nothing(stage: Stage) -> None:
    """It may have sent all of it, and have asked somebody else meanwhile."""
    await stage.workspaces.sleep(CTX, "demo")
    stage.workspaces.hold = asyncio.Event()
    caller = stage.call(method="POST", headers={"content-length": "5"}, body=True)
    caller.put(b"12345", more=False)
    await settled()
    caller.leave()
    await caller.ended()
    stage.workspaces.hold.set()
    await settled()
    assert stage.peers.empty() and caller.sent == []


async def test_who_waits_to_be_told_to_go_on_is_told_when_the_program_is_there(stage: Stage) -> None:
    await stage.workspaces.sleep(CTX, "demo")
    stage.workspaces.hold = asyncio.Event()
    caller = stage.call(method="POST", headers={"content-length": "5", "expect": "100-continue"}, body=True)
    caller.put(b"12345", more=False)
    await settled()
    assert caller.messages.qsize() == 1, "to ask for its body is to tell it"
    stage.workspaces.hold.set()
    peer = await stage.peer()
    await peer.head()
    assert await peer.drain(b"12345") == 5
    await peer.send(OK)
    await caller.ended()
    assert caller.status == 200


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
    hasty = PathForm(the_api, stage.services, stage.underway)
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
    stage.underway.stop()
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


async def test_an_unguarded_listener_letsthe_api_in(stage: Stage) -> None:
    caller = Asking(stage, "/v1/workspaces/demo/ports/80/")
    del caller.scope[CALLER]
    caller.start()
    await caller.ended()
    assert caller.status == 401 and stage.peers.empty()
