"""The workspace's program: named, started, kept running, logged; the same of every guest."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
import pytest_asyncio

from perdure.core.errors import InvalidRequest, MachineDied, NotFound
from perdure.machines.guestlink import WakeRequest
from perdure.wire.guest.ops import PROGRAM_FILE, PROGRAM_LOG_BYTES
from perdure.wire.node import (
    ExecSpec,
    LogRequest,
    PingStatus,
    ProgramAct,
    ProgramSpec,
    ProgramState,
    ProgramStatus,
    Restart,
)
from tests.contract.guest.places import DEADLINE_S, Place, host_agent, identity, new_id
from tests.fakes.guest_agent import HostAgent

pytestmark = pytest.mark.asyncio(loop_scope="session")

#: Serves the container contract, and says in a file beside it how busy it is.
SERVER = """
import json, os, socket
listening = socket.create_server(('127.0.0.1', int(os.environ['PORT'])))
print('ready', flush=True)
while True:
    asked, _ = listening.accept()
    with asked:
        asked.recv(65536)
        try: status = open('/tmp/status').read().strip()
        except OSError: status = 'Healthy'
        body = json.dumps({'status': status, 'time_of_last_update': 1700000000})
        asked.sendall(f'HTTP/1.1 200 OK\\r\\ncontent-length: {len(body)}\\r\\n\\r\\n{body}'.encode())
