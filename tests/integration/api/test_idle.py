"""Idleness, times to wake at and policies over HTTP: the SDK, the command line, and who sends nonsense."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import pytest

from perdure.core.errors import Conflict, InvalidRequest, NotFound
from perdure.sdk import AsyncClient, AsyncWorkspace, Client, Workspace
from perdure.wire import public
from perdure.workspaces import hibernation, model
from tests.fakes.api_server import FakeServer
from tests.fakes.control_plane import CTX
from tests.fakes.memory_guest import MOMENT
from tests.fakes.workspaces import KEY
from tests.integration.api.stage import Stage, stage
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]

TEN = datetime(2026, 1, 3, 10, tzinfo=UTC)


def test_times_to_wake_at_through_the_sdk(demo: Workspace) -> None:
    assert demo.info.wake_at is None
    demo.wake_at(TEN)
    assert demo.info.wake_at == TEN
    assert demo.refresh().wake_at == TEN
    demo.wake_at(timedelta(hours=2))
    assert demo.info.wake_at == MOMENT + timedelta(hours=2), "on the server's clock"
    demo.wake_at(datetime.fromisoformat("2026-01-03T12:00:00+02:00"))
    assert demo.info.wake_at == TEN
    demo.wake_at(None)
    assert demo.info.wake_at is None
    with pytest.raises(InvalidRequest, match="without its offset"):
        demo.wake_at(datetime(2026, 1, 3, 10))  # noqa: DTZ001 - that is the mistake
    with pytest.raises(InvalidRequest, match="in_s"):
        demo.wake_at(timedelta(seconds=-1))
    assert demo.refresh().wake_at is None


def test_policies_through_the_sdk(client: Client) -> None:
    made = Workspace.create("demo", asleep_after_days=30, asleep_action="archive", client=client)
    assert (made.info.asleep_after_days, made.info.asleep_action) == (30.0, "archive")
    made.configure(asleep_action="delete")
    assert (made.info.asleep_after_days, made.info.asleep_action) == (30.0, "delete")
    assert made.info.deletes_at is None, "it is awake"
    made.sleep()
    assert made.refresh().deletes_at == MOMENT + timedelta(days=30)
    made.configure(asleep_action="keep")
    assert (made.info.asleep_after_days, made.info.asleep_action, made.info.deletes_at) == (None, "keep", None)
    with pytest.raises(InvalidRequest, match="What is to become of it"):
        made.configure(asleep_after_days=3)
    for bad in (0.5, -1, 1e6):
        with pytest.raises(InvalidRequest, match="asleep_after_days"):
            made.configure(asleep_after_days=bad, asleep_action="delete")
    with pytest.raises(InvalidRequest, match="asleep_action"):
        made.configure(asleep_after_days=3, asleep_action="burn")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="After how many days"):
        Workspace.create("other", asleep_action="delete", client=client)


def test_why_it_is_awake_through_the_sdk(demo: Workspace) -> None:
    idle = demo.refresh().idle
    assert idle is not None
    assert (idle.unused_s, idle.reasons, idle.sleeps_in_s) == (180.0, [], 720.0)
    demo.sleep()
    assert demo.refresh().idle is None


async def test_the_async_sdk_has_the_same(server: FakeServer) -> None:
    async with AsyncClient(settings=server.settings) as client:
        ws = await AsyncWorkspace.create("demo", client=client)
        await ws.wake_at(TEN)
        assert ws.info.wake_at == TEN
        await ws.configure(asleep_after_days=2, asleep_action="delete")
        assert ws.info.asleep_after_days == 2
        await ws.wake_at(None)
        assert ws.info.wake_at is None


def test_words_of_the_api_are_those_of_the_service() -> None:
    def words(kind: type[public.Answer], field: str) -> set[str]:
        return set(kind.model_json_schema()["properties"][field]["enum"])

    assert words(public.AwakeReason, "use") == {one.value for one in hibernation.Use}
    assert words(public.WorkspaceInfo, "asleep_action") == {one.value for one in model.AsleepAction}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("demo/wake-at", {}, 422),
        ("demo/wake-at", {"at": "2026-01-03T10:00:00"}, 422),
        ("demo/wake-at", {"at": "tomorrow"}, 422),
        ("demo/wake-at", {"at": 7}, 422),
        ("demo/wake-at", {"at": "1700000000"}, 422),
        ("demo/wake-at", {"at": None, "in_s": 5}, 422),
        ("demo/wake-at", {"at": "2026-01-03T10:00:00Z", "in_s": 5}, 422),
        ("demo/wake-at", {"in_s": None}, 422),
        ("demo/wake-at", {"in_s": -1}, 422),
        ("demo/wake-at", {"in_s": "NaN"}, 422),
        ("demo/wake-at", {"at": None, "colour": "red"}, 422),
        ("demo/wake-at", {"at": "2999-01-03T10:00:00Z"}, 422),
        ("none/wake-at", {"in_s": 5}, 404),
    ],
)
def test_nonsense_is_refused_in_a_sentence(demo: Workspace, server: FakeServer, path: str, body: Any, status: int) -> None:
    with httpx2.Client(headers={"authorization": f"Bearer {KEY}"}, base_url=server.url) as http:
        answer = http.post(f"/v1/workspaces/{path}", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"].endswith(".")
    assert demo.refresh().wake_at is None


def test_the_command_line(perdure: Run) -> None:
    assert perdure("create demo --asleep-after-days 30 --asleep-action archive").code == 0
    shown = perdure("show demo").out
    assert "  in use       last used 3 min ago; sleeps in 12 min if nobody uses it\n" in shown
    assert "  long asleep  after 30 days asleep it is archived\n" in shown
    assert "  by itself " not in shown
    assert perdure("wake demo --at 2026-01-03T12:00:00+02:00").out == ("demo wakes at 2026-01-03 10:00:00 UTC, which is now\n")
    assert "  by itself    wakes at 2026-01-03 10:00:00 UTC, which is now\n" in perdure("show demo").out
    assert perdure("wake demo --at +2h").out.startswith("demo wakes at 2026-01-02 05:04:05 UTC")
    assert perdure("wake demo --at never").out == "demo does not wake by itself\n"
    told = perdure("configure demo --asleep-action delete --idle-timeout-s 5").out
    assert told.startswith("demo sleeps after 5 s") and told.endswith("; after 30 days asleep it is deleted\n")
    perdure("sleep demo")
    assert "deleted: not before 2026-02-01 03:04:05 UTC\n" in perdure("show demo").out
    assert perdure("configure demo --asleep-action keep").out.count("asleep") == 0


def test_the_command_line_as_json(perdure: Run) -> None:
    perdure("create demo")
    assert perdure("wake --json demo --at 2026-01-03T10:00:00Z").json["wake_at"] == "2026-01-03T10:00:00Z"
    assert perdure("wake --json demo --at never").json["wake_at"] is None
    shown = perdure("show --json demo").json["workspace"]
    assert shown["idle"] == {"unused_s": 180.0, "reasons": [], "sleeps_in_s": 720.0}
    told = perdure("configure --json demo --asleep-after-days 2 --asleep-action delete").json
    assert (told["asleep_after_days"], told["asleep_action"], told["deletes_at"]) == (2.0, "delete", None)


def test_what_the_command_line_refuses(perdure: Run) -> None:
    perdure("create demo")
    for line, code, says in [
        ("wake demo --at tomorrow", "invalid_request", "'tomorrow' is not a time"),
        ("wake demo --at 2026-01-03T10:00:00", "invalid_request", "any hour"),
        ("wake demo --at +2", "invalid_request", "'2' is not a duration"),
        ("wake demo --at +2h --deadline 5", "invalid_request", "--deadline"),
        ("wake none --at +2h", "not_found", "no workspace 'none'"),
        ("configure demo --asleep-after-days 5", "invalid_request", "What is to become of it"),
        ("configure demo --asleep-action delete", "invalid_request", "After how many days"),
        ("configure demo --asleep-after-days 0 --asleep-action delete", "invalid_request", "asleep_after_days"),
        ("create other --asleep-action archive", "invalid_request", "After how many days"),
    ]:
        answer = perdure(f"--json {line}")
        assert (answer.code, answer.error["code"], answer.out) == (1, code, ""), (line, answer.err)
        assert says in answer.error["message"], (line, answer.error)
    assert perdure("--json configure demo --asleep-action burn").code == 2


# ----------------------------------------------------------------------------------------- over the real service and database


async def ask(staged: Stage, method: str, path: str, **body: Any) -> Any:
    response = await staged.ask(KEY, method, f"/v1/workspaces{path}", timeout=60, **({"json": body} if body else {}))
    assert response.status_code < 300, response.text
    return response.json()


async def test_over_the_real_service() -> None:
    async with stage() as staged:
        await ask(staged, "POST", "", name="demo", idle_timeout_s=5)
        upkeep = staged.plane.service.upkeep
        shown = await ask(staged, "GET", "/demo")
        assert shown["idle"]["reasons"] == []
        told = await ask(staged, "POST", "/demo/keep-awake", seconds=60)
        assert [one["use"] for one in told["idle"]["reasons"]] == ["keep-awake"]
        await ask(staged, "POST", "/demo/keep-awake", seconds=0)
        staged.plane.clock.advance(6)
        await upkeep.tick()
        await upkeep.drain()
        shown = await ask(staged, "GET", "/demo")
        assert (shown["state"], shown["idle"]) == ("hibernated", None)
        told = await ask(staged, "POST", "/demo/wake-at", in_s=3600)
        assert told["state"] == "hibernated"
        staged.plane.database.shift_clock(7200)
        await upkeep.alarms.look()
        await upkeep.drain()
        assert (await ask(staged, "GET", "/demo"))["state"] == "running"
        report = (await ask(staged, "GET", "/demo/report"))["report"]
        assert (report["wake_at"], report["late_s"] > 3000) == (told["wake_at"], True)
        refused = await staged.ask(KEY, "PATCH", "/v1/workspaces/demo", json={"asleep_after_days": 3, "asleep_action": "archive"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, Conflict.code)
        await ask(staged, "PATCH", "/demo", asleep_after_days=3, asleep_action="delete")
        await ask(staged, "POST", "/demo/sleep")
        shown = await ask(staged, "GET", "/demo")
        slept = datetime.fromisoformat(shown["state_changed_at"])
        assert datetime.fromisoformat(shown["deletes_at"]) == slept + timedelta(days=3)
        for days in (2.5, 1.5):
            staged.plane.database.shift_clock(days * 86400)
            await upkeep.clean()
        gone = await staged.ask(KEY, "GET", "/v1/workspaces/demo")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, NotFound.code)


@pytest.mark.parametrize("steps", [0, 10, 50])
async def test_fifty_http_clients_at_the_moment_of_sleep(steps: int) -> None:
    """Each gets its answer from the same machine, and nobody a conflict (peers: rows 15, 16)."""
    async with stage() as staged:
        await ask(staged, "POST", "", name="demo", idle_timeout_s=5, checkpoint_interval_s=0)
        upkeep = staged.plane.service.upkeep
        staged.plane.clock.advance(6)
        await upkeep.tick()
        for _ in range(steps):
            await asyncio.sleep(0)

        async def write(number: int) -> httpx2.Response:
            path = "/v1/workspaces/demo/files/content"
            return await staged.ask(KEY, "PUT", path, params={"path": f"/{number}"}, content=b"%d" % number, timeout=60)

        answers = await asyncio.gather(*(write(number) for number in range(50)))
        assert [answer.status_code for answer in answers] == [200] * 50
        await upkeep.drain()
        assert len({answer.headers["perdure-generation"] for answer in answers}) == 1
        for number in range(50):
            assert await staged.plane.read("demo", f"/{number}") == b"%d" % number
        thread = [entry.kind for entry in await staged.plane.service.log(CTX, "demo")]
        assert thread.count("waking") == thread.count("hibernating") <= 1
