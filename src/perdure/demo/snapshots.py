"""``perdure bench snapshots``: what branches, cold snapshots, large workspaces and compaction cost, each beside its own measure.

As in ``wake``, the product's way is a user's, over HTTP, and what it is compared with is measured in the same run. Under
emulation a run of ten samples takes about a quarter of an hour, most of it for cold boots and for memory that a guest fills.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from perdure.core.ids import WorkspaceId
from perdure.demo import observe
from perdure.demo.floor import Rig
from perdure.demo.server import server_in, temporary_home, temporary_server
from perdure.demo.stats import Against, Baseline, Goal, Row, rows
from perdure.demo.steps import expect
from perdure.demo.suite import SET_UP, Bench, Progress, isolation_of, light_script, prepare, tell
from perdure.node.warming import NOTED_AFTER_S
from perdure.sdk import AsyncWorkspace
from perdure.snapshots.manifest import MANIFEST, LiveRecord, Manifest, MemoryFacts
from perdure.wire.objects import IMAGES

SAMPLES = 10
BRANCHES = 8
POOL = 1
#: A workspace of this much memory of which so much is live.
LARGE_MEMORY_MIB, LARGE_LIVE_MIB = 2048, 1000
#: How long the node may take to give it a base of its own: it looks at what fell asleep every half minute.
REBASED_WITHIN_S = 300.0
#: Workspaces in the object store; fewer in a trial of few samples.
FLEET, TRIAL_FLEET = 20, 3
#: What the compacted workspace's process held, and gave back of it.
HELD_MIB, DROPPED_MIB = 200, 140
#: Nothing happens by itself.
_QUIET = {"idle_timeout_s": 0.0, "checkpoint_interval_s": 0.0, "pool_size": POOL}
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_PAGE = 4096
_WRITTEN_AT_ONCE = 4 << 20


async def run(say: Progress, count: int = SAMPLES) -> list[Row]:
    """The whole suite. Raises PerdureError when something does not work at all."""
    async with temporary_server(**_QUIET) as server, Bench.over(server, say, count) as bench:
        ws = await prepare(bench)
        async with Rig.open(server.settings, isolation_of(ws)) as rig:
            await rig.prepare(SET_UP)
            forks = await _forks(bench, ws, rig)
            compaction = await _compaction(bench, rig)
        cold = await _cold_wakes(bench, ws)
        await ws.delete()
        await bench.server.emptied()
        large = await _large(bench)
    return [*forks, *cold, *large, *compaction, *await _stored(say, count)]


# ---------------------------------------------------------------------------------------------------------------------- fork


async def _forks(bench: Bench, ws: AsyncWorkspace, rig: Rig) -> list[Row]:
    """Each round: bare restores and a fork; cold boots, which take longest, in every third."""
    private: list[Row] = []
    for number in range(bench.count):
        bench.say(f"fork of {BRANCHES}: round {number + 1} of {bench.count}")
        if number % 3 == 0:
            bench.samples["cold"].append(await rig.cold_boots(BRANCHES) * 1000)
        bench.samples["bare"].append(await rig.restores(BRANCHES, POOL) * 1000)
        await tell(ws, "change 1")  # a fork of what nobody touched would be a cheap one
        await bench.breathe()
        started = time.perf_counter()
        forked = await ws.fork(BRANCHES)
        bench.samples["fork"].append((time.perf_counter() - started) * 1000)
        branches = [branch for branch in forked if isinstance(branch, AsyncWorkspace)]
        expect(len(branches) == BRANCHES, f"Only {len(branches)} of {BRANCHES} branches started.")
        if number == bench.count - 1:
            private = await _private(bench, branches)
        for branch in branches:
            await branch.delete()
        await bench.breathe()
    taken, name = bench.samples["fork"], f"fork of {BRANCHES} branches of a running workspace"
    bare = Against(f"bare: {BRANCHES} restores at once, {POOL} of their machines warm", bench.samples["bare"])
    cold = Against(f"{BRANCHES} cold boots at once, our own init to the agent's hello", bench.samples["cold"])
    note = "request to the answer, when all are awake; its checkpoint is counted too"
    return [
        *rows(name, taken, "ms", against=bare, goal=Goal(times=1.3), note=note),
        *rows(f"{name}, against cold boots", taken, "ms", against=cold, goal=Goal(times=1 / 4)),
        *private,
    ]


async def _private(bench: Bench, branches: list[AsyncWorkspace]) -> list[Row]:
    """What each branch's machine has for itself after a light script, over what the guest has changed of its memory."""
    over, deltas = [], []
    for number, branch in enumerate(branches, 1):
        bench.say(f"the light script in branch {number} of {BRANCHES}")
        await light_script(branch)
    for branch in branches:
        own = observe.private_bytes(_processes(bench, branch))
        snapshot = await branch.checkpoint()
        deltas.append(_memory(bench, snapshot.id).pages * _PAGE / 1e6)
        over.append(own / 1e6 - deltas[-1])
    note = f"the largest of {len(branches)} branches; their deltas are {min(deltas):.0f} to {max(deltas):.0f} MB"
    return [
        Row("private memory of a branch after the light script, without its delta", max(over), "MB", None, Goal(at_most=80), note)
    ]


