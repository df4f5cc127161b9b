"""Where a snapshot is durable, and waiting for the object store: over HTTP, by SDK and command line."""

from __future__ import annotations

import asyncio
import os
import subprocess
from dataclasses import replace

import httpx2
import pytest

from perdure.core.errors import Conflict, DeadlineExceeded, NotFound
from perdure.sdk import AsyncClient, AsyncWorkspace, Workspace
from perdure.wire import public
from perdure.wire.node import Fetching
from perdure.workspaces.model import Upload, UploadState, WorkspaceState
from tests.fakes.api_server import FakeServer
from tests.fakes.workspaces import KEY
from tests.integration.api.test_cli import PROGRAM, Run, environment, perdure
from tests.integration.api.test_cli_create import let_go

__all__ = ["perdure"]


def uploading(server: FakeServer, upload: Upload | None) -> None:
    """What every snapshot says of its upload."""
    history = server.workspaces.history
    for workspace_id, found in history.items():
        history[workspace_id] = [replace(one, upload=upload) for one in found]


def test_sleep_and_checkpoint_wait_for_the_store_when_they_are_told_to(server: FakeServer, demo: Workspace) -> None:
    assert demo.checkpoint("one").durable == "local"
    with pytest.raises(Conflict, match="has no object store") as caught:
        demo.checkpoint("two", durable="store")
    assert "PERDURE_STORE_URL" in caught.value.hint
    server.workspaces.has_store = True
    assert demo.checkpoint("three", durable="store").durable == "store"
    assert demo.sleep(durable="store").durable == "store"
    assert [one.durable for one in demo.snapshots()] == ["local", "local", "store", "store"]
    assert demo.push_snapshot("one").durable == "store"
    assert demo.push_snapshot().id == demo.info.head_snapshot_id
    with pytest.raises(DeadlineExceeded, match="goes on"):
        demo.push_snapshot("two", deadline_s=0)
    with pytest.raises(NotFound):
        demo.push_snapshot("none")


def test_there_is_nothing_to_push_of_a_workspace_without_a_snapshot(server: FakeServer, demo: Workspace) -> None:
    server.workspaces.has_store = True
    with pytest.raises(Conflict, match="has no snapshot yet"):
        demo.push_snapshot()


async def test_the_async_sdk_has_the_same(server: FakeServer) -> None:
    server.workspaces.has_store = True
    async with AsyncClient(settings=server.settings) as client:
        workspace = await AsyncWorkspace.create("demo", client=client)
        assert (await workspace.sleep(durable="store")).durable == "store"
        assert (await workspace.push_snapshot()).durable == "store"


def test_an_upload_under_way_and_one_that_failed(server: FakeServer, demo: Workspace, perdure: Run) -> None:
    demo.sleep()
    uploading(server, Upload(UploadState.UPLOADING, 10 << 20, 5 << 20, 40 << 20))
    (shown,) = demo.snapshots()
    assert shown.upload == public.UploadInfo(
        state=public.UploadState.UPLOADING, read_bytes=10 << 20, sent_bytes=5 << 20, total_bytes=40 << 20, error="", retry_s=None
    )
    assert "local, uploading" in perdure("snapshot ls demo").out
    assert "durable in the node; uploading, 10.5 MB of about 41.9 MB done, 5.2 MB sent" in perdure("show demo").out
    uploading(server, Upload(UploadState.FAILED, error="The object store did not take it.", retry_s=40.0))
    assert "local, upload failed" in perdure("snapshot ls demo").out
    told = perdure("show demo").out
    assert "not uploaded: The object store did not take it. Tried again in 40 s." in told
    uploading(server, Upload(UploadState.WAITING))
    assert "waits to be uploaded" in perdure("show demo").out


def test_a_wake_tells_how_much_has_come(server: FakeServer, demo: Workspace, perdure: Run) -> None:
    demo.sleep()
    row = server.workspaces.find_row("demo")
    coming = Fetching(12_000_000, 80_000_000)
    server.workspaces.rows[row.id] = replace(row, state=WorkspaceState.WAKING, fetching=coming)
    assert "  fetching     12.0 MB of at most 80.0 MB\n" in perdure("show demo").out
    assert perdure("show demo --json").json["workspace"]["fetching"] == {"read_bytes": 12_000_000, "total_bytes": 80_000_000}
    server.workspaces.hold = asyncio.Event()
    ours, terminal = os.openpty()
    command = [*PROGRAM, "wake", "demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, env=environment(server)) as process:
        os.close(terminal)
        shown = b""
        while b"Fetching demo from the object store: 12.0 MB of at most 80.0 MB" not in shown:
            shown += os.read(ours, 4096)  # raises when the command has ended without it
        let_go(server)
        out, _ = process.communicate(timeout=60)
    os.close(ours)
    assert (process.returncode, out) == (0, b"demo is awake: memory kept, disk kept, asleep 60 min\n")
    assert demo.refresh().fetching is None


def test_the_command_line(server: FakeServer, demo: Workspace, perdure: Run) -> None:
    assert perdure("sleep demo").out == "demo sleeps: 4.2 MB written\n"
    refused = perdure("snapshot push demo")
    assert refused.code == 1 and "has no object store" in refused.err
    server.workspaces.has_store = True
    assert perdure("snapshot push demo").out.endswith("is in the object store\n")
    assert perdure("sleep demo --durable store").out == "demo sleeps: 4.2 MB written, and in the object store\n"
    assert "durable in the object store" in perdure("show demo").out
    late = perdure("snapshot push demo --deadline 0")
    assert late.code == 1 and "goes on" in late.err
    assert perdure("sleep demo --durable moon").code == 2


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/workspaces/demo/snapshots/none/push", {}, 404),
        ("/v1/workspaces/none/snapshots/none/push", {}, 404),
        ("/v1/workspaces/demo/snapshots/one/push", {"deadline_s": -1}, 422),
        ("/v1/workspaces/demo/snapshots/one/push", {"deadline": 1}, 422),
        ("/v1/workspaces/demo/snapshots/one/push", {"deadline_s": 0}, 504),
    ],
)
def test_nonsense_is_told(server: FakeServer, demo: Workspace, path: str, body: dict[str, object], status: int) -> None:
    server.workspaces.has_store = True
    demo.checkpoint("one")
    with httpx2.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}) as http:
        answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"].endswith(".")
