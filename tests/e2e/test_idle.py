"""Idleness in real machines: asleep after five seconds, woken by whoever comes, by many at once, and by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from perdure.core.config import Settings
from perdure.sdk import AsyncClient, AsyncWorkspace, Workspace
from tests.e2e.live import DEADLINE_S, Live, serving, shell, until

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(900)]

BOOT = "cat /proc/sys/kernel/random/boot_id"
CLIENTS = 50


@pytest.fixture(scope="module")
def live(base_image: Path) -> Iterator[Live]:
    with serving() as server:
        yield server


def falls_asleep(workspace: Workspace) -> None:
    until(lambda: workspace.refresh().state == "hibernated")


def test_five_seconds_alone_and_then_the_next_request(live: Live) -> None:
    workspace = live.workspace("brief", idle_timeout_s=5.0, checkpoint_interval_s=0)
    boot = shell(workspace, BOOT)
    falls_asleep(workspace)
    entries = [entry for entry in workspace.log() if entry.kind == "hibernating"]
    assert [entry.body["cause"] for entry in entries] == ["idle"]
    assert entries[0].body["idle_s"] >= 5.0
    assert shell(workspace, BOOT) == boot, "its memory was kept"
    assert workspace.report is not None and workspace.report.memory == "kept"
    shown = live.ok("show", "brief").text
    assert "in use" in shown and "last used" in shown
    workspace.delete()


@pytest.mark.long
def test_a_command_that_runs_keeps_it_awake_and_is_told_as_the_reason(live: Live) -> None:
    """Watched or not (peers: row 13)."""
    workspace = live.workspace("working", idle_timeout_s=5.0, checkpoint_interval_s=0)
    shell(workspace, "true")
    workspace.commands.run("until test -e /run/go; do sleep 0.2; done", background=True)
    idle = workspace.refresh().idle
    assert idle is not None and "command" in [one.use for one in idle.reasons]
    assert "a command runs" in live.ok("show", "working").text
    sleeper = live.workspace("sleeper", idle_timeout_s=5.0, checkpoint_interval_s=0)
    falls_asleep(sleeper)  # so much time has passed for both
    assert workspace.refresh().state == "running"
    workspace.files.write("/run/go", b"")
    falls_asleep(workspace)
    for one in (workspace, sleeper):
        one.delete()


async def crowd(live: Live, name: str) -> list[int | None]:
    """Half of them come in the last tenth of a second, half when it is on its way; each appends a line, and returns its code."""
    async with AsyncClient(settings=Settings(home=live.home, url=None, api_key=None), timeout_s=DEADLINE_S) as client:
        workspace = await AsyncWorkspace.connect(name, client=client)

        async def request(number: int) -> int | None:
            done = await workspace.commands.run(f"echo {number} >>/root/requests", run_limit_s=DEADLINE_S)
            return getattr(done, "exit_code", None)

        async def until(left_s: float) -> None:
            """Asked again and again: that it is looked at is no use of it."""
            while (idle := (await workspace.refresh()).idle) is not None and (idle.sleeps_in_s or 0.0) > left_s:
                pass

        await until(0.1)
        coming = [asyncio.create_task(request(number)) for number in range(CLIENTS // 2)]
        await until(0.0)
        coming += [asyncio.create_task(request(number)) for number in range(CLIENTS // 2, CLIENTS)]
        return await asyncio.gather(*coming)


@pytest.mark.long
def test_fifty_clients_at_the_moment_of_sleep(live: Live) -> None:
    """Each is served, and by one run of what it asked for (peers: rows 15, 16)."""
    workspace = live.workspace("crowded", idle_timeout_s=5.0, checkpoint_interval_s=0)
    shell(workspace, "rm -f /root/requests")
    assert asyncio.run(crowd(live, "crowded")) == [0] * CLIENTS
    lines = shell(workspace, "cat /root/requests").split()
    assert sorted(map(int, lines)) == list(range(CLIENTS)), "once each"
    waking, hibernating = ([one for one in workspace.log() if one.kind == kind] for kind in ("waking", "hibernating"))
    assert len(waking) == len(hibernating) <= 2, "one wake for all who came to a sleeper"
    workspace.delete()


def test_it_wakes_by_itself_across_a_restart_of_the_server(live: Live) -> None:
    workspace = live.workspace("early-bird", checkpoint_interval_s=0)
    boot = shell(workspace, BOOT)
    workspace.sleep()
    told = live.ok("wake", "early-bird", "--at", "+3s", "--json").json
    assert told["state"] == "hibernated" and told["wake_at"] is not None
    live.ok("down")
    live.ok("up", "--detach")
    live.client.close()
    del live.client
    again = Workspace.connect("early-bird", wake=False, client=live.client)
    until(lambda: again.refresh().state == "running")
    report = again.resume_report()
    assert report is not None and report.wake_at is not None and report.memory == "kept"
    assert report.late_s >= 0
    resume = json.loads(shell(again, "cat /run/perdure/resume.json"))
    assert resume["wake_at"] == told["wake_at"]
    assert again.refresh().wake_at is None
    assert shell(again, BOOT) == boot
    again.wake_at(timedelta(days=1))
    assert again.info.wake_at is not None
    again.delete()
