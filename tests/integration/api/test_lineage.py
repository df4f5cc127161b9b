"""Snapshots in their tree, and retention, over HTTP: the SDK, the command line, and who sends nonsense."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2
import pytest

from perdure.core.errors import AlreadyExists, Conflict, InvalidRequest, NotFound
from perdure.sdk import AsyncClient, AsyncWorkspace, Client, Workspace
from tests.fakes.api_server import FakeServer
from tests.fakes.workspaces import KEY
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]


def test_the_tree_through_the_sdk(demo: Workspace) -> None:
    first = demo.checkpoint("first")
    demo.fork(1, names=["child"])
    second = demo.checkpoint()
    found = demo.snapshots()
    assert [(one.parent_id, one.is_head, one.kept, one.branches) for one in found] == [
        (None, False, ["named", "requested"], []),
        (first.id, False, ["origin"], ["child"]),
        (found[1].id, True, ["head", "requested"], []),
    ]
    assert [(one.own_bytes, one.shared_bytes, one.total_bytes) for one in found] == [(3 << 20, 4 << 20, 7 << 20)] * 3
    assert demo.name_snapshot(second.id, "second").name == "second"
    assert demo.name_snapshot("second", None).name is None
    with pytest.raises(AlreadyExists):
        demo.name_snapshot(second.id, "first")
    with pytest.raises(InvalidRequest, match="is not a snapshot name"):
        demo.name_snapshot(second.id, "a b")
    with pytest.raises(Conflict, match="'demo' wakes from it"):
        demo.remove_snapshot(second.id)
    with pytest.raises(Conflict, match="'child' was forked from it"):
        demo.remove_snapshot(found[1].id)
    assert demo.remove_snapshot("first").id == first.id
    with pytest.raises(NotFound):
        demo.remove_snapshot("first")
    for bad in ("", "..", "a/b"):
        with pytest.raises(InvalidRequest, match="is not a snapshot's name or id"):
            demo.remove_snapshot(bad)


def test_policies_through_the_sdk(client: Client) -> None:
    made = Workspace.create("demo", keep_snapshots=5, client=client)
    assert made.info.keep_snapshots == 5
    made.configure(keep_snapshots=0, idle_timeout_s=7)
    assert (made.info.keep_snapshots, made.info.idle_timeout_s) == (0, 7.0)
    made.configure(keep_snapshots="default")
    assert (made.info.keep_snapshots, made.info.idle_timeout_s) == (None, 7.0)
    with pytest.raises(InvalidRequest, match="nothing to change"):
        made.configure()
    for bad in (-1, 1001):
        with pytest.raises(InvalidRequest, match="keep_snapshots"):
            made.configure(keep_snapshots=bad)
        with pytest.raises(InvalidRequest, match="keep_snapshots"):
            Workspace.create("other", keep_snapshots=bad, client=client)


async def test_the_async_sdk_has_the_same(server: FakeServer) -> None:
    async with AsyncClient(settings=server.settings) as client:
        ws = await AsyncWorkspace.create("demo", client=client)
        await ws.checkpoint("one")
        await ws.checkpoint("two")
        await ws.configure(checkpoint_interval_s=5)
        assert ws.info.checkpoint_interval_s == 5
        assert [one.name for one in await ws.snapshots()] == ["one", "two"]
        await ws.name_snapshot("one", "uno")
        assert (await ws.remove_snapshot("uno")).name == "uno"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PATCH", "/v1/workspaces/demo", {"keep_snapshots": "some"}, 422),
        ("PATCH", "/v1/workspaces/demo", {"keep_snapshots": 1.5}, 422),
        ("PATCH", "/v1/workspaces/demo", {"keep_snapshots": -1}, 422),
        ("PATCH", "/v1/workspaces/demo", {"name": "other"}, 422),
        ("PATCH", "/v1/workspaces/demo", {}, 422),
        ("PATCH", "/v1/workspaces/demo", [], 422),
        ("PATCH", "/v1/workspaces/none", {"keep_snapshots": 1}, 404),
        ("PATCH", "/v1/workspaces/demo/snapshots/none", {"name": "x"}, 404),
        ("PATCH", "/v1/workspaces/demo/snapshots/none", {}, 422),
        ("PATCH", "/v1/workspaces/demo/snapshots/none", {"name": 7}, 422),
        ("DELETE", "/v1/workspaces/demo/snapshots/none", None, 404),
        ("DELETE", "/v1/workspaces/demo/snapshots/%2e%2e%2fx", None, 404),
        ("GET", "/v1/workspaces/none/snapshots", None, 404),
    ],
)
def test_nonsense_is_refused_in_a_sentence(
    demo: Workspace, server: FakeServer, method: str, path: str, body: Any, status: int
) -> None:
    with httpx2.Client(headers={"authorization": f"Bearer {KEY}"}, base_url=server.url) as http:
        content = None if body is None else json.dumps(body)
        answer = http.request(method, path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"].endswith(".")
    assert demo.refresh().keep_snapshots is None


def test_the_command_line(perdure: Run) -> None:
    assert perdure("create demo --keep-snapshots 3").code == 0
    assert "  keeps        its newest 3 snapshots\n" in perdure("show demo").out
    assert perdure("snapshot ls demo").out == "demo has no snapshots of its own.\n"
    for name in ("first", "second"):
        perdure(f"checkpoint demo --name {name}")
    perdure("fork demo --name child")
    perdure("checkpoint demo")
    listing = re.sub(r"\d+ d ago", "N d ago", perdure("snapshot ls demo").out)
    listing = re.sub(r"snp_0+", "snp_", listing)
    assert [re.split(" {2,}", line) for line in listing.splitlines()] == [
        ["SNAPSHOT", "NAME", "REASON", "DURABLE", "KEPT", "OWN", "SHARED", "TOTAL", "MADE", "BRANCHES"],
        ["snp_2", "first", "requested", "local", "named, requested", "3.1 MB", "4.2 MB", "7.3 MB", "N d ago"],
        ["snp_3", "second", "requested", "local", "named, requested", "3.1 MB", "4.2 MB", "7.3 MB", "N d ago"],
        ["snp_4", "fork", "local", "origin", "3.1 MB", "4.2 MB", "7.3 MB", "N d ago", "child"],
        ["snp_6 *", "requested", "local", "head, requested", "3.1 MB", "4.2 MB", "7.3 MB", "N d ago"],
    ]
    told = perdure("configure demo --keep-snapshots default --idle-timeout-s 0").out
    assert told.startswith("demo never sleeps by itself, a checkpoint every 60 s, keeps its last snapshot")
    assert perdure("snapshot name demo first good").out.endswith(" is named good\n")
    assert perdure("snapshot name demo good --clear").out.endswith(" has no name; retention may remove it\n")
    assert perdure("snapshot rm demo second").out.endswith(" (second) is removed\n")
    told = [re.split(" {2,}", line.strip())[2:] for line in perdure("log demo").out.splitlines()]
    assert ["configured", "keep_snapshots None; idle_timeout_s 0.0"] in told
    assert [what for what, *_ in told[-4:]] == ["configured", "snapshot-named", "snapshot-named", "snapshot-removed"]


def test_the_command_line_as_json(perdure: Run) -> None:
    perdure("create demo")
    perdure("checkpoint demo --name first")
    perdure("checkpoint demo --name second")
    assert perdure("configure --json demo --keep-snapshots 9").json["keep_snapshots"] == 9
    assert [one["is_head"] for one in perdure("snapshot ls --json demo").json["snapshots"]] == [False, True]
    named = perdure("snapshot name --json demo first uno").json
    assert named["name"] == "uno"
    assert perdure("snapshot rm --json demo uno").json == {"removed": [named["id"]]}


def test_what_the_command_line_refuses(perdure: Run) -> None:
    perdure("create demo")
    perdure("checkpoint demo --name head")
    for line, code, says in [
        ("snapshot rm demo head", "conflict", "'demo' wakes from it"),
        ("snapshot rm demo none", "not_found", "no snapshot 'none'"),
        ("snapshot rm none head", "not_found", "no workspace 'none'"),
        ("snapshot name demo head", "invalid_request", "a name or --clear"),
        ("snapshot name demo head x --clear", "invalid_request", "a name or --clear"),
        ("snapshot name demo head snp_x", "invalid_request", "is not a snapshot name"),
        ("checkpoint demo --name=", "invalid_request", "'' is not a snapshot name"),
        ("configure demo", "invalid_request", "nothing to change"),
        ("configure demo --keep-snapshots many", "invalid_request", "'many' is no number"),
        ("configure demo --keep-snapshots 1001", "invalid_request", "keep_snapshots"),
        ("configure demo --idle-timeout-s -1", "invalid_request", "idle_timeout_s"),
        ("create other --keep-snapshots -1", "invalid_request", "keep_snapshots"),
    ]:
        answer = perdure(f"--json {line}")
        assert (answer.code, answer.error["code"], answer.out) == (1, code, ""), (line, answer.err)
        assert says in answer.error["message"], (line, answer.error)
