"""Commands on a terminal: what every guest does, and what only the real agent can show."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from perdure.core.errors import AlreadyExists, Conflict, InvalidRequest
from perdure.machines.driver import ChannelName
from perdure.machines.guestlink import GuestLink, WakeRequest
from perdure.wire.guest.ops import Code
from perdure.wire.node import ExecEnd, ExecExited, ExecHandle, ExecOutput, ExecSpec, PtySize
from tests.contract.guest.places import DEADLINE_S, Place, host_agent, identity, new_id
from tests.contract.guest.test_link import lying

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Screen:
    """One client of a terminal: what it has shown so far."""

    def __init__(self, place: Place, handle: ExecHandle) -> None:
        self.place = place
        self.handle = handle
        self.exec_id = handle.exec_id
        self.shown = b""
        self.gap = 0
        self.exited: ExecExited | None = None
        self._events = handle.events()

    async def step(self) -> None:
        event = await anext(self._events)
        if isinstance(event, ExecOutput):
            assert event.stream == "stdout"
            self.shown += event.data
            self.gap += event.gap
        elif isinstance(event, ExecExited):
            self.exited = event

    async def until(self, pattern: bytes) -> re.Match[bytes]:
        """Wait until it shows that, and leave only what came after it."""
        async with asyncio.timeout(DEADLINE_S):
            while not (found := re.search(pattern, self.shown)):
                assert self.exited is None, self.shown
                await self.step()
        self.shown = self.shown[found.end() :]
        return found

    async def type(self, text: str) -> None:
        await self.handle.write_stdin(text.encode())

    async def end(self) -> ExecExited:
        async with asyncio.timeout(DEADLINE_S):
            while self.exited is None:
                await self.step()
        await self.handle.close()
        return self.exited

    async def leave(self) -> None:
        await self._events.aclose()  # type: ignore[attr-defined]
        await self.handle.close()


async def start(place: Place, rows: int = 24, cols: int = 80, **fields: Any) -> Screen:
    handle = await place.guest.start_exec(ExecSpec(new_id(), pty=PtySize(rows, cols), **fields))
    return Screen(place, handle)


async def attach(screen: Screen, offset: int = 0) -> Screen:
    return Screen(screen.place, await screen.place.guest.attach_exec(screen.exec_id, offset))


async def say(screen: Screen, word: str) -> None:
    """Have it print a word that is not in the echo of what was typed. What was typed ahead of a prompt is echoed before it."""
    if screen.place.kind == "fake":
        await screen.type(f"echo said-{word}\r")
        await screen.until(rb"\nsaid-" + word.encode() + rb"\r\n")
    else:
        await screen.type(f"echo said-''{word}\r")
        await screen.until(b"said-" + word.encode() + rb"\r\n")


def size_command(place: Place) -> str:
    return "size" if place.kind == "fake" else "stty size"


# ------------------------------------------------------------------------------------------------------- every guest


async def test_a_shell_runs_what_is_typed_and_ends_with_its_code(place: Place) -> None:
    screen = await start(place)
    await say(screen, "hello")
    await screen.type("exit 7\r")
    exited = await screen.end()
    assert (exited.end, exited.exit_code) == (ExecEnd.EXITED, 7)


async def test_it_is_listed_with_the_commands_and_told_from_them(place: Place) -> None:
    screen = await start(place, 30, 100)
    await say(screen, "x")
    listed = {info.exec_id: info for info in await place.guest.list_execs()}
    assert listed[screen.exec_id].pty == PtySize(30, 100)
    assert listed[screen.exec_id].command == "(shell)"
    await place.guest.kill_exec(screen.exec_id)
    assert (await screen.end()).end is ExecEnd.KILLED
    listed = {info.exec_id: info for info in await place.guest.list_execs()}
    assert listed[screen.exec_id].exited is not None


async def test_a_new_size_reaches_the_programs_on_it(place: Place) -> None:
    """(peers: row 28)"""
    screen = await start(place, 24, 80)
    await say(screen, "ready")
    await screen.type(f"{size_command(place)}\r")
    await screen.until(rb"24 80\r\n")
    await place.guest.resize_exec(screen.exec_id, PtySize(50, 132))
    await screen.type(f"{size_command(place)}\r")
    await screen.until(rb"50 132\r\n")
    (info,) = [info for info in await place.guest.list_execs() if info.exec_id == screen.exec_id]
    assert info.pty == PtySize(50, 132)
    await screen.type("exit\r")
    await screen.end()


async def test_who_comes_later_sees_what_was_shown_and_all_type_into_the_same(place: Place) -> None:
    first = await start(place)
    await say(first, "early")
    second = await attach(first)
    await second.until(rb"said-early\r\n")
    await say(second, "late")
    await first.until(rb"said-late\r\n")
    await first.leave()
    await say(second, "alone")
    await second.type("exit 3\r")
    assert (await second.end()).exit_code == 3
    third = await attach(second)
    await third.until(rb"(?s)said-early\r\n.*said-late\r\n.*said-alone\r\n")
    assert (await third.end()).exit_code == 3


async def test_ctrl_c_ends_what_runs_and_not_the_shell(place: Place) -> None:
    screen = await start(place)
    await say(screen, "ready")
    hang = place.shell("hang").removeprefix("exec ")
    await screen.type(f"{hang}\r")
    await screen.until(rb"\r\n")
    if place.kind != "fake":  # the terminal's own interrupt counts once the program has the foreground
        await in_foreground(screen, hang)
    await screen.type("\x03")
    await screen.until(rb"(?s)\^C.*[#$] ")
    await say(screen, "still here")
    await screen.until(rb"[#$] ")  # before its prompt the line discipline takes the key, and the shell reads a NUL
    await screen.type("\x04")
    assert (await screen.end()).end is ExecEnd.EXITED


async def in_foreground(screen: Screen, args: str) -> None:
    """Until a program runs there; ``args`` must be nobody else's, since all terminals of the place are looked at."""
    tty = f"ps -eo stat=,args= | grep -q '+ *{args}$'"
    done = await screen.place.run(f"until {tty}; do sleep 0.1; done", run_limit_s=DEADLINE_S)
    assert done.exited.end is ExecEnd.EXITED


