"""Lists in pages, through HTTP, the SDK and the command line."""

from __future__ import annotations

import httpx2
import pytest

from perdure.core.errors import InvalidRequest
from perdure.sdk import AsyncClient, AsyncWorkspace, Client, Workspace, _core
from tests.fakes.api_server import FakeServer
from tests.fakes.workspaces import KEY
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]  # the fixture

BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def five(client: Client) -> list[str]:
    names = [f"ws-{number}" for number in range(5)]
    for number, name in enumerate(names):
        Workspace.create(name, client=client, metadata={"user": str(number % 2)})
    return names


def test_a_cursor_leads_through_the_whole_list(server: FakeServer, five: list[str]) -> None:
    with httpx2.Client(base_url=server.url, headers=BEARER) as http:
        seen, query = [], {"limit": "2"}
        while True:
            answer = http.get("/v1/workspaces", params=query).json()
            assert len(answer["workspaces"]) <= 2
            seen += [one["name"] for one in answer["workspaces"]]
            if answer["next_cursor"] is None:
                break
            query["cursor"] = answer["next_cursor"]
        assert seen == five


LISTS = ("/v1/workspaces", "/v1/workspaces/ws-0/snapshots", "/v1/workspaces/ws-0/log")
BAD = ("limit=0", "limit=10001", "limit=many", "cursor=", "cursor=x", "cursor=%00", "cursor=" + "A" * 201)
BAD_PAGES = [(path, query) for path in LISTS for query in BAD]
BAD_PAGES += [(LISTS[0], query) for query in ("limit=1001", "metadata=a", "metadata==b")]


@pytest.mark.parametrize(("path", "query"), BAD_PAGES)
def test_bad_pages_are_told(server: FakeServer, five: list[str], path: str, query: str) -> None:
    with httpx2.Client(base_url=server.url, headers=BEARER) as http:
        response = http.get(f"{path}?{query}")
        assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_request")


def test_the_sdk_pages_by_itself(client: Client, five: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "PAGE", 2)
    assert [one.name for one in Workspace.list(client=client)] == five
    assert [one.name for one in Workspace.iterate(client=client, limit=3)] == five[:3]
    assert [one.name for one in Workspace.iterate(client=client, metadata={"user": "1"})] == ["ws-1", "ws-3"]
    assert list(Workspace.iterate(client=client, limit=0)) == []
    ws = Workspace.connect("ws-0", client=client)
    taken = [ws.checkpoint().id for _ in range(5)]
    assert [one.id for one in ws.snapshots()] == taken
    assert [one.seq for one in ws.log()] == [1, 2, 3, 4, 5, 6]
    assert [one.seq for one in ws.log(after_seq=1, limit=3)] == [2, 3, 4]


def test_an_iterator_asks_only_for_what_is_taken(client: Client, five: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "PAGE", 2)
    asked = []
    fetch = client.fetch

    def counted(call: _core.Call, *rest: object) -> object:
        asked.append(dict(call.query).get("cursor"))
        return fetch(call, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(client, "fetch", counted)
    found = Workspace.iterate(client=client)
    assert [next(found).name, next(found).name] == five[:2]
    assert len(asked) == 1
    assert next(found).name == "ws-2"
    assert len(asked) == 2 and asked[1] is not None


async def test_the_async_sdk_pages_by_itself(server: FakeServer, five: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "PAGE", 2)
    async with AsyncClient(settings=server.settings) as client:
        assert [one.name async for one in AsyncWorkspace.iterate(client=client)] == five
        assert [one.name for one in await AsyncWorkspace.list(client=client, name_prefix="ws-4")] == ["ws-4"]
        with pytest.raises(InvalidRequest, match="no option 'colour'"):
            await AsyncWorkspace.list(client=client, colour="red")  # type: ignore[call-arg]


def test_the_command_line_filters_and_limits(perdure: Run, five: list[str]) -> None:
    def names(line: str) -> list[str]:
        return [one["name"] for one in perdure(f"{line} --json").json["workspaces"]]

    assert names("ls") == five
    assert names("ls --metadata user=1 --state running") == ["ws-1", "ws-3"]
    assert names("ls --limit 2") == five[:2]
    assert names("ls --prefix ws-3 --image base") == ["ws-3"]
    assert names("ls --image dev") == []
    assert perdure("ls --prefix nobody").out == "No workspace is like that.\n"
    assert perdure("ls --limit 0").code == 2
    assert perdure("ls --metadata user").err.startswith("Error: --metadata 'user' is not KEY=VALUE.")
