"""The feed and webhooks over HTTP: server-sent events, the SDK across broken connections, the command line, tenants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx2
import pytest

from perdure.core.errors import InvalidRequest, NotFound
from perdure.sdk import AsyncClient, Client, _core
from perdure.webhooks.model import Attempt, DeliveryState
from tests.fakes.api_server import FakeServer
from tests.fakes.events import FakeFeed, FakeWebhooks
from tests.fakes.workspaces import KEY
from tests.integration.api.stage import Stage, stage
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]

URL = "https://example.org/hook"


@pytest.fixture
async def staged() -> AsyncIterator[Stage]:
    async with stage() as made:
        yield made


@pytest.fixture
def feed(server: FakeServer) -> FakeFeed:
    """The fake server's, empty."""
    assert isinstance(server.services.feed, FakeFeed)
    server.services.feed.events.clear()
    return server.services.feed


@pytest.fixture
def webhooks(server: FakeServer) -> FakeWebhooks:
    assert isinstance(server.services.webhooks, FakeWebhooks)
    server.services.webhooks.__init__()  # type: ignore[misc]
    return server.services.webhooks


def put(server: FakeServer, feed: FakeFeed, *kinds: str, workspace: str = "demo") -> None:
    async def happen() -> None:
        for kind in kinds:
            feed.put(kind, workspace, to=kind)

    server.run(happen)


