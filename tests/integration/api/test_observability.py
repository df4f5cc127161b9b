"""Request ids, the line of each request, metrics and traces, over the real HTTP server."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx2
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from websockets.sync.client import connect

from perdure.core import logs, tracing
from perdure.core.config import Settings
from perdure.core.errors import NotFound, PerdureError
from perdure.sdk import Client, Workspace
from tests.fakes.api_server import FakeServer
from tests.fakes.workspaces import KEY
from tests.integration.api.stage import REQUEST_ID, stage

#: On a busy host.
GET, PUT, POST = (partial(call, timeout=60) for call in (httpx2.get, httpx2.put, httpx2.post))
BEARER = {"authorization": f"Bearer {KEY}"}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Kept(logging.Handler):
    """Lines as a server in JSON writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logs.formatter(Settings(log_format="json")))
        self.text: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(self.format(record))

    def lines(self, event: str = "request") -> list[dict[str, Any]]:
        return [line for line in map(json.loads, self.text) if line["event"] == event]


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler, root = Kept(), logging.getLogger("perdure")
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(before)


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.use(None)


# -------------------------------------------------------------------------------------------------------------- request ids


@pytest.mark.parametrize(("path", "status"), [("/v1/health", 200), ("/v1/workspaces/nobody", 404), ("/nowhere", 404)])
def test_a_callers_request_id_is_taken_and_told(server: FakeServer, path: str, status: int) -> None:
    response = GET(server.url + path, headers={**BEARER, "x-request-id": "job-7:a.b_c"})
    assert response.status_code == status
    assert (response.headers["x-request-id"], response.headers["perdure-request-id"]) == ("job-7:a.b_c", "job-7:a.b_c")
    if status >= 400:
        assert response.json()["error"]["request_id"] == "job-7:a.b_c"


@pytest.mark.parametrize("wrong", ["", "a b", "x" * 129, "<script>", "ü", "-", 'a"b'])
def test_one_that_is_not_sane_is_replaced(server: FakeServer, wrong: str) -> None:
    response = GET(server.url + "/v1/workspaces/nobody", headers={**BEARER, b"x-request-id": wrong.encode()})  # type: ignore[dict-item]
    made = response.headers["x-request-id"]
    assert made.startswith("req_")
    assert response.json()["error"]["request_id"] == made


def test_every_refusal_has_one(server: FakeServer) -> None:
    for headers in ({}, {**BEARER, "host": "evil.example"}, {"authorization": "Bearer wrong"}):
        response = GET(server.url + "/v1/health", headers=headers)
        assert response.json()["error"]["request_id"] == response.headers["x-request-id"]
    big = POST(server.url + "/v1/workspaces", headers=BEARER, content=b"x" * (5 << 20))
    assert (big.status_code, big.json()["error"]["request_id"]) == (413, big.headers["x-request-id"])


def test_a_client_knows_which_request_failed(client: Client) -> None:
    with pytest.raises(NotFound) as caught:
        client.image("nobody")
    assert caught.value.request_id.startswith("req_")
    assert caught.value.public()["request_id"] == caught.value.request_id


def test_a_stream_that_fails_says_which_request_it_was(client: Client, demo: Workspace) -> None:
    with pytest.raises(PerdureError) as caught:
        list(client.build_image("broken"))
    assert caught.value.request_id.startswith("req_")