async def test_a_command_that_is_no_shell_has_a_terminal_too(place: Place) -> None:
    screen = await start(place, 10, 20, shell=size_command(place))
    exited = await screen.end()
    assert (screen.shown, exited.exit_code) == (b"10 20\r\n", 0)


@pytest.mark.parametrize("size", [PtySize(0, 80), PtySize(24, 0), PtySize(24, 5000), PtySize(-1, 80)])
async def test_a_size_that_is_none_is_refused(place: Place, size: PtySize) -> None:
    screen = await start(place)
    with pytest.raises(InvalidRequest):
        await place.guest.resize_exec(screen.exec_id, size)
    await place.guest.kill_exec(screen.exec_id)
    await screen.end()


async def test_a_command_without_a_terminal_has_no_size(place: Place) -> None:
    handle = await place.guest.start_exec(ExecSpec(new_id(), shell=place.shell("hang")))
    with pytest.raises(Conflict, match="has no terminal"):
        await place.guest.resize_exec(handle.exec_id, PtySize(24, 80))
    await place.guest.kill_exec(handle.exec_id)
    await handle.close()


async def test_a_second_start_under_its_id_is_refused(place: Place) -> None:
    screen = await start(place)
    with pytest.raises(AlreadyExists):
        await place.guest.start_exec(ExecSpec(screen.exec_id, pty=PtySize(24, 80)))
    await place.guest.kill_exec(screen.exec_id)
    await screen.end()


# ------------------------------------------------------------------------------------------------------ the real agent


@pytest.mark.parametrize("size", [PtySize(0, 80), PtySize(24, 70000)])
async def test_a_start_with_a_size_that_is_none_is_refused(real: Place, size: PtySize) -> None:
    with pytest.raises(InvalidRequest, match="rows or columns"):
        await real.guest.start_exec(ExecSpec(new_id(), pty=size))


async def test_it_is_the_controlling_terminal_and_belongs_to_its_user(real: Place) -> None:
    screen = await start(real, shell="tty; stat -c %U $(tty); echo $TERM; id -un; echo typed >/dev/tty", user="nobody")
    await screen.end()
    name, owner, term, user, typed = screen.shown.decode().split()
    assert name.startswith("/dev/pts/")
    assert (owner, term, user, typed) == ("nobody", "xterm-256color", "nobody", "typed")


