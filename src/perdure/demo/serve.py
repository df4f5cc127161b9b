"""``perdure bench serve``: what a server does for people who build on it: commands, many streams, many wakes at once, files, and
what it takes while nobody asks for anything.

Commands and files go through SDK and HTTP, each beside the same over the bare guest protocol (``floor``) in the same run; samples
of both alternate. Machines of both are awake at that time, and the one that is not asked stands idle.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from perdure.core.errors import PerdureError
from perdure.demo import floor, observe
from perdure.demo.server import temporary_server
from perdure.demo.stats import Against, Baseline, Goal, Row, percentile, rows
from perdure.demo.steps import expect
from perdure.demo.suite import Bench, Progress, isolation_of
from perdure.machines.guestlink import GuestLink
from perdure.sdk import AsyncCommandHandle, AsyncWorkspace

SAMPLES = 20
STREAMS = 200
SLEEPERS = 100
#: With fewer samples than usual the run is a trial, and so are its crowds.
TRIAL_STREAMS = 20
TRIAL_SLEEPERS = 6
#: Begun together; that many wait for the guest at a time.
STARTED_AT_ONCE = 16
FILE_MIB = 64
TRIAL_FILE_MIB = 8
PATIENCE_S = 600.0


async def run(say: Progress, count: int = SAMPLES) -> list[Row]:
    """The whole suite, about six minutes under emulation. Raises PerdureError when something does not work at all."""
    async with temporary_server(idle_timeout_s=0.0, checkpoint_interval_s=0.0, pool_size=1) as server:
        async with Bench.over(server, say, count) as bench:
            found = await _idle(bench)
            ws = await AsyncWorkspace.create("bench", client=bench.client)
            async with floor.Rig.open(server.settings, isolation_of(ws)) as rig, rig.awake() as link:
                await _commands(bench, ws, link)
                await _files(bench, ws, link)
            found += [*_command_rows(bench), *await _streams(bench, ws), *_file_rows(bench)]
            await ws.delete()
            found += await _stampede(bench)
        return found


# -------------------------------------------------------------------------------------------------------------------- idle


async def _idle(bench: Bench) -> list[Row]:
    """Of a server that has answered, has built its pool and is asked nothing."""
    bench.say("looking at an idle server")
    await bench.breathe()
    pid = bench.server.pid
    pool = observe.vmms(pid)
    others = observe.descendants(pid) - pool
    database = observe.database(bench.server.settings)
    return [
        Row("memory of the idle API process", observe.resident_bytes(pid) / 1e6, "MB", goal=Goal(at_most=150), note="RSS"),
        Row("memory of its database", observe.proportional_bytes(database) / 1e6, "MB", note=f"PSS of {len(database)} processes"),
        Row("memory of its warm pool", observe.proportional_bytes(pool) / 1e6, "MB", note=f"PSS of {len(pool)} machines"),
        Row("memory of its other processes", observe.proportional_bytes(others - database) / 1e6, "MB", note="PSS"),
    ]


# ---------------------------------------------------------------------------------------------------------------- commands


async def _commands(bench: Bench, ws: AsyncWorkspace, link: GuestLink) -> None:
    for round_number in range(bench.count * 5):
        if round_number % 20 == 0:
            bench.say(f"command: round {round_number + 1} of {bench.count * 5}")
        bench.samples["command"].append(await _timed_ms(lambda: _true(ws)))
        bench.samples["bare command"].append(await _timed_ms(lambda: floor.execute(link, "/bin/true")))


async def _true(ws: AsyncWorkspace) -> None:
    result = await ws.commands.run(["/bin/true"], timeout=PATIENCE_S)
    expect(result.ok, f"/bin/true failed in the workspace: {result.detail or result.end}")


def _command_rows(bench: Bench) -> list[Row]:
    bare = Against("bare: the same command over the guest protocol alone", bench.samples["bare command"])
    return rows(
        "warm command, SDK to exit code and back",
        bench.samples["command"],
        "ms",
        against=bare,
        goal=Goal(times=3),
        note="/bin/true",
    )


# ----------------------------------------------------------------------------------------------------------------- streams


@dataclass(slots=True)
class _Echo:
    """A ``cat`` that is fed and followed."""

    handle: AsyncCommandHandle
    heard: bytes = b""

    async def listen(self, said: asyncio.Event, awaited: bytes) -> None:
        async for output in self.handle:
            self.heard += output.data
            if awaited in self.heard:
                said.set()


async def _streams(bench: Bench, ws: AsyncWorkspace) -> list[Row]:
    """So many commands followed at once on one workspace: each is fed, all answer while all are open, then all are ended."""
    count = STREAMS if bench.count >= SAMPLES else TRIAL_STREAMS
    bench.say(f"opening {count} streams on one workspace")
    gate = asyncio.Semaphore(STARTED_AT_ONCE)

    async def started() -> _Echo:
        async with gate:
            return _Echo(await ws.commands.run(["cat"], background=True, stdin=True))

    begun = time.perf_counter()
    echoes = await asyncio.gather(*(started() for _ in range(count)))
    took_ms = (time.perf_counter() - begun) * 1000
    answered, ended = [asyncio.Event() for _ in echoes], []
    first = [f"first of {number}\n".encode() for number in range(count)]
    followers = [asyncio.create_task(echo.listen(event, line)) for echo, event, line in zip(echoes, answered, first, strict=True)]
    try:
        async with asyncio.timeout(PATIENCE_S):

            async def ask(number: int) -> float:
                asked = time.perf_counter()
                await echoes[number].handle.send_stdin(first[number])
                await answered[number].wait()
                return (time.perf_counter() - asked) * 1000

            bench.say(f"{count} streams are open: asking each")
            taken = await asyncio.gather(*(ask(number) for number in range(count)))
            await asyncio.gather(*(echo.handle.send_stdin(b"last\n", eof=True) for echo in echoes))
            ended = await asyncio.gather(*followers, return_exceptions=True)
    finally:
        for follower in followers:
            follower.cancel()
    whole = [error is None and echo.heard == line + b"last\n" for error, echo, line in zip(ended, echoes, first, strict=True)]
    return [
        Row(
            f"streams of {count} at once on one workspace that failed or lost a byte",
            whole.count(False),
            "streams",
            goal=Goal(at_most=0),
        ),
        Row(f"starting {count} commands", took_ms, "ms", note=f"{STARTED_AT_ONCE} at a time"),
        *rows(f"answer of a command through its stream, {count} open and asked at once", taken, "ms"),
    ]


# ------------------------------------------------------------------------------------------------------------------- files


async def _files(bench: Bench, ws: AsyncWorkspace, link: GuestLink) -> None:
    content = os.urandom((FILE_MIB if bench.count >= SAMPLES else TRIAL_FILE_MIB) << 20)
    path = "/root/large"

    async def read_back() -> None:
        expect(await ws.files.read(path, format="bytes") == content, "A file came back otherwise than it was sent.")

    rounds = max(2, bench.count // 4)
    for round_number in range(rounds):
        bench.say(f"files: round {round_number + 1} of {rounds}")
        bench.samples["upload"].append(await _timed_ms(lambda: ws.files.write(path, content)))
        bench.samples["bare upload"].append(await _timed_ms(lambda: floor.upload(link, path, content)))
        bench.samples["download"].append(await _timed_ms(read_back))
        bench.samples["bare download"].append(await _timed_ms(lambda: floor.download(link, path, len(content))))
    bench.notes["file"] = f"{len(content) >> 20} MiB of random bytes"


def _file_rows(bench: Bench) -> list[Row]:
    found = []
    for way in ("upload", "download"):
        bare = Against("bare: the same file over the guest protocol, without SHA-256", bench.samples[f"bare {way}"])
        note = f"{bench.notes['file']}; 60 % of the bare speed is 1.67 times its time"
        found += rows(way, bench.samples[way], "ms", against=bare, goal=Goal(times=1 / 0.6), note=note)
    return found


# ---------------------------------------------------------------------------------------------------------------- stampede


async def _stampede(bench: Bench) -> list[Row]:
    """Many sleepers are asked for at the same time."""
    count = SLEEPERS if bench.count >= SAMPLES else TRIAL_SLEEPERS
    sleepers = []
    for number in range(count):
        if number % 10 == 0:
            bench.say(f"putting {count} workspaces to sleep: {number} sleep")
        sleepers.append(await AsyncWorkspace.create(f"sleeper-{number}", client=bench.client))
        await sleepers[-1].sleep()
    await bench.breathe()
    bench.say(f"waking {count} workspaces at once")
    begun = time.perf_counter()
    taken = await asyncio.gather(*(_woken_ms(ws) for ws in sleepers))
    wall_ms = (time.perf_counter() - begun) * 1000
    bench.say(f"deleting {count} workspaces")
    for ws in sleepers:
        await ws.delete()
    return _stampede_rows(bench, taken, wall_ms, [max(ws.report.timings_ms.values()) for ws in sleepers if ws.report is not None])


async def _woken_ms(ws: AsyncWorkspace) -> float | None:
    """From asking to the answer; None for one that did not wake."""
    begun = time.perf_counter()
    try:
        await ws.wake()
    except PerdureError:
        return None
    return (time.perf_counter() - begun) * 1000


def _stampede_rows(bench: Bench, taken: list[float | None], wall_ms: float, starts_ms: list[float]) -> list[Row]:
    woken = [one for one in taken if one is not None]
    allowed = bench.server.settings.parallel_starts
    name = f"{len(taken)} sleeping workspaces woken at once"
    found = [Row(f"{name}: wakes that failed", len(taken) - len(woken), "wakes", goal=Goal(at_most=0))]
    if woken:
        found += [Row(f"{name}, request to awake p{percent}", percentile(woken, percent), "ms") for percent in (50, 95, 99)]
    note = "time that starts took, summed, over the time that all took"
    mean = Row(
        f"{name}: machines starting at a time", sum(starts_ms) / wall_ms, "machines", goal=Goal(at_most=allowed), note=note
    )
    return [*found, mean, Row(f"{name}: all of them", wall_ms, "ms", Baseline("longest start of one of them", max(starts_ms)))]


async def _timed_ms(action: Callable[[], Awaitable[object]]) -> float:
    begun = time.perf_counter()
    await action()
    return (time.perf_counter() - begun) * 1000
