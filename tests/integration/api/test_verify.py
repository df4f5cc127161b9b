"""Verification over the wire: the API's stream, the SDK, and the command."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure.core.errors import CorruptSnapshot, InvalidRequest, NotFound
from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.sdk import Client, Workspace
from perdure.wire import public
from perdure.wire.node import Damage
from perdure.workspaces.model import Upload, UploadState
from tests.fakes.api_server import FakeServer
from tests.fakes.memory_guest import MOMENT
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]  # the fixture

PROBLEM = "The stored pages in seg_x.pages are damaged: a page's checksum does not hold."


def spoil(server: FakeServer, snapshot_id: str) -> None:
    server.workspaces.damage[SnapshotId(snapshot_id)] = (Damage("segments/seg_x.pages", PROBLEM),)


@pytest.fixture
def pair(demo: Workspace) -> tuple[str, str]:
    """Two snapshots of demo, the second on the first."""
    return demo.checkpoint("one").id, demo.checkpoint("two").id


def test_what_is_whole(client: Client, demo: Workspace, pair: tuple[str, str]) -> None:
    events = list(client.verify("demo"))
    assert [event.type for event in events] == ["progress", "snapshot", "progress", "snapshot", "done"]
    assert (events[0].file, events[0].count) == (f"snapshots/{pair[0]}/manifest.json", 2)
    done = events[-1]
    assert (done.count, done.damaged, done.read_bytes) == (2, 0, 2000)
    assert [(one.snapshot_id, one.name, one.intact, one.trial) for one in demo.verify()] == [
        (pair[0], "one", True, None), (pair[1], "two", True, None),
    ]  # fmt: skip


def test_damage_is_a_result_and_no_error(server: FakeServer, demo: Workspace, pair: tuple[str, str]) -> None:
    spoil(server, pair[1])
    one, two = demo.verify(boot=True)
    assert one.intact and one.trial is not None and one.trial.kind == "memory"
    assert not two.intact and two.trial is None
    assert [(found.file, found.problem) for found in two.damage] == [("segments/seg_x.pages", PROBLEM)]
    assert two.ancestor == pair[0]


def test_what_does_not_exist_is_an_error(client: Client, demo: Workspace, pair: tuple[str, str]) -> None:
    with pytest.raises(NotFound):
        list(client.verify("nobody"))
    with pytest.raises(NotFound):
        demo.verify("three")
    with pytest.raises(InvalidRequest):
        list(client.verify(snapshot="one"))


def test_an_error_keeps_its_details_on_the_way(client: Client, server: FakeServer) -> None:
    refused = CorruptSnapshot("The file is damaged.", file="segments/seg_x.pages", hint="Do something.")
    refused.details = {**refused.details, "ancestor": "snp_before"}
    server.workspaces.refuse = refused
    with pytest.raises(CorruptSnapshot) as caught:
        Workspace.create("broken", client=client)
    assert caught.value.details == {"file": "segments/seg_x.pages", "ancestor": "snp_before"}


def test_the_command_tells_people(perdure: Run, server: FakeServer, pair: tuple[str, str]) -> None:
    answer = perdure("snapshot verify demo --boot")
    assert answer.code == 0
    assert answer.out.splitlines() == [
        f"demo {pair[0]} (one) is intact; it woke with its memory in 2 s",
        f"demo {pair[1]} (two) is intact; it woke with its memory in 2 s",
        "2 snapshots checked, 2.0 kB read: all intact",
    ]
    spoil(server, pair[1])
    answer = perdure("snapshot verify demo two")
    assert answer.code == 1
    assert answer.out.splitlines() == [
        f"demo {pair[1]} (two) is damaged",
        f"  segments/seg_x.pages: {PROBLEM}",
        f"  the newest intact one before it is {pair[0]}; its disk can be booted without its memory",
        "1 snapshot checked, 1.0 kB read: 1 damaged",
    ]


def test_where_the_other_copy_is(perdure: Run, server: FakeServer, demo: Workspace, pair: tuple[str, str]) -> None:
    history = server.workspaces.history[WorkspaceId(demo.id)]
    history[0] = replace(history[0], upload=Upload(UploadState.UPLOADING, 10 << 20, 5 << 20, 40 << 20))
    history[1] = replace(history[1], stored_at=MOMENT)
    server.workspaces.only_in_store.add(SnapshotId(pair[1]))
    answer = perdure("snapshot verify demo --boot")
    assert answer.err == ""
    assert answer.out.splitlines()[:2] == [
        f"demo {pair[0]} (one) is intact; it woke with its memory in 2 s; uploading, 10.5 MB of about 41.9 MB done, 5.2 MB sent",
        f"demo {pair[1]} (two) is intact; read from the object store, for the node does not have it, and not started",
    ]
    one, two = demo.verify()
    assert (one.read_from, one.durable, one.upload and one.upload.state) == ("node", "local", public.UploadState.UPLOADING)
    assert (two.read_from, two.durable, two.upload) == ("store", "store", None)


def test_the_command_tells_programs(perdure: Run, server: FakeServer, pair: tuple[str, str]) -> None:
    spoil(server, pair[0])
    answer = perdure("snapshot verify --all --json")
    assert answer.code == 1
    assert answer.json["ok"] is False
    assert answer.json["checked"] == {"snapshots": 2, "read_bytes": 2000, "booted": 0}
    assert answer.json["damage"] == [{"file": "segments/seg_x.pages", "problem": PROBLEM}]
    assert [one["intact"] for one in answer.json["snapshots"]] == [False, True]
    spoiled = perdure("snapshots verify demo two --json")
    assert (spoiled.code, spoiled.json["ok"]) == (0, True)


def test_the_command_with_nothing_to_do_or_wrong_words(perdure: Run, demo: Workspace) -> None:
    answer = perdure("snapshot verify demo")
    assert (answer.code, answer.out) == (0, "There are no snapshots to verify.\n")
    assert perdure("snapshot verify --json").error["code"] == "invalid_request"
    assert perdure("snapshot verify demo --all --json").error["code"] == "invalid_request"
    assert perdure("snapshot verify nobody --json").error["code"] == "not_found"