async def test_characters_are_whole_whatever_their_bytes(real: Place) -> None:
    """(peers: row 28) Bytes go both ways as they are; a backspace takes away one character of several bytes."""
    text = "žluťoučký 🐎 kůň " * 500
    screen = await start(real, shell="stty -echo -icanon; echo go; head -c $1 | md5sum".replace("$1", str(len(text.encode()))))
    await screen.until(rb"go\r\n")
    data = text.encode()
    for at in range(0, len(data), 997):  # in the middle of characters
        await screen.handle.write_stdin(data[at : at + 997])
    import hashlib

    await screen.until(hashlib.md5(data, usedforsecurity=False).hexdigest().encode())
    await screen.end()
    lines = await start(real, shell='echo go; read line; echo "[$line]"')
    await lines.until(rb"go\r\n")
    await lines.type("aé\x7fb\r")
    await lines.until(rb"\[ab\]\r\n")
    await lines.end()


async def test_a_resize_signals_what_runs_in_the_foreground_even_when_nothing_changed(real: Place) -> None:
    """(peers: row 28) A full-screen program draws anew for whoever has just attached."""
    # It waits for a background job: a shell that is starting a program drops signals (dash, while it has vforked). And it is no
    # bash, which sleeps on a signal that came between its look for one and its wait.
    script = "trap 'echo winch' WINCH; sleep 1003 & echo ready; while :; do wait; done"
    screen = await start(real, shell=f'exec dash -c "{script}"')
    await screen.until(rb"ready\r\n")
    await real.guest.resize_exec(screen.exec_id, PtySize(25, 80))
    await screen.until(rb"winch\r\n")
    await real.guest.resize_exec(screen.exec_id, PtySize(25, 80))
    await screen.until(rb"winch\r\n")
    await real.guest.kill_exec(screen.exec_id)
    await screen.end()


async def test_a_signal_goes_to_the_foreground(real: Place) -> None:
    screen = await start(real, kill_grace_s=DEADLINE_S)  # a busy host gives a shell little time to die of SIGHUP
    await say(screen, "ready")
    await screen.type("sleep 1001\r")
    await in_foreground(screen, "sleep 1001")
    await real.guest.signal_exec(screen.exec_id, 15)
    await screen.until(rb"(?s)Terminated.*[#$] ")
    await say(screen, "alive")
    await screen.until(rb"[#$] ")  # between two lines bash puts a hangup off until somebody types
    await real.guest.kill_exec(screen.exec_id)
    exited = await screen.end()
    assert (exited.end, exited.signal) == (ExecEnd.KILLED, 1), "a shell with somebody at it ends by SIGHUP only"


async def test_a_kill_ends_what_the_shell_had_started(real: Place) -> None:
    """(peers: row 26)"""
    tag = str(int.from_bytes(os.urandom(3), "big") + 10_000_000)
    screen = await start(real)
    await say(screen, "ready")
    await screen.type(f"(setsid nohup sleep {tag} &) ; sleep {tag}\r")
    await in_foreground(screen, f"sleep {tag}")
    await real.guest.kill_exec(screen.exec_id)
    await screen.end()
    gone = await real.run(f"while ps -eo args | grep -q '^sleep {tag}$'; do sleep 0.1; done", run_limit_s=DEADLINE_S)
    assert gone.exited.end is ExecEnd.EXITED


@pytest.mark.long_on("vm")
async def test_the_last_words_are_not_lost(real: Place) -> None:
    for _ in range(10):
        screen = await start(real, shell="head -c 30000 /dev/zero | tr '\\0' x; echo; echo last words")
        await screen.end()
        assert screen.shown == b"x" * 30000 + b"\r\nlast words\r\n"


async def test_what_keeps_the_terminal_open_after_its_shell_does_not_keep_it_alive(real: Place) -> None:
    screen = await start(real)
    await say(screen, "ready")
    await screen.type("(trap '' HUP; exec sleep 1000) & disown; exit 5\r")
    assert (await screen.end()).exit_code == 5
    assert (await real.run("pkill -x sleep; echo fine")).stdout == b"fine\n"


async def test_a_program_that_closes_its_terminal_costs_nothing_and_may_open_it_again(real: Place) -> None:
    screen = await start(real, shell="exec </dev/null >/dev/null 2>&1; sleep 0.5; exec >/dev/tty; echo back; exec sleep 1000")
    await screen.until(rb"back\r\n")
    await real.guest.kill_exec(screen.exec_id)
    await screen.end()


