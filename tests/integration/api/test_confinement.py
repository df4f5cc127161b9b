"""Every answer of the API says which protections hold on its host; visitors, and who may not ask, are not told."""

from __future__ import annotations

import socket
from dataclasses import replace

import httpx2
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from perdure.api.confined import stated
from perdure.core.config import Settings
from perdure.sdk import Workspace
from perdure.wire.public import CONFINEMENT_HEADER
from tests.fakes.api_server import FakeServer
from tests.fakes.workspaces import CONFINEMENT, KEY
from tests.integration.api.stage import ROUTES, stage
from tests.integration.api.test_keys import BODIES, absent

BEARER = {"authorization": f"Bearer {KEY}"}


async def test_every_route_says_it_with_success_and_with_failure() -> None:
    """All routes of the document, over the real service and database: those that find something, and those that do not."""
    statuses = set()
    async with stage() as staged:
        for name, (method, path) in ROUTES.items():
            response = await staged.ask(KEY, method, absent(path), **BODIES.get(name, {}))
            assert response.headers.get(CONFINEMENT_HEADER) == stated(CONFINEMENT), name
            assert len(response.headers.get_list(CONFINEMENT_HEADER)) == 1, name
            statuses.add(response.status_code // 100)
        described = (await staged.ask(KEY, "GET", "/v1/openapi.json")).json()
    assert statuses >= {2, 4}
    for path, item in described["paths"].items():
        for method, operation in item.items():
            for status, answer in operation["responses"].items():
                found = described["components"]["responses"]["Error"] if "$ref" in answer else answer
                assert "Perdure-Confinement" in found["headers"], (method, path, status)


def test_defects_and_paths_that_lead_nowhere_say_it_too(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(server.workspaces, "get", breaks)
    aws = ("/2025-12-01/durable-executions/none", "/2015-03-31/functions/none/nothing")
    statuses = []
    for path in ("/v1/workspaces/demo", "/nowhere", *aws):
        response = httpx2.get(server.url + path, headers=BEARER, timeout=60)
        assert response.headers.get(CONFINEMENT_HEADER) == stated(CONFINEMENT), path
        statuses.append(response.status_code)
    assert statuses[:2] == [500, 404] and min(statuses) >= 400


def test_a_host_where_no_workspace_can_run_says_none(settings: Settings) -> None:
    with FakeServer(settings.model_copy(update={"url": None, "api_key": None})) as running:
        running.stop()
        running.services = replace(running.services, confinement=None)
        running.start()
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(settings.api_socket)), base_url="http://local") as client:
            assert client.get("/v1/health").headers[CONFINEMENT_HEADER] == "none"


def test_who_has_not_shown_that_he_may_ask_learns_nothing(server: FakeServer) -> None:
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {**BEARER, "host": "evil.example"},
        {**BEARER, "origin": "http://evil.example"},
    ):
        response = httpx2.get(server.url + "/v1/health", headers=headers, timeout=60)
        assert response.status_code in (401, 403) and CONFINEMENT_HEADER not in response.headers


async def test_what_a_program_answers_is_not_the_apis() -> None:
    async with stage() as staged:
        response = await staged.ask(KEY, "GET", "/v1/workspaces/absent/ports/80/")
        assert response.status_code == 404 and CONFINEMENT_HEADER not in response.headers


def test_a_websocket_says_it_opened_and_refused(server: FakeServer, demo: Workspace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        url = server.url.replace("http://", "ws://") + f"/v1/workspaces/demo/tcp/{port}"
        with pytest.raises(InvalidStatus) as refused:
            connect(url, additional_headers=BEARER, proxy=None)
        assert refused.value.response.headers[CONFINEMENT_HEADER] == stated(CONFINEMENT)
        server.workspaces.world("demo").ports.add(port)
        with connect(url, additional_headers=BEARER, proxy=None) as opened:
            assert opened.response is not None
            assert opened.response.headers[CONFINEMENT_HEADER] == stated(CONFINEMENT)