def _processes(bench: Bench, ws: AsyncWorkspace) -> set[int]:
    """Those of a workspace's machine, by the node's own record."""
    name = f"{WorkspaceId(ws.id)}.json"
    record = LiveRecord.from_bytes((bench.server.settings.store / "live" / name).read_bytes(), name)
    assert record.pid is not None, "an awake workspace has a machine"
    return {record.pid} | observe.descendants(record.pid)


def _memory(bench: Bench, snapshot_id: str) -> MemoryFacts:
    """The memory of a snapshot, by its manifest."""
    path = bench.server.settings.store / "snapshots" / snapshot_id / MANIFEST
    memory = Manifest.from_bytes(path.read_bytes(), MANIFEST).memory
    assert memory is not None, "what was captured running has memory"
    return memory


# ----------------------------------------------------------------------------------------------------------------- cold wakes


async def _cold_wakes(bench: Bench, ws: AsyncWorkspace) -> list[Row]:
    """Wakes of a light workspace after the host's page cache was emptied, each after one when it was not. One wake before all
    of them lasts as long as the node takes to note what a wake reads."""
    name = "wake with cold caches, request to first agent reply"
    await light_script(ws)
    await ws.sleep()
    await asyncio.to_thread(drop_caches)
    await ws.wake()
    await bench.server.ends_within(NOTED_AFTER_S + 1)
    await ws.sleep()
    for number in range(bench.count):
        bench.say(f"wake with cold caches: round {number + 1} of {bench.count}")
        bench.samples["warm"].append(await _wake(bench, ws))
        if (why := await asyncio.to_thread(drop_caches)) is not None:
            return [Row(name, None, "ms", note=f"the page cache cannot be emptied here ({why}): it takes root")]
        bench.samples["cold wake"].append(await _wake(bench, ws))
    warm = Against("the same with warm caches", bench.samples["warm"])
    note = "a warm machine waits, as it does a moment after a server's start"
    return rows(name, bench.samples["cold wake"], "ms", against=warm, goal=Goal(times=3), note=note)


def drop_caches() -> str | None:
    """Write everything down and empty the page cache. Returns why that was not possible."""
    os.sync()
    try:
        DROP_CACHES.write_text("3\n")
    except OSError as error:
        return error.strerror
    return None


async def _wake(bench: Bench, ws: AsyncWorkspace) -> float:
    """Milliseconds of a wake; afterwards it sleeps again."""
    await bench.breathe()
    started = time.perf_counter()
    await ws.wake()
    taken = (time.perf_counter() - started) * 1000
    await bench.breathe()
    await ws.sleep()
    return taken


# ---------------------------------------------------------------------------------------------------------------------- large