def test_a_defect_is_found_by_its_request(server: FakeServer, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(*_: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(server.workspaces, "get", breaks)
    error = GET(server.url + "/v1/workspaces/demo", headers=BEARER).json()["error"]
    assert error["request_id"] in error["message"]
    server.wait_for(kept.lines)  # written when the answer is out
    assert [line["request_id"] for line in kept.lines() if line["status"] == 500] == [error["request_id"]]


# --------------------------------------------------------------------------------------------------------------- the lines


def test_each_request_has_a_line_without_anything_secret(server: FakeServer, kept: Kept, demo: Workspace) -> None:
    path = "/v1/workspaces/demo/files/content"
    PUT(server.url + path, params={"path": "/root/secret-name"}, headers=BEARER, content=b"secret-content")
    GET(server.url + "/v1/nowhere?token=secret-token", headers={**BEARER, "x-request-id": "mine"})
    GET(server.url + "/v1/health", headers={"authorization": "Bearer pdk_secret-key-that-is-wrong"})
    server.wait_for(lambda: len(kept.lines()) == 4)  # written when the answers are out
    write, nowhere, refused = [line for line in kept.lines() if line["method"] != "POST"]
    known = {
        "method": "PUT",
        "route": "write_file",
        "status": 200,
        "received_bytes": 14,
        "by": "operator",
        "tenant": "ten_default",
    }
    assert {name: write[name] for name in known} == known
    assert write["ms"] >= 0
    assert (nowhere["path"], nowhere["status"], nowhere["request_id"]) == ("/v1/nowhere", 404, "mine")
    assert (refused["status"], "by" in refused) == (401, False)
    assert "secret" not in "".join(kept.text).replace("wrong", "")
    assert KEY not in "".join(kept.text)


def test_questions_that_come_every_few_seconds_have_none(server: FakeServer, kept: Kept) -> None:
    GET(server.url + "/v1/health", headers=BEARER)
    GET(server.url + "/metrics", headers=BEARER)
    assert kept.lines() == []


def test_a_tunnel_has_a_line_when_it_ends(server: FakeServer, kept: Kept, demo: Workspace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        server.workspaces.world("demo").ports.add(port)
        url = server.url.replace("http", "ws") + f"/v1/workspaces/demo/tcp/{port}"
        with connect(url, additional_headers=BEARER) as tunnel:
            assert tunnel.response is not None
            request_id = tunnel.response.headers["x-request-id"]
            tunnel.send(b"12345")
            inside, _ = listening.accept()
            with inside:
                inside.sendall(inside.recv(5))
                assert tunnel.recv() == b"12345"
    server.wait_for(lambda: any(line.get("route") == "tunnel" for line in kept.lines()))
    (line,) = [line for line in kept.lines() if line.get("route") == "tunnel"]
    assert (line["method"], line["status"], line["request_id"]) == ("WEBSOCKET", 101, request_id)
    assert (line["received_bytes"], line["sent_bytes"]) == (5, 5)


async def test_lines_know_the_workspace_and_its_generation(kept: Kept) -> None:
    async with stage() as staged:
        made = (await staged.ask(KEY, "POST", "/v1/workspaces", json={"name": "erin"})).json()["workspace"]
        await staged.ask(KEY, "POST", "/v1/workspaces/erin/sleep")
        await staged.ask(KEY, "POST", "/v1/workspaces/erin/execs", json={"argv": ["true"], "background": True})
    line = next(line for line in kept.lines() if line["route"] == "start_exec")
    assert (line["workspace"], line["generation"], line["request_id"]) == (made["id"], made["generation"] + 1, REQUEST_ID)


# ----------------------------------------------------------------------------------------------------------------- metrics


def scraped(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_metrics_for_the_operator(server: FakeServer, client: Client) -> None:
    def executed() -> float:
        return scraped(GET(server.url + "/metrics", headers=BEARER).text)["perdure_execs_total"][()]

    before = executed()
    Workspace.create("demo", client=client).commands.run(["true"])
    assert executed() == before + 1
    found = scraped(GET(server.url + "/metrics", headers=BEARER).text)
    assert found["perdure_http_requests_total"][("route", "create_workspace"), ("status", "2xx")] >= 1
    assert found["perdure_workspaces"][(("state", "running"),)] == 1
    transport = httpx2.HTTPTransport(uds=str(server.settings.api_socket))
    with httpx2.Client(transport=transport) as local:
        assert local.get("http://localhost/metrics").status_code == 200


async def test_metrics_are_for_nobody_else() -> None:
    async with stage() as staged:
        await staged.tenant("acme")
        for secret in (await staged.key("read"), await staged.key("operate"), await staged.key("admin", tenant="acme")):
            assert (await staged.ask(secret, "GET", "/metrics")).status_code == 403
        assert (await staged.ask("pdk_nobody", "GET", "/metrics")).status_code == 401
        assert (await staged.ask(await staged.key("admin"), "GET", "/metrics")).status_code == 200


def test_no_label_is_a_users_word(server: FakeServer, client: Client) -> None:
    """What a tenant or a caller chooses never becomes a label, so that nobody can make a scrape grow."""
    Workspace.create("a-name-of-mine", client=client)
    for path in ("/v1/workspaces/a-name-of-mine", "/v1/a-path-of-mine", "/v1/workspaces/a-name-of-mine/execs/an-exec-of-mine"):
        GET(server.url + path, headers={**BEARER, "x-request-id": "an-id-of-mine"})
    assert "of-mine" not in GET(server.url + "/metrics", headers=BEARER).text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_port_of_loopback_tells_metrics_and_nothing_else(settings: Settings) -> None:
    port = free_port()
    with FakeServer(settings.model_copy(update={"metrics_port": port})):
        url = f"http://127.0.0.1:{port}"
        assert scraped(GET(url + "/metrics").text)["perdure_workspaces"]
        assert GET(url + "/v1/health").status_code == 404
        assert POST(url + "/v1/workspaces", json={"name": "x"}).status_code == 404
        assert GET(url + "/metrics", headers={"host": "evil.example"}).status_code == 403


# ------------------------------------------------------------------------------------------------------------------ traces


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


async def test_an_exec_on_a_sleeping_workspace_is_one_trace(spans: InMemorySpanExporter) -> None:
    async with stage() as staged:
        await staged.ask(KEY, "POST", "/v1/workspaces", json={"name": "erin"})
        await staged.ask(KEY, "POST", "/v1/workspaces/erin/sleep")
        spans.clear()
        headers = {**BEARER, "traceparent": PARENT}
        body = {"argv": ["env", "TRACEPARENT"]}
        response = await staged.http.post("/v1/workspaces/erin/execs", json=body, headers=headers)
        assert response.status_code == 200
    found = {span.name: span for span in spans.get_finished_spans()}
    root, awaited, wake = (found[name] for name in ("POST start_exec", "workspace.await", "workspace.wake"))
    assert {f"{span.context.trace_id:032x}" for span in (root, awaited, wake)} == {PARENT.split("-")[1]}
    assert f"{parent_of(root):016x}" == PARENT.split("-")[2]
    assert parent_of(awaited) == root.context.span_id
    assert parent_of(wake) == awaited.context.span_id
    assert wake.attributes is not None
    assert wake.attributes["perdure.generation"] == 2
    trace = _printed(response.text)
    assert trace.split("-")[1] == PARENT.split("-")[1], "the command is in the trace too"


async def test_a_command_gets_its_callers_traceparent_without_any_tracing() -> None:
    async with stage() as staged:
        await staged.ask(KEY, "POST", "/v1/workspaces", json={"name": "erin"})
        headers = {**BEARER, "traceparent": PARENT}
        response = await staged.http.post("/v1/workspaces/erin/execs", json={"argv": ["env", "TRACEPARENT"]}, headers=headers)
    assert _printed(response.text) == PARENT


def _printed(stream: str) -> str:
    from base64 import b64decode

    events = [json.loads(line) for line in stream.splitlines()]
    return b"".join(b64decode(event["data"]) for event in events if event["type"] == "output").decode().strip()
