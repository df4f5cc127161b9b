"""Idempotency keys over the real HTTP server, service and database: a command runs once, whatever happens to its workspace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from perdure.core.errors import Forgotten, KeyReused
from perdure.core.ids import keyed_exec
from perdure.wire.node import ExecSpec
from perdure.workspaces.exec_keys import KeyedExecs, StoredExecKeys
from tests.fakes.control_plane import CTX
from tests.integration.api.stage import Stage, stage

WEEK_S = 7 * 86400


@pytest.fixture
async def staged() -> AsyncIterator[Stage]:
    async with stage() as made:
        made.http.timeout = httpx2.Timeout(120)  # a busy host is no failure
        made.http.headers["authorization"] = f"Bearer {await made.key('operate')}"
        yield made


async def post(staged: Stage, key: str | None, name: str = "demo", **body: Any) -> httpx2.Response:
    headers = {} if key is None else {"idempotency-key": key}
    return await staged.http.post(f"/v1/workspaces/{name}/execs", headers=headers, json={"shell": "echo hi", **body})


def ran(staged: Stage, workspace_id: Any) -> list[str]:
    return list(staged.plane.node.world(workspace_id).commands)


def code(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def test_a_repeated_call_gets_the_same_answer_and_runs_nothing(staged: Stage) -> None:
    workspace, _ = await staged.plane.create("demo")
    first = await post(staged, "k1")
    assert (await post(staged, "k1")).text == first.text
    events = [json.loads(line) for line in first.text.splitlines()]
    assert [event["type"] for event in events] == ["started", "output", "exited"]
    assert ran(staged, workspace.id) == [events[0]["exec_id"]] == [keyed_exec(workspace.id, "k1")]
    assert code(await post(staged, "k1", shell="echo ho")) == (409, "idempotency_key_reused")
    assert (await post(staged, "k2")).status_code == 200
    assert len(ran(staged, workspace.id)) == 2


async def test_fifty_at_once_run_one(staged: Stage) -> None:
    workspace, _ = await staged.plane.create("demo")
    answers = await asyncio.gather(*(post(staged, "k", background=True) for _ in range(50)))
    assert {(answer.status_code, answer.json()["exec_id"]) for answer in answers} == {(201, keyed_exec(workspace.id, "k"))}
    assert len(ran(staged, workspace.id)) == 1


async def test_across_sleep_and_wake_it_is_the_same_command(staged: Stage) -> None:
    workspace, _ = await staged.plane.create("demo")
    first = await post(staged, "k")
    await staged.plane.service.sleep(CTX, "demo")
    again = await post(staged, "k")
    assert [json.loads(line).get("data") for line in again.text.splitlines()] == [
        json.loads(line).get("data") for line in first.text.splitlines()
    ]
    assert len(ran(staged, workspace.id)) == 1


async def test_after_a_rewind_to_before_it_the_answer_is_gone_and_not_a_second_run(staged: Stage) -> None:
    workspace, _ = await staged.plane.create("demo")
    await staged.plane.service.checkpoint(CTX, "demo", name="before")
    assert (await post(staged, "k")).status_code == 200
    await staged.plane.service.rewind(CTX, "demo", "before")
    answer = await post(staged, "k")
    assert code(answer) == (410, "forgotten")
    error = answer.json()["error"]
    assert (error["ambiguous"], error["gone"], error["retryable"]) == (True, True, False)
    assert "generation 1" in error["message"] and "now at 2" in error["message"]
    assert ran(staged, workspace.id) == []


async def test_a_crash_of_server_and_machine_in_between_is_no_second_run(staged: Stage) -> None:
    """What it wakes from is older than the command, and the process that had started it is gone."""
    workspace, _ = await staged.plane.create("demo")
    assert (await post(staged, "k")).status_code == 200
    await staged.plane.crash()
    service = await staged.plane.restart()
    keyed = KeyedExecs(StoredExecKeys(staged.plane.database))
    spec = ExecSpec(keyed_exec(workspace.id, "k"), shell="echo hi")
    async with service.awake(CTX, "demo") as awake:
        assert awake.workspace.generation > 1
        with pytest.raises(Forgotten):
            await keyed.start(awake, spec, "k")
        with pytest.raises(KeyReused):
            await keyed.start(awake, replace(spec, shell="echo ho"), "k")
    assert ran(staged, workspace.id) == []


async def test_a_fork_is_another_workspace(staged: Stage) -> None:
    await staged.plane.create("demo")
    await post(staged, "k")
    (child,) = await staged.plane.service.fork(CTX, "demo", 1, names=("child",))
    assert not isinstance(child, Exception)
    assert (await post(staged, "k", "child", shell="echo other")).status_code == 200
    assert keyed_exec(child.id, "k") in ran(staged, child.id)


async def test_a_key_counts_for_a_week_and_then_its_row_goes(staged: Stage) -> None:
    workspace, _ = await staged.plane.create("demo")
    place = {"tenant_id": workspace.tenant_id, "workspace_id": workspace.id, "key": "old"}
    await post(staged, "old")
    staged.plane.database.shift_clock(WEEK_S - 60)
    await post(staged, "new")
    assert await staged.plane.database.one("exec_keys.find", **place) is not None
    staged.plane.database.shift_clock(120)
    await post(staged, "newer")
    assert await staged.plane.database.one("exec_keys.find", **place) is None


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_a_key_that_is_none_is_refused(staged: Stage, key: str) -> None:
    workspace, _ = await staged.plane.create("demo")
    assert code(await post(staged, key)) == (422, "invalid_request")
    assert ran(staged, workspace.id) == []


async def test_an_id_of_the_clients_own_beside_a_key_is_refused(staged: Stage) -> None:
    workspace, _ = await staged.plane.create("demo")
    assert code(await post(staged, "k", exec_id="exe_0123456789")) == (422, "invalid_request")
    assert (await post(staged, "k", exec_id=keyed_exec(workspace.id, "k"))).status_code == 200


async def test_the_same_id_for_another_command_is_a_conflict_without_a_key_too(staged: Stage) -> None:
    workspace, _ = await staged.plane.create("demo")
    assert (await post(staged, None, exec_id="exe_0123456789")).status_code == 200
    assert code(await post(staged, None, exec_id="exe_0123456789", shell="echo ho")) == (409, "conflict")
    assert len(ran(staged, workspace.id)) == 1
