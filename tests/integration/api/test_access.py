"""Who may speak: every route refuses a caller without key, with a wrong key, with a foreign Host or Origin."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import httpx2
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from perdure.api.app import create_app
from perdure.core.config import Settings
from perdure.core.errors import Conflict, HostUnfit
from perdure.sdk import Client
from tests.fakes.api_server import FakeServer
from tests.fakes.workspaces import KEY, fake_services

OPENAPI = Path(__file__).parents[3] / "docs/openapi.json"
ROUTES = [(method.upper(), path) for path, item in json.loads(OPENAPI.read_text())["paths"].items() for method in item]
BEARER = {"authorization": f"Bearer {KEY}"}


def _url(server: FakeServer, path: str) -> str:
    return server.url + path.replace("{ref}", "demo").replace("{exec_id}", "exe_1")


def _code(response: httpx2.Response) -> Any:
    return response.json()["error"]["code"]


def test_every_route_refuses_strangers(server: FakeServer) -> None:
    strangers: list[tuple[dict[str, str], int, str]] = [
        ({}, 401, "unauthenticated"),
        ({"authorization": "Bearer wrong"}, 401, "unauthenticated"),
        ({"authorization": f"Basic {KEY}"}, 401, "unauthenticated"),
        ({**BEARER, "host": "evil.example"}, 403, "forbidden"),
        ({**BEARER, "origin": "https://evil.example"}, 403, "forbidden"),
        ({**BEARER, "origin": "null"}, 403, "forbidden"),
    ]
    assert len(ROUTES) > 25
    with httpx2.Client() as http:
        for method, path in [*ROUTES, ("GET", "/v1/openapi.json"), ("GET", "/nowhere")]:
            for headers, status, code in strangers:
                response = http.request(method, _url(server, path), headers=headers)
                assert (response.status_code, _code(response)) == (status, code), (method, path, headers)
    assert server.workspaces.calls == []


def test_tunnel_refuses_strangers(server: FakeServer) -> None:
    url = server.url.replace("http", "ws") + "/v1/workspaces/demo/tcp/80"
    for headers, status in (({}, 401), ({**BEARER, "Origin": "https://evil.example"}, 403)):
        with pytest.raises(InvalidStatus) as caught, connect(url, additional_headers=headers):
            pass
        assert caught.value.response.status_code == status


def test_key_host_and_origin_of_this_machine_are_accepted(server: FakeServer) -> None:
    with httpx2.Client(headers=BEARER) as http:
        assert http.get(server.url + "/v1/health").status_code == 200
        for host in ("localhost:99", "127.0.0.1", "[::1]:7070"):
            assert http.get(server.url + "/v1/health", headers={"host": host}).status_code == 200
        assert http.get(server.url + "/v1/health", headers={"origin": "http://localhost:3000"}).status_code == 200


def test_operator_may_add_host_names(settings: Settings) -> None:
    with (
        FakeServer(settings.model_copy(update={"allowed_hosts": ("perdure.example",)})) as server,
        httpx2.Client(headers=BEARER) as http,
    ):
        assert http.get(server.url + "/v1/health", headers={"host": "Perdure.Example"}).status_code == 200


def test_socket_needs_no_key_and_only_its_owner_can_open_it(server: FakeServer, client: Client) -> None:
    assert client.health().status == "ok"
    assert stat.S_IMODE(server.settings.api_socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(server.settings.run_dir.stat().st_mode) == 0o700


async def test_application_without_guard_serves_nobody(settings: Settings) -> None:
    app = create_app(fake_services(settings)[0])
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as http:
        response = await http.get("/v1/health", headers=BEARER)
    assert response.status_code == 401


def test_second_server_on_the_same_home_is_refused(server: FakeServer) -> None:
    with pytest.raises(Conflict, match="already answers"), FakeServer(server.settings):
        pass
    with Client(settings=server.settings) as client:
        assert client.health().status == "ok"


def test_socket_of_a_dead_server_is_replaced(settings: Settings) -> None:
    with FakeServer(settings):
        dead = settings.api_socket.with_name("dead")
        settings.api_socket.rename(dead)
    dead.rename(settings.api_socket)
    with FakeServer(settings), Client(settings=settings) as client:
        assert client.health().status == "ok"


def test_taken_port_and_long_path_are_told(server: FakeServer, settings: Settings, tmp_path: Path) -> None:
    port = int(server.url.rpartition(":")[2])
    with (
        pytest.raises(Conflict, match="cannot listen"),
        FakeServer(settings.model_copy(update={"home": tmp_path, "listen_port": port})),
    ):
        pass
    with pytest.raises(HostUnfit, match="too long"), FakeServer(settings.model_copy(update={"home": tmp_path / ("x" * 100)})):
        pass


def test_bad_requests_are_one_sentence(server: FakeServer) -> None:
    with httpx2.Client(headers=BEARER, base_url=server.url) as http:
        response = http.post("/v1/workspaces", json={"name": "a", "colour": "red"})
        assert (response.status_code, response.json()["error"]["message"]) == (
            422,
            "The request is not valid: colour: extra inputs are not permitted.",
        )
        assert "perdure-request-id" in response.headers
        assert _code(http.post("/v1/workspaces", content=b"{", headers={"content-type": "application/json"})) == "invalid_request"
        assert _code(http.get("/v1/nowhere")) == "not_found"
        assert _code(http.put("/v1/health")) == "method_not_allowed"
        large = http.post("/v1/workspaces", json={"name": "a", "metadata": {"x": "y" * (5 << 20)}})
        assert (large.status_code, _code(large)) == (413, "body_too_large")


@pytest.mark.parametrize("path", ["/v1/workspaces/stdin", "/v1/images/stdin", "/v1/workspaces/a/files/content/stdin", "/stdin"])
def test_the_body_limit_is_lifted_by_route_and_not_by_name(server: FakeServer, path: str) -> None:
    with httpx2.Client(headers=BEARER, base_url=server.url) as http:
        response = http.post(path, content=b"x" * (5 << 20))
    assert (response.status_code, _code(response)) == (413, "body_too_large")


def test_body_limit_holds_without_declared_length(server: FakeServer) -> None:
    def endless() -> Any:
        for _ in range(100):
            yield b"x" * 65536

    with httpx2.Client(headers={**BEARER, "content-type": "application/json"}, base_url=server.url) as http:
        response = http.post("/v1/workspaces", content=endless())
    assert (response.status_code, _code(response)) == (413, "body_too_large")
