"""Rewind, promote, discard and the tree: through the SDK and on the command line."""

from __future__ import annotations

import pytest

from perdure.core.errors import Conflict, InvalidRequest, NotFound
from perdure.sdk import AsyncClient, AsyncWorkspace, Client, Workspace
from tests.fakes.api_server import FakeServer
from tests.integration.api.test_cli import Run, perdure  # noqa: F401 - a fixture


def forked(demo: Workspace, *names: str) -> list[Workspace]:
    return [one for one in demo.fork(len(names), names=names) if isinstance(one, Workspace)]


def test_rewind_and_back(demo: Workspace, client: Client) -> None:
    demo.checkpoint("early")
    before = demo.info.generation
    report = demo.rewind("early")
    assert report.generation == demo.info.generation > before
    assert report.memory_reason == "rewound: on request, to snapshot early"
    assert demo.report == report
    assert report.kept_branch is not None
    kept = Workspace.connect(report.kept_branch, wake=False, client=client)
    assert (kept.info.kind, kept.info.state, kept.info.parent_id) == ("branch", "hibernated", demo.id)
    back = kept.promote()
    assert back.id == demo.id
    assert back.report is not None
    assert back.report.kept_branch not in {None, report.kept_branch}
    with pytest.raises(NotFound):
        kept.refresh()


def test_what_is_refused(demo: Workspace) -> None:
    with pytest.raises(NotFound, match="has no snapshot 'nope'"):
        demo.rewind("nope")
    with pytest.raises(InvalidRequest):
        demo.rewind("x" * 5000)
    with pytest.raises(Conflict, match="not a branch"):
        demo.promote()
    with pytest.raises(Conflict, match="not a branch"):
        demo.discard()


def test_the_tree(demo: Workspace, client: Client) -> None:
    (left, right) = forked(demo, "left", "right")
    (deep,) = forked(left, "deep")
    names = [(node.depth, node.workspace.name) for node in deep.tree()]
    assert names == [(0, "demo"), (1, "left"), (2, "deep"), (1, "right")]
    right.discard()
    assert [node.workspace.name for node in demo.tree()] == ["demo", "left", "deep"]
    with pytest.raises(NotFound):
        Workspace.connect("right", wake=False, client=client)


async def test_the_async_twin(server: FakeServer, demo: Workspace) -> None:
    async with AsyncClient(settings=server.settings) as client:
        ws = await AsyncWorkspace.connect("demo", client=client)
        await ws.checkpoint("early")
        report = await ws.rewind("early")
        assert report.kept_branch is not None
        kept = await AsyncWorkspace.connect(report.kept_branch, wake=False, client=client)
        assert (await kept.promote()).id == ws.id
        assert len(await ws.tree()) == 2


# ----------------------------------------------------------------------------------------------------------- on the command line


def test_on_the_command_line(perdure: Run) -> None:  # noqa: F811
    perdure("create demo")
    perdure("checkpoint demo --name early")
    line = perdure("rewind demo early").out
    assert line.startswith("demo is awake: memory kept (rewound: on request, to snapshot early), disk kept")
    kept = line.strip().rpartition(" ")[2]
    assert f"what it was before is kept as {kept}" in line
    perdure("fork demo --name left --name right")
    tree = [row.split() for row in perdure("branch ls demo").out.splitlines()]
    assert tree[0] == ["NAME", "KIND", "STATE", "FORKED", "OWN", "TOTAL"]
    assert [row[:4] for row in tree[1:]] == [
        ["demo", "←", "workspace", "running"],
        ["├─", kept, "branch", "hibernated"],
        ["├─", "left", "branch", "running"],
        ["└─", "right", "branch", "running"],
    ]
    assert perdure("tree left").out.splitlines()[3].split()[:4] == ["├─", "left", "←", "branch"]
    assert perdure("branches promote left").out.startswith("demo goes on as left was: memory kept (rewound: to what branch left")
    gone = perdure(f"branch discard right {kept}").out.splitlines()
    assert gone[0].startswith("right is discarded; its thread stays: perdure log ws_")


def test_each_prints_one_document(perdure: Run) -> None:  # noqa: F811
    perdure("create demo")
    perdure("checkpoint demo --name early")
    rewound = perdure("rewind demo early --json").json
    assert set(rewound) == {"workspace", "report"}
    assert rewound["report"]["kept_branch"]
    perdure("fork demo --name left --name right")
    names = [node["workspace"]["name"] for node in perdure("branch ls demo --json").json["nodes"]]
    assert (names[0], names[2:]) == ("demo", ["left", "right"])
    promoted = perdure("--json branch promote left").json
    assert (promoted["workspace"]["name"], bool(promoted["report"]["kept_branch"])) == ("demo", True)
    assert len(perdure("branch discard right --json").json["discarded"]) == 1


def test_mistakes_are_told_in_a_sentence(perdure: Run) -> None:  # noqa: F811
    perdure("create demo")
    for line, code, status in [
        ("rewind demo nope", "not_found", 1),
        ("rewind demo", "usage", 2),
        ("rewind none early", "not_found", 1),
        ("branch promote demo", "conflict", 1),
        ("branch promote none", "not_found", 1),
        ("branch discard demo", "conflict", 1),
        ("branch discard none", "not_found", 1),
        ("branch ls none", "not_found", 1),
    ]:
        answer = perdure(f"{line} --json")
        assert (answer.error["code"], answer.code, answer.out) == (code, status, ""), line
        assert answer.error["hint"], line
    perdure("fork demo --name left")
    assert perdure("branch discard left none").code == 1
    assert "left" in perdure("ls").out, "all must exist before any is discarded"