def parsed(text: str) -> list[dict[str, str]]:
    """Events of a stream, by the fields of their lines."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    return [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]


async def heard(staged: Stage, secret: str, **params: Any) -> list[dict[str, str]]:
    response = await staged.ask(secret, "GET", "/v1/events", params={"follow": False, **params})
    assert response.status_code == 200, response.text
    return parsed(response.text)


async def test_a_stream_is_one_of_server_sent_events(staged: Stage) -> None:
    await staged.ask(KEY, "POST", "/v1/workspaces", json={"name": "erin"})
    response = await staged.ask(KEY, "GET", "/v1/events", params={"follow": False})
    assert response.headers["content-type"].startswith("text/event-stream")
    begin, *found = parsed(response.text)
    assert begin == {"id": "0"}
    told = [json.loads(one["data"]) for one in found]
    assert [(one["id"], told[number]["seq"], told[number]["kind"]) for number, one in enumerate(found)] == [
        ("1", 1, "creating"),
        ("2", 2, "running"),
    ]
    assert told[0]["workspace"] == "erin"
    assert told[0]["body"]["by"] == "operator"


async def test_a_reader_goes_on_where_it_was(staged: Stage) -> None:
    await staged.ask(KEY, "POST", "/v1/workspaces", json={"name": "erin"})
    await staged.ask(KEY, "POST", "/v1/workspaces/erin/sleep")
    for how in ({"params": {"after": 2, "follow": False}}, {"params": {"follow": False}, "headers": {"last-event-id": "2"}}):
        headers = {"authorization": f"Bearer {KEY}", **how.get("headers", {})}
        response = await staged.http.get("/v1/events", params=how["params"], headers=headers)
        assert [one["id"] for one in parsed(response.text)] == ["2", "3", "4"]
    assert [one["id"] for one in await heard(staged, KEY, last=1)] == ["3", "4"]
    assert [one["id"] for one in await heard(staged, KEY, kind=["creating", "hibernated"])] == ["0", "1", "4"]
    assert [one["id"] for one in await heard(staged, KEY, workspace="erin", last=0)] == ["4"]


async def test_a_follower_hears_of_what_happens(staged: Stage) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    async with asyncio.timeout(60), staged.http.stream("GET", "/v1/events", headers=headers) as response:
        lines = response.aiter_lines()
        assert await anext(lines) == "id: 0"
        await staged.ask(KEY, "POST", "/v1/workspaces", json={"name": "erin"})
        found = []
        async for line in lines:
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: "))["kind"])
            if len(found) == 2:
                break
    assert found == ["creating", "running"]


async def test_tenants_hear_of_their_own_only(staged: Stage) -> None:
    await staged.tenant("acme")
    stranger, reader = await staged.key("admin", tenant="acme"), await staged.key("read")
    await staged.ask(KEY, "POST", "/v1/workspaces", json={"name": "erin"})
    await staged.ask(stranger, "POST", "/v1/workspaces", json={"name": "wile"})
    for secret, names in ((KEY, {"erin"}), (reader, {"erin"}), (stranger, {"wile"})):
        _, *found = await heard(staged, secret)
        assert {json.loads(one["data"])["workspace"] for one in found} == names
        assert [one["id"] for one in found] == ["1", "2"]
    refused = await staged.ask(stranger, "GET", "/v1/events", params={"workspace": "erin", "follow": False})
    assert refused.status_code == 404


@pytest.mark.parametrize(
    "query", ["after=-1", "after=x", "last=-1", "last=99999", "follow=perhaps", "after=99999999999999999999", "workspace=nobody"]
)
def test_nonsense_is_refused(server: FakeServer, query: str) -> None:
    answer = httpx2.get(f"{server.url}/v1/events?follow=false&{query}", headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code in {404, 422}
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("last", ["x", "-1", "٣", "9" * 30])
def test_a_last_event_id_that_is_none(server: FakeServer, last: str) -> None:
    headers = {b"authorization": f"Bearer {KEY}".encode(), b"last-event-id": last.encode()}
    answer = httpx2.get(f"{server.url}/v1/events?follow=false", headers=headers)
    assert answer.status_code == 422
    assert "Last-Event-ID" in answer.json()["error"]["message"]


# --------------------------------------------------------------------------------------------------------------------- SDK


def test_the_sdk_reads_and_ends(server: FakeServer, client: Client, feed: FakeFeed) -> None:
    put(server, feed, "creating", "running")
    put(server, feed, "creating", workspace="other")
    assert [(one.seq, one.kind, one.workspace) for one in client.events(follow=False)] == [
        (1, "creating", "demo"),
        (2, "running", "demo"),
        (3, "creating", "other"),
    ]
    assert [one.seq for one in client.events(after=1, kinds=["running", "creating"], follow=False)] == [2, 3]
    assert [one.seq for one in client.events(workspace="other", follow=False)] == [3]
    assert [one.seq for one in client.events(last=1, follow=False)] == [3]
    with pytest.raises(NotFound, match="'nobody'"):
        list(client.events(workspace="nobody"))
    with pytest.raises(InvalidRequest):
        list(client.events(after=-1))


async def test_a_follower_misses_nothing_when_the_server_goes_away(server: FakeServer, feed: FakeFeed) -> None:
    """What happens between a broken connection and the next one is not left out, even before the first event was heard."""
    async with AsyncClient(settings=server.settings) as client, aclosing(client.events()) as events:
        put(server, feed, "earlier")
        first = asyncio.ensure_future(anext(events))
        await asyncio.to_thread(server.wait_for, lambda: feed.readers > 0)
        await asyncio.to_thread(server.stop)
        put(server, feed, "meanwhile")
        await asyncio.to_thread(server.start)
        put(server, feed, "later")
        assert [(await first).kind, (await anext(events)).kind] == ["meanwhile", "later"]
    await asyncio.to_thread(server.wait_for, lambda: feed.readers == 0)


def test_webhooks_through_the_sdk(client: Client, webhooks: FakeWebhooks) -> None:
    made = client.create_webhook(URL, ["hibernated"])
    assert made.secret.startswith("whsec_")
    assert [(one.id, one.url, one.events, one.state) for one in client.webhooks()] == [
        (made.webhook.id, URL, ["hibernated"], "active")
    ]
    tried = client.test_webhook(made.webhook.id)
    assert (tried.delivered, tried.status) == (True, 204)
    client.remove_webhook(made.webhook.id)
    assert client.webhooks() == []
    for call in (client.remove_webhook, client.test_webhook, client.deliveries, client.redeliver):
        with pytest.raises(NotFound):
            call(made.webhook.id)
    with pytest.raises(InvalidRequest):
        client.create_webhook("ftp://example.org")


def test_deliveries_through_the_sdk(client: Client, webhooks: FakeWebhooks, monkeypatch: pytest.MonkeyPatch) -> None:
    made = client.create_webhook(URL).webhook.id
    for seq in range(1, 6):
        webhooks.put(made, seq, DeliveryState.PENDING if seq == 3 else DeliveryState.FAILED, "The receiver hung up.")
    monkeypatch.setattr(_core, "PAGE", 2)
    assert [(one.seq, one.state) for one in client.deliveries(made)] == [
        (seq, "pending" if seq == 3 else "failed") for seq in range(1, 6)
    ]
    assert client.redeliver(made, [4]) == [4]
    with pytest.raises(NotFound, match="Event 3 was not given up"):
        client.redeliver(made, [1, 3])
    assert client.redeliver(made) == [1, 2, 5]
    assert {one.state for one in client.deliveries(made)} == {"pending"}
    for wrong in ([0], [-1], [1 << 63], [1] * 1001):
        with pytest.raises(InvalidRequest):
            client.redeliver(made, wrong)


# ------------------------------------------------------------------------------------------------------------ command line


def test_events_on_the_command_line(server: FakeServer, feed: FakeFeed, perdure: Run) -> None:
    put(server, feed, *map(str, range(30)))
    lines = perdure("events").out.splitlines()
    assert len(lines) == 20
    assert lines[-1].split()[0] == "30"
    assert "demo" in lines[-1]
    assert [line.split()[0] for line in perdure("events --after 28").out.splitlines()] == ["29", "30"]
    told = [json.loads(line) for line in perdure("events --last 2 --json").out.splitlines()]
    assert [(one["seq"], one["kind"], one["body"]) for one in told] == [(29, "28", {"to": "28"}), (30, "29", {"to": "29"})]
    assert len(perdure("events --kind 3 --kind 4 --workspace demo").out.splitlines()) == 2
    missing = perdure("events --workspace nobody")
    assert (missing.code, missing.err.splitlines()[0]) == (1, "Error: There is and was no workspace 'nobody'.")


def test_webhooks_on_the_command_line(webhooks: FakeWebhooks, perdure: Run) -> None:
    assert "No webhooks" in perdure("webhook ls").out
    made = perdure(f"webhook create {URL} --events hibernated,failed")
    assert made.out.startswith("whsec_")
    (webhook_id,) = webhooks.rows
    assert webhook_id in made.err
    row = perdure("webhook ls").out.splitlines()[1].split()
    assert row[:5] == [webhook_id, URL, "hibernated,", "failed", "active"]
    assert json.loads(perdure("webhook ls --json").out)["webhooks"][0]["events"] == ["hibernated", "failed"]
    assert perdure(f"webhook test {webhook_id}").out.startswith("Delivered: HTTP status 204")
    webhooks.outcome = Attempt(500, "The receiver answered with HTTP status 500.", 0.1)
    failed = perdure(f"webhook test {webhook_id} --json")
    assert (failed.code, json.loads(failed.out)["error"]) == (1, "The receiver answered with HTTP status 500.")
    assert perdure(f"webhook rm {webhook_id}").out.strip() == f"{webhook_id} is removed"
    again = perdure(f"webhook rm {webhook_id} --json")
    assert (again.code, json.loads(again.err)["error"]["code"]) == (1, "not_found")
    assert perdure("webhook create ftp://x").code == 1


def test_given_up_events_on_the_command_line(webhooks: FakeWebhooks, perdure: Run) -> None:
    perdure(f"webhook create {URL}")
    (webhook_id,) = webhooks.rows
    assert perdure(f"webhook show {webhook_id}").out == "Everything was delivered.\n"
    assert perdure(f"webhook redeliver {webhook_id}").out == "Nothing was given up, so nothing is sent again.\n"
    for seq in (7, 8, 9):
        webhooks.put(webhook_id, seq, DeliveryState.FAILED, "The receiver hung up.")
    rows = perdure(f"webhook show {webhook_id}").out.splitlines()
    assert rows[0].split()[:2] == ["EVENT", "AT"] and len(rows) == 4
    assert rows[1].split()[0] == "7" and "given up" in rows[1] and "The receiver hung up." in rows[1]
    assert perdure(f"webhook redeliver {webhook_id} 8").out == "1 event is sent again.\n"
    wrong = perdure(f"webhook redeliver {webhook_id} 7 8 --json")
    assert (wrong.code, wrong.error["message"]) == (1, "Event 8 was not given up by this webhook.")
    assert perdure(f"webhook redeliver {webhook_id} --json").json == {"events": [7, 9]}
    assert {one["state"] for one in perdure(f"webhook show {webhook_id} --json").json["deliveries"]} == {"pending"}
    for words in ("show whk_nobody", "redeliver whk_nobody", f"redeliver {webhook_id} zero", f"redeliver {webhook_id} 0"):
        assert perdure(f"webhook {words}").code != 0
