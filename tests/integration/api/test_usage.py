"""Usage over HTTP: the SDK, the command line, and who asks nonsense."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import httpx2
import pytest

from perdure.core.errors import InvalidRequest, NotFound
from perdure.sdk import AsyncClient, Client, Workspace
from tests.fakes.api_server import FakeServer
from tests.fakes.metering import FakeMetering
from tests.fakes.workspaces import KEY
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]

MARCH = datetime(2026, 3, 1, tzinfo=UTC)


def test_usage_through_the_sdk(demo: Workspace, client: Client, server: FakeServer) -> None:
    Workspace.create("other", client=client)
    report = client.usage()
    assert (report.by, report.since, report.until) == ("workspace", None, None)
    assert [(row.name, row.state, row.workspace_id is None) for row in report.rows] == [
        ("demo", "running", False),
        ("other", "running", False),
    ]
    one = client.usage("demo", since=MARCH).rows[0]
    assert (one.awake_s, one.paused_s, one.asleep_s, one.losses, one.cpu_s) == (5400.0, 180.0, 360_000.0, 1, 12.25)
    assert isinstance(server.services.metering, FakeMetering)
    assert server.services.metering.asked == (MARCH, None)
    (together,) = client.usage(by="tenant", until=MARCH).rows
    assert (together.name, together.workspace_id, together.tenant_id) == (None, None, "ten_default")
    assert (together.awake_s, together.uploaded_bytes, together.losses) == (10_800.0, 60_000_000, 2)
    assert (together.request_bytes, together.answer_bytes) == (10_000_000, 13_200_000)
    assert server.services.metering.asked == (None, MARCH)
    with pytest.raises(NotFound, match="'nobody'"):
        client.usage("nobody")
    with pytest.raises(InvalidRequest, match="without its offset"):
        client.usage(since=datetime(2026, 3, 1))  # noqa: DTZ001 - that is the mistake


async def test_usage_through_the_async_sdk(server: FakeServer, demo: Workspace) -> None:
    async with AsyncClient(settings=server.settings) as client:
        assert [row.name for row in (await client.usage("demo")).rows] == ["demo"]


@pytest.mark.parametrize("query", ["from=yesterday", "from=2026-03-01T00:00:00", "to=", "by=planet"])
def test_nonsense_is_refused(server: FakeServer, query: str) -> None:
    answer = httpx2.get(f"{server.url}/v1/usage?{query}", headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"]


def test_usage_on_the_command_line(demo: Workspace, server: FakeServer, perdure: Run) -> None:
    lines = perdure("usage").out.splitlines()
    assert lines[0].split("  ")[0] == "WORKSPACE"
    assert lines[1].split() == ["demo", "running", "1.50", "0.05", "100.00", "12.2", "101.000", "45.0", "1"]
    assert perdure("usage demo --by tenant").out.splitlines()[1].split()[:2] == ["ten_default", "-"]
    told = json.loads(perdure("usage demo --from 2026-03-01T00:00+00:00 --to 2026-03-02T01:00+01:00 --json").out)
    assert told["rows"][0]["cpu_s"] == 12.25
    assert datetime.fromisoformat(told["since"]) == MARCH
    assert datetime.fromisoformat(told["until"]) == datetime(2026, 3, 2, tzinfo=UTC)
    assert isinstance(server.services.metering, FakeMetering)
    perdure("usage --from 2026-03-01")
    assert server.services.metering.asked[0] == datetime(2026, 3, 1).astimezone()
    wrong = perdure("usage --from lately")
    assert (wrong.code, wrong.err.splitlines()[0]) == (1, "Error: --from 'lately' is not a time.")
    assert perdure("usage nobody").code == 1


def test_usage_of_nobody(server: FakeServer, perdure: Run) -> None:
    assert "No workspaces yet" in perdure("usage").out
    assert json.loads(perdure("usage --json").out)["rows"] == []