@pytest.mark.long_on("vm")
async def test_a_client_that_does_not_read_holds_up_nobody(real: Place) -> None:
    """Three times what is kept; the one that reads gets all, the other one is told what it missed."""
    size = 3_000_000
    slow = await start(real, shell=f"stty -opost; read x; head -c {size} /dev/zero | tr '\\0' x; echo end; read x")
    quick = await attach(slow)
    await quick.type("\r")
    async with asyncio.timeout(DEADLINE_S):
        while not quick.shown.endswith(b"end\n"):
            await quick.step()
    assert quick.shown.count(b"x") == size and quick.gap == 0
    await quick.type("\r")
    await quick.end()
    await slow.end()
    assert slow.gap > 0 and b"end\n" in slow.shown[-10:]


@pytest_asyncio.fixture(loop_scope="session")
async def waiting(real: Place) -> AsyncIterator[Screen]:
    """A shell that nobody is at."""
    await real.run("kill -9 -1")
    screen = await start(real)
    await say(screen, "ready")
    yield screen
    await real.guest.kill_exec(screen.exec_id)


async def running(place: Place) -> int:
    await place.link.cpu_s()  # as a node's pulse does
    return place.link.activity().running_execs


async def test_a_shell_at_its_prompt_is_no_activity_once_everybody_has_left(real: Place, waiting: Screen) -> None:
    """ADR 10: what runs keeps the workspace awake, watched or not; a prompt does not."""
    assert await running(real) == 1, "somebody is attached"
    await waiting.leave()
    async with asyncio.timeout(DEADLINE_S):
        while await running(real):  # until the agent has heard that its client left
            pass
    again = await attach(waiting)
    assert real.link.activity().running_execs == 1, "known at once"
    await again.type("sleep 1002\r")
    await in_foreground(again, "sleep 1002")
    await again.leave()
    async with asyncio.timeout(DEADLINE_S):
        while real.link.activity().open_execs:
            await running(real)
    for _ in range(3):
        assert await running(real) == 1, "a job runs in it"


async def test_a_terminal_with_a_command_is_activity_like_any_command(real: Place) -> None:
    """(peers: row 13)"""
    await real.run("kill -9 -1")
    screen = await start(real, shell="echo ready; read x")
    await screen.until(b"ready")
    await screen.leave()
    for _ in range(3):
        assert await running(real) == 1
    await real.guest.kill_exec(screen.exec_id)
    await (await attach(screen)).end()


async def test_terminals_outlive_the_hosts_connection() -> None:
    """A server that is started again, or a wake: the next link finds the shell as it was."""
    async with host_agent() as (agent, place):
        screen = await start(place)
        await screen.type("cd /tmp; NAME=kept\r")
        await say(screen, "before")
        await place.link.close()
        link = GuestLink(agent.connect, generation=2, unresponsive_s=DEADLINE_S)
        await link.open(DEADLINE_S)
        try:
            report = await link.wake(WakeRequest(identity(2)))
            assert report.execs_running == (screen.exec_id,)
            again = await attach(Screen(Place(link, "agent"), screen.handle))
            await again.until(rb"said-before\r\n")
            await again.type("echo $PWD-$NAME-''\r")
            await again.until(rb"/tmp-kept-\r\n")
            await again.type("exit\r")
            await again.end()
        finally:
            await link.close()


# ------------------------------------------------------------------------------------------------------- other agents


async def test_an_agent_that_is_older_than_terminals_is_named() -> None:
    async with lying() as (liar, link):
        starting = asyncio.create_task(link.start_exec(ExecSpec(new_id(), pty=PtySize(24, 80))))
        liar.muxes[ChannelName.DATA].reset(await liar.opened.get(), Code.INVALID, "The agent knows no operation 'pty'.")
        liar.flush()
        with pytest.raises(Conflict, match="older than the server"):
            await starting
        assert link.activity().running_execs == 0


@pytest.mark.parametrize("waiting", [None, "exe_1", 7, [1, None, {}], ["exe_none"]])
async def test_what_a_guest_says_of_prompts_does_no_harm(waiting: Any) -> None:
    async with lying() as (liar, link):
        liar.answer = {"ok": True, "cpu_us": 5_000_000, "at_prompt": waiting}
        assert await link.cpu_s() == 5
        assert link.activity().running_execs == 0