async def _large(bench: Bench) -> list[Row]:
    """A gigabyte of live data: a sleep that has to write all of it anew, beside that much written to the same disk."""
    ws = await prepare(bench, "large", memory_mib=LARGE_MEMORY_MIB)
    bench.say(f"filling {LARGE_LIVE_MIB} MiB of memory")
    await tell(ws, f"grow {LARGE_LIVE_MIB}")
    written = []
    rounds = max(2, bench.count // 4)
    for number in range(rounds):
        bench.say(f"sleep with {LARGE_LIVE_MIB} MiB changed: round {number + 1}")
        if number:
            await tell(ws, f"change {LARGE_LIVE_MIB}")
        await bench.breathe()
        started = time.perf_counter()
        snapshot = await ws.sleep()
        bench.samples["large sleep"].append(time.perf_counter() - started)
        written.append(snapshot.memory_bytes + snapshot.disk_bytes)
        bench.samples["written"].append(await asyncio.to_thread(_write, bench.server.settings.home, written[-1]))
        if number < rounds - 1:
            await ws.wake()
    plain = Against("as many bytes written to a file beside the store and synced", bench.samples["written"])
    name = f"hibernate with {LARGE_LIVE_MIB} MiB of live data in {LARGE_MEMORY_MIB} MiB, all of it changed"
    note = f"{max(written) / 1e6:,.0f} MB written"
    found = rows(name, bench.samples["large sleep"], "s", against=plain, goal=Goal(times=1.5), note=note)
    rebased = await _rebased(bench, ws, snapshot.id)
    await ws.delete()
    return found + rebased


async def _rebased(bench: Bench, ws: AsyncWorkspace, snapshot_id: str) -> list[Row]:
    """Wakes of it from the base of its own that it is given while it sleeps."""
    bench.say("waiting until the large workspace has a base of its own")
    started = time.perf_counter()
    while _memory(bench, snapshot_id).base.private is None:
        expect(time.perf_counter() - started < REBASED_WITHIN_S, f"It had no base of its own after {REBASED_WITHIN_S:g} s.")
        await bench.breathe()
    taken = []
    for number in range(bench.count):
        bench.say(f"wake after rebase: round {number + 1} of {bench.count}")
        taken.append(await _wake(bench, ws))
    light = Against("wake of the light workspace, warm caches", bench.samples["warm"])
    name = f"wake with {LARGE_LIVE_MIB} MiB of live data after rebase, request to first agent reply"
    return rows(name, taken, "ms", against=light, goal=Goal(times=2))


def _write(directory: Path, size: int) -> float:
    """Seconds to write so many bytes to a new file in few calls, with one sync."""
    block, path = memoryview(os.urandom(_WRITTEN_AT_ONCE)), directory / "bench-write"
    started = time.perf_counter()
    try:
        with path.open("xb", buffering=0) as file:
            left = size
            while left:
                left -= file.write(block[:left])
            os.fsync(file.fileno())
        return time.perf_counter() - started
    finally:
        path.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------------------- compaction


async def _compaction(bench: Bench, rig: Rig) -> list[Row]:
    """In this process, so that nothing else counts."""
    found = []
    for number in range(max(2, bench.count // 4)):
        bench.say(f"compaction of a sleeping workspace: round {number + 1}")
        found.append(await rig.compaction(HELD_MIB, DROPPED_MIB))
    expect(all(one.freed_bytes for one in found), "A compaction found nothing to free.")
    cores = [one.cpu_s / one.wall_s for one in found]
    note = f"{found[-1].freed_bytes / 1e6:.0f} MB freed in {found[-1].wall_s * 1000:.0f} ms"
    return rows("processor use of a compaction while asleep", cores, "cores", goal=Goal(at_most=1), note=note)


# --------------------------------------------------------------------------------------------------------------- object store


async def _stored(say: Progress, count: int) -> list[Row]:
    """Light workspaces of one image in an object store of a directory, on a server of their own."""
    size = FLEET if count >= SAMPLES else TRIAL_FLEET
    with temporary_home() as home:
        objects = home / "objects"
        async with server_in(home, store_url=objects.as_uri(), **_QUIET) as server, Bench.over(server, say, count) as bench:
            own = 0
            for number in range(1, size + 1):
                ws = await prepare(bench, f"light-{number}")
                await light_script(ws)
                say(f"uploading workspace {number} of {size}")
                snapshot = await ws.sleep(durable="store")
                own += snapshot.memory_total_bytes + snapshot.disk_total_bytes
            image = observe.stored_bytes(objects / IMAGES)
            everything = observe.stored_bytes(objects)
    apart = size * image + own
    note = f"{everything / 1e6:,.0f} MB with an image of {image / 1e6:,.0f} MB, instead of {apart / 1e6:,.0f} MB"
    return [
        Row(f"dedup ratio of {size} light workspaces of one image", apart / everything, "times", note=note),
        Row(
            f"bytes that each of {size} light workspaces adds to the object store",
            (everything - image) / size / 1e6,
            "MB",
            Baseline("memory and disk of its snapshot on the node", own / size / 1e6),
        ),
    ]