"""


@pytest_asyncio.fixture(loop_scope="session")
async def program(place: Place) -> AsyncIterator[Place]:
    """A guest whose program is forgotten afterwards."""
    yield place
    await place.guest.set_program(None)


@pytest_asyncio.fixture(loop_scope="session")
async def real_program(real: Place) -> AsyncIterator[Place]:
    yield real
    await real.guest.set_program(None)
    await real.run("rm -f /tmp/status /tmp/count")


async def one(content: bytes) -> AsyncIterator[bytes]:
    yield content


def line(place: Place, *verbs: tuple[str, object], **fields: Any) -> ProgramSpec:
    """A program out of what the shells of all places can do."""
    return ProgramSpec(("/bin/sh", "-c", "; ".join(place.shell(verb, argument) for verb, argument in verbs)), **fields)


async def log_of(place: Place, **fields: Any) -> bytes:
    return b"".join([chunk.data async for chunk in place.guest.program_log(LogRequest(**fields))])


async def reads(place: Place, wanted: bytes, offset: int) -> bytes:
    """Follow the log from an offset until something stands in it."""
    seen = b""
    async with asyncio.timeout(DEADLINE_S):
        chunks = place.guest.program_log(LogRequest(offset=offset, follow=True))
        async for chunk in chunks:
            seen += chunk.data
            if wanted in seen:
                await chunks.aclose()  # type: ignore[attr-defined]
                return seen
    raise AssertionError(f"{wanted!r} is not in {seen!r}")


async def until(place: Place, holds: Callable[[ProgramStatus], bool]) -> ProgramStatus:
    """A guest tells nobody what its program does by itself, so it is asked."""
    never = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):
        while not holds(status := await place.guest.program()):
            try:
                async with asyncio.timeout(0.05):
                    await never.wait()
            except TimeoutError:
                continue
    return status


async def test_a_program_is_started_with_its_words_environment_user_and_directory(program: Place) -> None:
    place, before = program, (await program.guest.program()).log_end
    spec = line(place, ("env", "A"), ("env", "PORT"), ("env", "COLOUR"), ("pwd", ""), ("whoami", ""), ("hang", ""))
    spec = ProgramSpec(spec.argv, env={"A": "one"}, cwd="/tmp", user="nobody", port=9000)
    status = await place.guest.set_program(spec)
    assert (status.state, status.spec, status.problem) == (ProgramState.RUNNING, spec, "")
    assert status.pid and status.started_at and (status.failures, status.retry_in_s, status.last) == (0, None, None)
    assert await reads(place, b"nobody\n", before) == b"one\n9000\ngreen\n/tmp\nnobody\n"


async def test_stdout_and_stderr_are_one_log_in_their_order(program: Place) -> None:
    place, before = program, (await program.guest.program()).log_end
    await place.guest.set_program(line(place, ("say", "a"), ("warn", "b"), ("say", "c"), ("hang", "")))
    assert await reads(place, b"c\n", before) == b"a\nb\nc\n"


async def test_the_log_outlives_restarts_and_is_read_from_offsets_and_by_lines(program: Place) -> None:
    place, before = program, (await program.guest.program()).log_end
    await place.guest.set_program(line(place, ("say", "one"), ("hang", "")))
    await reads(place, b"one\n", before)
    await place.guest.act_on_program(ProgramAct.RESTART)
    await reads(place, b"one\none\n", before)
    assert await log_of(place, offset=before + 2) == b"e\none\n"
    assert await log_of(place, tail=1) == b"one\n"
    assert await log_of(place, tail=2) == b"one\none\n"
    assert await log_of(place, tail=0) == b""
    assert (await log_of(place, tail=10_000_000)).endswith(b"one\none\n")
    status = await place.guest.program()
    assert status.log_end == before + 8 and status.log_start <= before


async def test_an_offset_beyond_the_end_means_a_new_log_and_gives_all_of_it(program: Place) -> None:
    place, before = program, (await program.guest.program()).log_end
    await place.guest.set_program(line(place, ("say", "new"), ("hang", "")))
    await reads(place, b"new\n", before)
    chunks = [chunk async for chunk in place.guest.program_log(LogRequest(offset=10**12))]
    assert b"".join(chunk.data for chunk in chunks).endswith(b"new\n") and chunks[0].offset < 10**12


@pytest.mark.long_on("vm")
async def test_a_program_that_ends_is_started_again_after_longer_and_longer_waits(program: Place) -> None:
    place = program
    await place.guest.set_program(line(place, ("say", "begun"), ("exit", 7)))
    status = await until(place, lambda status: status.failures >= 3 and status.state is ProgramState.BACKING_OFF)
    assert status.last is not None and (status.last.exit_code, status.last.signal) == (7, None)
    assert status.retry_in_s is not None and status.restarts >= 3 and status.pid is None
    again = await place.guest.act_on_program(ProgramAct.START)
    assert again.failures <= 1, "who starts it by hand begins to count anew"


async def test_a_program_that_does_not_exist_says_so(program: Place) -> None:
    status = await program.guest.set_program(ProgramSpec(("no-such-program",)))
    status = await until(program, lambda status: status.last is not None and status.last.exit_code == 127)
    assert status.last is not None and "no-such-program" in status.last.detail
    assert status.failures >= 1


@pytest.mark.parametrize(
    ("restart", "code", "state"),
    [
        (Restart.NEVER, 0, ProgramState.ENDED),
        (Restart.NEVER, 1, ProgramState.ENDED),
        (Restart.ON_FAILURE, 0, ProgramState.ENDED),
        (Restart.ON_FAILURE, 1, ProgramState.BACKING_OFF),
        (Restart.ALWAYS, 0, ProgramState.BACKING_OFF),
    ],
)
async def test_its_policy_decides_whether_it_is_started_again(
    program: Place, restart: Restart, code: int, state: ProgramState
) -> None:
    await program.guest.set_program(line(program, ("exit", code), restart=restart))
    status = await until(program, lambda status: status.last is not None and status.state is state)
    assert status.last is not None and status.last.exit_code == code


async def test_a_stopped_program_stays_stopped_until_it_is_started(program: Place) -> None:
    place = program
    await place.guest.set_program(line(place, ("hang", "")))
    status = await place.guest.act_on_program(ProgramAct.STOP)
    assert (status.state, status.pid, status.retry_in_s) == (ProgramState.STOPPED, None, None)
    assert status.last is not None and (status.last.exit_code, status.last.signal) == (143, 15)
    assert (await place.guest.act_on_program(ProgramAct.STOP)).state is ProgramState.STOPPED
    first = await place.guest.act_on_program(ProgramAct.START)
    again = await place.guest.act_on_program(ProgramAct.START)
    assert (first.state, again.pid) == (ProgramState.RUNNING, first.pid), "starting what runs changes nothing"


async def test_naming_another_ends_the_first_and_forgetting_it_ends_it_too(program: Place) -> None:
    place = program
    first = await place.guest.set_program(line(place, ("hang", "")))
    second = await place.guest.set_program(line(place, ("say", "second"), ("hang", "")))
    assert second.state is ProgramState.RUNNING and second.pid != first.pid
    status = await place.guest.set_program(None)
    assert (status.state, status.spec, status.pid) == (ProgramState.NONE, None, None)
    assert (await place.guest.set_program(None)).state is ProgramState.NONE
    with pytest.raises(NotFound):
        await place.guest.stat(PROGRAM_FILE)


async def test_without_a_program_there_is_nothing_to_act_on(program: Place) -> None:
    for act in ProgramAct:
        with pytest.raises(NotFound, match="No program is named"):
            await program.guest.act_on_program(act)


@pytest.mark.parametrize(
    "spec",
    [
        ProgramSpec(()),
        ProgramSpec(("",)),
        ProgramSpec(("a\0b",)),
        ProgramSpec(("true",), env={"A=B": "c"}),
        ProgramSpec(("true",), env={"": "c"}),
        ProgramSpec(("true",), port=0),
        ProgramSpec(("true",), port=65536),
        ProgramSpec(("true",), stop_grace_s=-1),
        ProgramSpec(("true",), stop_grace_s=float("nan")),
        ProgramSpec(("true",), env={"A": "x" * 20_000}),
    ],
)
async def test_what_cannot_be_a_program_is_refused_and_changes_nothing(program: Place, spec: ProgramSpec) -> None:
    before = await program.guest.set_program(line(program, ("hang", "")))
    with pytest.raises(InvalidRequest):
        await program.guest.set_program(spec)
    assert (await program.guest.program()).pid == before.pid


async def test_a_file_by_hand_is_understood_or_told_to_be_wrong(program: Place) -> None:
    place = program

    await place.guest.make_dir("/etc/perdure")
    await place.guest.write_file(PROGRAM_FILE, one(b'{"argv": ["true"], "restart": "never"}'), mode=0o644)
    status = await place.guest.act_on_program(ProgramAct.RESTART)
    assert status.spec == ProgramSpec(("true",), restart=Restart.NEVER)
    for wrong in (b"{", b"[]", b'{"argv": "true"}', b'{"argv": ["true"], "port": "x"}', b"[" * 15_000, b" " * 30_000):
        await place.guest.write_file(PROGRAM_FILE, one(wrong), mode=0o644)
        status = await place.guest.act_on_program(ProgramAct.RESTART)
        assert (status.state, status.spec) == (ProgramState.NONE, None) and status.problem.startswith(PROGRAM_FILE), wrong


async def test_a_ping_that_nobody_answers_is_none(program: Place) -> None:
    await program.guest.set_program(line(program, ("hang", ""), port=47_001))
    assert await program.guest.ping_program(DEADLINE_S) is None


# ----------------------------------------------------------------------------------------------------------- real guests


async def test_a_ping_tells_how_the_program_is_and_is_no_use_of_the_workspace(real_program: Place) -> None:
    place, offset = real_program, (await real_program.guest.program()).log_end
    await place.guest.set_program(ProgramSpec(("python3", "-c", SERVER), port=47_002))
    await reads(place, b"ready\n", offset)
    before = place.link.activity()
    ping = await place.guest.ping_program(DEADLINE_S)
    assert ping is not None and (ping.status, ping.is_busy, ping.port) == (PingStatus.HEALTHY, False, 47_002)
    assert ping.updated_at is not None and ping.updated_at.timestamp() == 1_700_000_000
    after = place.link.activity()
    assert (after.operations, after.open_streams) == (before.operations, 0) and after.idle_for_s >= before.idle_for_s
    await place.run("echo HealthyBusy >/tmp/status")
    busy = await place.guest.ping_program(DEADLINE_S)
    assert busy is not None and busy.is_busy
    await place.run("echo Odd >/tmp/status")
    assert await place.guest.ping_program(DEADLINE_S) is None


async def test_a_program_that_accepts_and_says_nothing_is_not_busy(real_program: Place) -> None:
    place = real_program
    silent = "import socket, time; s = socket.create_server(('127.0.0.1', 47003)); print('up', flush=True); time.sleep(1e6)"
    before = (await place.guest.program()).log_end
    await place.guest.set_program(ProgramSpec(("python3", "-c", silent), port=47_003))
    await reads(place, b"up\n", before)
    assert await place.guest.ping_program(1.0) is None
    assert place.link.activity().open_streams == 0


@pytest.mark.long_on("vm")
async def test_what_a_program_started_ends_with_it(real_program: Place) -> None:
    place = real_program
    tag = f"10{int.from_bytes(os.urandom(3))}"
    await place.guest.set_program(ProgramSpec(("/bin/sh", "-c", f"sleep {tag} & echo up; exec sleep {tag}")))
    assert (await place.run(f"until pgrep -fc '[s]leep {tag}' | grep -q 2; do sleep 0.1; done; echo two")).stdout == b"two\n"
    status = await place.guest.program()
    await place.run(f"kill -9 {status.pid}")
    before = status.restarts
    after = await until(place, lambda status: status.restarts > before and status.state is ProgramState.RUNNING)
    assert after.last is not None and (after.last.exit_code, after.last.signal) == (137, signal.SIGKILL)
    await place.guest.act_on_program(ProgramAct.STOP)
    assert (await place.run(f"while pgrep -f '[s]leep {tag}'; do sleep 0.1; done >/dev/null; echo gone")).stdout == b"gone\n"


async def test_a_program_that_ignores_sigterm_is_killed_after_its_grace(real_program: Place) -> None:
    place, before = real_program, (await real_program.guest.program()).log_end
    stubborn = "trap '' TERM; echo up; while :; do sleep 1; done"
    await place.guest.set_program(ProgramSpec(("/bin/sh", "-c", stubborn), stop_grace_s=0.2))
    await reads(place, b"up\n", before)
    status = await place.guest.act_on_program(ProgramAct.STOP)
    assert status.state is ProgramState.STOPPED and status.last is not None and status.last.signal == signal.SIGKILL


async def test_of_a_long_log_the_end_is_kept_and_the_gap_is_told(real_program: Place) -> None:
    place, before = real_program, (await real_program.guest.program()).log_end
    size = 3 * PROGRAM_LOG_BYTES
    spew = f"head -c {size} /dev/zero | tr '\\0' x; echo end; exec sleep 1000"
    await place.guest.set_program(ProgramSpec(("/bin/sh", "-c", spew)))
    await until(place, lambda status: status.log_end == before + size + 4)
    chunks = [chunk async for chunk in place.guest.program_log(LogRequest(offset=before))]
    assert chunks[0].gap > 0 and chunks[0].offset == before + chunks[0].gap
    assert sum(chunk.gap + len(chunk.data) for chunk in chunks) == size + 4
    kept = b"".join(chunk.data for chunk in chunks)
    assert kept.endswith(b"xend\n") and PROGRAM_LOG_BYTES // 3 < len(kept) < 2 * PROGRAM_LOG_BYTES


async def test_nothing_is_started_while_everybody_stands_still_for_a_capture(real_program: Place) -> None:
    place = real_program
    await place.run("rm -f /tmp/count")
    await place.guest.set_program(ProgramSpec(("/bin/sh", "-c", "echo >>/tmp/count; exit 1")))
    await until(place, lambda status: status.state is ProgramState.BACKING_OFF)
    if not await place.link.quiesce(deadline_s=DEADLINE_S):
        await place.link.thaw()
        pytest.skip("this host has no cgroup2 to freeze processes with")
    started = (await place.guest.program()).restarts
    held = await until(place, lambda status: status.state is ProgramState.STARTING)  # its wait is over, and it waits on
    assert held.pid is None and held.restarts == started
    await place.link.thaw()
    await until(place, lambda status: status.restarts > started)


async def test_a_frozen_program_goes_on_as_it_was(real_program: Place) -> None:
    place = real_program
    before = await place.guest.set_program(ProgramSpec(("/bin/sh", "-c", "exec sleep 1000")))
    await place.link.quiesce(deadline_s=DEADLINE_S)
    await place.link.thaw()
    await place.link.wake(WakeRequest(identity(1), environment={"COLOUR": "green"}))
    after = await place.guest.program()
    assert (after.pid, after.state, after.restarts) == (before.pid, ProgramState.RUNNING, before.restarts)


async def test_a_file_that_others_can_write_names_nothing(real_program: Place) -> None:
    place = real_program
    await place.guest.set_program(ProgramSpec(("/bin/sh", "-c", "exec sleep 1000")))
    await place.run(f"chmod 666 {PROGRAM_FILE}")
    status = await place.guest.act_on_program(ProgramAct.RESTART)
    assert (status.state, status.spec) == (ProgramState.NONE, None) and "others than root" in status.problem


# --------------------------------------------------------------------------------------------------------- a dead agent


@pytest_asyncio.fixture(loop_scope="session")
async def pair() -> AsyncIterator[tuple[HostAgent, Place]]:
    async with host_agent() as found:
        yield found


async def kill_agent(agent: HostAgent, place: Place) -> None:
    """Returns when another one answers. What is asked at that moment fails, as for any caller."""
    before = place.link.hello
    os.kill(await agent.agent_pid(), signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_S):
        while place.link.hello is before:
            with suppress(MachineDied):
                await place.guest.ping()
    await place.guest.ping()


async def test_a_new_agent_finds_the_program_its_log_and_whether_it_was_stopped(pair: tuple[HostAgent, Place]) -> None:
    agent, place = pair
    counting = "i=0; while :; do i=$((i+1)); echo line $i; sleep 0.05; done"
    before = await place.guest.set_program(ProgramSpec(("/bin/sh", "-c", counting)))
    await reads(place, b"line 3\n", 0)
    await kill_agent(agent, place)
    after = await until(place, lambda status: status.state is ProgramState.RUNNING)
    if after.pid != before.pid:
        pytest.skip("without cgroup2 a new agent cannot tell whose process it finds")
    whole = await reads(place, b"line 40\n", 0)
    assert [int(text.split()[1]) for text in whole.splitlines()[:40]] == [*range(1, 41)], "nothing of its output is lost"
    stopped = await place.guest.act_on_program(ProgramAct.STOP)
    assert stopped.state is ProgramState.STOPPED
    await kill_agent(agent, place)
    found = await until(place, lambda status: status.spec is not None)
    assert found.state is ProgramState.STOPPED
    assert (await place.run("echo fine")).stdout == b"fine\n"


async def test_an_agent_that_begins_starts_what_the_disk_names_once(pair: tuple[HostAgent, Place]) -> None:
    """As after a boot: nobody has said anything to it but a wake."""
    agent, place = pair
    await place.guest.set_program(None)
    await place.run("rm -f /tmp/count")
    spec = ProgramSpec(("/bin/sh", "-c", "echo >>/tmp/count; exec sleep 1000"))
    await place.guest.make_dir("/etc/perdure")
    await place.guest.write_file(PROGRAM_FILE, one(spec.to_file()), mode=0o644)
    assert (await place.guest.program()).state is ProgramState.NONE
    await kill_agent(agent, place)
    status = await until(place, lambda status: status.state is ProgramState.RUNNING)
    assert (status.spec, status.restarts) == (spec, 0)
    for _ in range(2):
        await place.link.wake(WakeRequest(identity(1)))
    assert (await place.guest.program()).pid == status.pid
    assert (await place.run("wc -l </tmp/count")).stdout.strip() == b"1"


async def test_a_program_is_no_command_and_is_not_listed(program: Place) -> None:
    await program.guest.set_program(line(program, ("hang", "")))
    handle = await program.guest.start_exec(ExecSpec(new_id(), shell=program.shell("hang")))
    assert [one.exec_id for one in await program.guest.list_execs() if one.exited is None] == [handle.exec_id]
    await program.guest.kill_exec(handle.exec_id)
    await handle.close()
