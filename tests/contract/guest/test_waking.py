"""What a workspace learns of its wake before its programs go on: resume.json, and the hooks that run in between."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from perdure.machines.guestlink import WakeReport, WakeRequest
from perdure.machines.guestlink_hooks import HookLimits
from perdure.wire.node import ExecEnd, ExecOutput, ExecSpec, HookOutcome, HookRun
from tests.contract.guest.places import DEADLINE_S, Place, host_agent, identity, new_id
from tests.fakes.guest_agent import HostAgent

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOOKS = "/etc/perdure/on-wake.d"
TOLD = {"workspace_id": "ws_1", "generation": 1, "snapshot_id": None, "memory": "kept", "disk": "kept", "asleep_s": 7.5}
#: Far more than these hooks need on a busy host; those that are meant to hang have less.
LIMITS = HookLimits(DEADLINE_S, 2 * DEADLINE_S)


@pytest_asyncio.fixture(loop_scope="session")
async def pair() -> AsyncIterator[tuple[HostAgent, Place]]:
    async with host_agent() as found:
        yield found


@pytest_asyncio.fixture(loop_scope="session")
async def place_with_hooks(real: Place) -> AsyncIterator[Place]:
    await real.run(f"mkdir -p {HOOKS}; chmod 755 {HOOKS}")
    yield real
    await real.run("rm -rf /etc/perdure /tmp/hooks; mkdir -p /run/perdure")


async def hook(place: Place, name: str, script: str, mode: int = 0o755) -> None:
    async def content() -> AsyncIterator[bytes]:
        yield f"#!/bin/sh\n{script}\n".encode()

    await place.guest.write_file(f"{HOOKS}/{name}", content(), mode=mode)


async def wake(place: Place, limits: HookLimits = LIMITS, **told: Any) -> WakeReport:
    """The same generation once more, as if it had been asleep."""
    request = WakeRequest(identity(1), environment={"COLOUR": "green"}, report={**TOLD, **told}, hooks=limits)
    return await place.link.wake(request)


async def inside(place: Place) -> dict[str, Any]:
    """The report as an ordinary user reads it."""
    found: dict[str, Any] = json.loads((await place.run("cat /run/perdure/resume.json", user="nobody")).stdout)
    return found


def summary(runs: tuple[HookRun, ...]) -> list[tuple[str, HookOutcome, int | None]]:
    return [(run.name, run.outcome, run.exit_code) for run in runs]


# ----------------------------------------------------------------------------------------------------------- resume.json


async def test_the_report_is_inside_and_is_this_wakes(real: Place) -> None:
    for asleep_s in (1.5, 2.5):
        report = await wake(real, asleep_s=asleep_s)
        assert (report.problems, report.hooks) == ((), ())
        told = await inside(real)
        assert {**TOLD, "asleep_s": asleep_s, "connections_dropped": 0, "problems": [], "hooks": []}.items() <= told.items()
        assert abs(told["clock_step_s"]) < 3600 and told["execs_lost"] == []


async def test_a_wake_that_tells_nothing_leaves_the_report_and_runs_nothing(place_with_hooks: Place) -> None:
    place = place_with_hooks
    await wake(place, asleep_s=3.0)
    await hook(place, "10-a", "echo ran >>/tmp/hooks")
    report = await place.link.wake(WakeRequest(identity(1), environment={"COLOUR": "green"}))
    assert report.hooks == () and (await inside(place))["asleep_s"] == 3.0
    assert (await place.run("cat /tmp/hooks")).exited.exit_code == 1


async def test_a_report_that_cannot_be_written_is_a_problem_and_no_old_one_stays(pair: tuple[HostAgent, Place]) -> None:
    place = pair[1]
    await wake(place)
    await place.run("rm -r /run/perdure; ln -s /tmp /run/perdure")
    report = await wake(place)
    assert len(report.problems) == 1 and report.problems[0].startswith("/run/perdure/resume.json:")
    assert (await place.run("ls /tmp")).stdout == b""
    await place.run("rm /run/perdure; mkdir -p /run/perdure/resume.json/full")
    assert len((await wake(place)).problems) == 1


# ------------------------------------------------------------------------------------------------------------------ hooks


async def test_hooks_run_in_order_as_root_with_what_they_need_to_know(place_with_hooks: Place) -> None:
    place = place_with_hooks
    say = "echo $PERDURE_HOOK $(id -u) $PERDURE_GENERATION $PERDURE_MEMORY $PERDURE_ASLEEP_S $PERDURE_NEW_IDENTITY $COLOUR"
    await hook(place, "20-second", f'{say}; echo "[$PERDURE_SNAPSHOT_ID]" >&2; pwd')
    await hook(place, "10-first", 'grep -c \'"memory": "kept"\' $PERDURE_RESUME; cat /etc/hostname >/dev/null && exit 3')
    await hook(place, "README", "exit 9", mode=0o644)
    report = await wake(place, generation=5)
    assert summary(report.hooks) == [("10-first", HookOutcome.FAILED, 3), ("20-second", HookOutcome.OK, 0)]
    assert report.hooks[0].output == "1\n", "the report is there before the hooks"
    assert report.hooks[1].output == "20-second 0 5 kept 7.5 0 green\n[]\n/\n", "both streams, in their order"
    assert all(run.seconds > 0 for run in report.hooks)
    told = (await inside(place))["hooks"]
    assert [(one["name"], one["outcome"], one["exit_code"]) for one in told] == [
        ("10-first", "failed", 3),
        ("20-second", "ok", 0),
    ]
    assert told[1]["output"] == report.hooks[1].output


async def test_users_programs_stand_still_until_the_last_hook_has_ended(place_with_hooks: Place) -> None:
    place = place_with_hooks
    await place.run("rm -f /tmp/count")
    counting = await place.guest.start_exec(ExecSpec(new_id(), shell="while :; do echo >>/tmp/count; sleep 0.01; done"))
    await place.run("until [ -s /tmp/count ]; do sleep 0.1; done", run_limit_s=DEADLINE_S)
    await hook(place, "10-look", "a=$(wc -l </tmp/count); sleep 0.5; b=$(wc -l </tmp/count); echo $((b - a)); echo $b >/tmp/seen")
    if not await place.link.quiesce(deadline_s=DEADLINE_S):
        pytest.skip("this host has no cgroup2 to freeze processes with")
    assert (await wake(place)).hooks[0].output == "0\n"
    report = await wake(place)  # this time they run when it comes, as after a capture that did not wait for them
    assert (report.hooks[0].output, report.problems) == ("0\n", ())
    moved = await place.run("until [ $(wc -l </tmp/count) -gt $(cat /tmp/seen) ]; do sleep 0.1; done", run_limit_s=DEADLINE_S)
    assert moved.exited.exit_code == 0, "then they go on"
    await place.guest.kill_exec(counting.exec_id)


@pytest.mark.long_on("vm")
async def test_a_hook_that_hangs_is_killed_with_all_it_started_and_named(place_with_hooks: Place) -> None:
    place = place_with_hooks
    tag = f"10{int.from_bytes(os.urandom(3))}"
    await hook(place, "10-hangs", f"trap '' TERM; echo begun; sleep {tag} & exec sleep {tag}")
    await hook(place, "20-next", "echo fine")
    report = await wake(place, HookLimits(3.0, 2 * DEADLINE_S))
    assert summary(report.hooks) == [("10-hangs", HookOutcome.TIMEOUT, None), ("20-next", HookOutcome.OK, 0)]
    assert report.hooks[0].output == "begun\n" and 3.0 <= report.hooks[0].seconds < DEADLINE_S
    gone = await place.run(f"while ps -eo args | grep -q '^sleep {tag}$'; do sleep 0.1; done", run_limit_s=DEADLINE_S)
    assert gone.exited.exit_code == 0
    assert await place.link.quiesce(deadline_s=DEADLINE_S) or place.kind == "agent"
    await place.link.thaw()


@pytest.mark.long_on("vm")
async def test_what_has_no_time_left_is_named_and_not_run(place_with_hooks: Place) -> None:
    place = place_with_hooks
    await hook(place, "10-hangs", "exec sleep 1000")
    await hook(place, "20-late", "echo ran >>/tmp/hooks")
    report = await wake(place, HookLimits(DEADLINE_S, 2.0))
    assert summary(report.hooks) == [("10-hangs", HookOutcome.TIMEOUT, None), ("20-late", HookOutcome.SKIPPED, None)]
    assert "used up the time" in report.hooks[1].output
    assert (await place.run("cat /tmp/hooks")).exited.exit_code == 1


async def test_what_cannot_or_must_not_run_says_why(place_with_hooks: Place) -> None:
    place = place_with_hooks
    await hook(place, "10-broken", "true")
    await place.run(f"printf '#!/none\\n' >{HOOKS}/10-broken")
    await hook(place, "20-theirs", "true")
    await place.run(f"chown nobody {HOOKS}/20-theirs")
    await hook(place, "30-open", "true", mode=0o777)
    await hook(place, "40-killed", "kill -9 $$")
    report = await wake(place)
    assert summary(report.hooks) == [
        ("10-broken", HookOutcome.NOT_STARTED, 127),
        ("20-theirs", HookOutcome.REFUSED, None),
        ("30-open", HookOutcome.REFUSED, None),
        ("40-killed", HookOutcome.FAILED, 137),
    ]
    assert "interpreter" in report.hooks[0].output
    assert "belongs to user" in report.hooks[1].output and "others than root" in report.hooks[2].output


@pytest.mark.long_on("vm")
async def test_only_the_end_of_what_a_hook_writes_is_kept(place_with_hooks: Place) -> None:
    place = place_with_hooks
    for number in range(10):
        await hook(place, f"{number}0-much", "head -c 300000 /dev/zero | tr '\\0' x; echo end")
    report = await wake(place)
    assert [run.outcome for run in report.hooks] == [HookOutcome.OK] * 10
    assert report.hooks[0].output == "x" * 996 + "end\n"
    assert sum(len(run.output) for run in report.hooks) <= 6000


@pytest.mark.long_on("vm")
async def test_what_a_hook_leaves_running_becomes_one_of_the_others(place_with_hooks: Place) -> None:
    """It goes on, is frozen with them, and may write to its output without harm."""
    place = place_with_hooks
    await hook(place, "10-serve", "(while :; do echo; echo >>/tmp/beats; sleep 0.05; done) & echo $!")
    report = await wake(place)
    pid = report.hooks[0].output.strip().splitlines()[-1]
    assert report.hooks[0].outcome is HookOutcome.OK
    await place.run("rm -f /tmp/beats; until [ -s /tmp/beats ]; do sleep 0.1; done", run_limit_s=DEADLINE_S)
    if await place.link.quiesce(deadline_s=DEADLINE_S):
        before = await place.link.cpu_s()
        await place.link.sync()
        assert await place.link.cpu_s() == before
    await place.link.thaw()
    assert (await place.run(f"kill {pid}; while kill -0 {pid}; do sleep 0.1; done", run_limit_s=DEADLINE_S)).exited.exit_code == 0


async def test_an_agent_that_starts_again_runs_no_hook_twice(pair: tuple[HostAgent, Place]) -> None:
    agent, place = pair
    await place.run(f"mkdir -p {HOOKS}")
    await hook(place, "10-count", "echo ran >>/tmp/hooks; sleep 1000 &")
    await wake(place)
    watched = await place.guest.start_exec(ExecSpec(new_id(), shell="echo begun; exec sleep 1000"))
    events = watched.events()
    begun = [await anext(events), await anext(events)]
    assert isinstance(begun[1], ExecOutput), "before that it may never begin, and be lost without a trace"
    os.kill(await agent.agent_pid(), signal.SIGKILL)
    assert [event async for event in events][-1].end is ExecEnd.LOST
    assert (await place.run("cat /tmp/hooks")).stdout == b"ran\n"
    assert (await inside(place))["generation"] == 1
    report = await wake(place)
    assert report.execs_lost == (watched.exec_id,), "a hook is no command"
    assert summary(report.hooks) == [("10-count", HookOutcome.OK, 0)]
    assert (await place.run("cat /tmp/hooks")).stdout == b"ran\nran\n"
