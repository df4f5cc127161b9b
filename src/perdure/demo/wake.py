"""``perdure bench wake``: what sleeping and waking cost on this host, each beside its bare floor in the same run.

The control plane's way goes over HTTP, the database and the pool, as a user's does; the bare way (``floor``) is the same QEMU
steps alone. Samples of both alternate, so that a noisy minute hits both.
"""

from __future__ import annotations

import time

from perdure.demo import floor, observe
from perdure.demo.server import temporary_server
from perdure.demo.stats import Against, Baseline, Goal, Row, rows
from perdure.demo.steps import expect
from perdure.demo.suite import LIGHT_MIB, SET_UP, Bench, Progress, isolation_of, light_script, prepare, sh, tell
from perdure.sdk import AsyncWorkspace

SAMPLES = 20
FLEET = 50
#: With fewer samples than usual the run is a trial, and so is its fleet.
TRIAL_FLEET = 5
#: Private memory at which the checkpoint's pause is shown too, in MiB of a live process.
LARGE_MIB = (100, 300)


async def run(say: Progress, count: int = SAMPLES) -> list[Row]:
    """The whole suite, about five minutes under emulation. Raises PerdureError when something does not work at all."""
    async with temporary_server(idle_timeout_s=0.0, checkpoint_interval_s=0.0, pool_size=1) as server:
        async with Bench.over(server, say, count) as bench:
            ws = await prepare(bench)
            asleep = await _weigh_one(bench, ws)
            await _wakes(bench, ws)
            pauses = await _checkpoints(bench, ws)
            await ws.delete()
            await bench.server.emptied()
            fleet = await _fleet(bench)
        return [*_wake_rows(bench), *_hibernate_rows(bench), *pauses, *asleep, *fleet]


# ------------------------------------------------------------------------------------------------------------------- wakes


async def _wakes(bench: Bench, ws: AsyncWorkspace) -> None:
    """Each round: a cold boot, a wake and a first exec through the control plane, and a bare wake with its first exec."""
    async with floor.Rig.open(bench.server.settings, isolation_of(ws)) as rig:
        await rig.prepare(SET_UP)
        unpooled = 0
        for round_number in range(bench.count):
            bench.say(f"wake: round {round_number + 1} of {bench.count}")
            bench.samples["cold boot"].append(await rig.cold_boot() * 1000)
            unpooled += not await _one_wake(bench, ws)
            for name, seconds in (await rig.wake()).items():
                bench.samples[f"bare {name}"].append(seconds * 1000)
            await _one_exec(bench, ws)
    bench.notes["wake"] = "every wake found a pooled machine" if not unpooled else f"{unpooled} wakes found no pooled machine"


async def _one_wake(bench: Bench, ws: AsyncWorkspace) -> bool:
    started = time.perf_counter()
    report = await ws.wake()
    took_ms = (time.perf_counter() - started) * 1000
    timings = report.timings_ms
    # What came after the guest ran is known to the node; all the rest, the answer's way back too, counts as before.
    bench.samples["running"].append(took_ms - (max(timings.values()) - timings["running"]))
    bench.samples["reply"].append(took_ms)
    await _one_sleep(bench, ws)
    return report.pooled


async def _one_exec(bench: Bench, ws: AsyncWorkspace) -> None:
    started = time.perf_counter()
    result = await ws.commands.run(["/bin/true"], timeout=600)
    bench.samples["exec"].append((time.perf_counter() - started) * 1000)
    expect(result.ok, f"/bin/true failed in the workspace: {result.detail or result.end}")
    await _one_sleep(bench, ws)


async def _one_sleep(bench: Bench, ws: AsyncWorkspace) -> None:
    await bench.breathe()
    started = time.perf_counter()
    await ws.sleep()
    bench.samples["hibernate"].append((time.perf_counter() - started) * 1000)
    await bench.breathe()


def _wake_rows(bench: Bench) -> list[Row]:
    taken = bench.samples
    cold = Against("cold boot, our own init to the agent's hello", taken["cold boot"])

    def bare(name: str) -> Against:
        return Against("bare: the same QEMU steps without the control plane", taken[f"bare {name}"])

    def judged(name: str, key: str, against: Against, goal: Goal, note: str = "") -> list[Row]:
        return rows(name, taken[key], "ms", against=against, goal=goal, note=note)

    note = f"{bench.notes['wake']}; the commit after the wake and the answer's way are counted too"
    return [
        *rows("cold boot", taken["cold boot"], "ms"),
        *judged("request to guest running", "running", bare("running"), Goal(at_most=45, times=2.5), note),
        *judged("request to first agent reply", "reply", cold, Goal(times=1 / 25)),
        *judged("request to first agent reply, against bare", "reply", bare("reply"), Goal(times=1.5)),
        *judged("request to first exec reply", "exec", cold, Goal(times=1 / 10)),
        *judged("request to first exec reply, against bare", "exec", bare("exec"), Goal(times=1.5)),
    ]


def _hibernate_rows(bench: Bench) -> list[Row]:
    cold = Against("cold boot, our own init to the agent's hello", bench.samples["cold boot"])
    return rows("hibernate, request to answer", bench.samples["hibernate"], "ms", against=cold, goal=Goal(at_most=100))


# ------------------------------------------------------------------------------------------------------------- checkpoints


async def _checkpoints(bench: Bench, ws: AsyncWorkspace) -> list[Row]:
    found: list[Row] = []
    pauses, written = [], []
    for round_number in range(bench.count):
        bench.say(f"checkpoint after the light script: round {round_number + 1} of {bench.count}")
        await light_script(ws)
        snapshot = await ws.checkpoint()
        pauses.append(snapshot.pause_s * 1000)
        written.append((snapshot.memory_bytes + snapshot.disk_bytes) / 1e6)
    found += rows("checkpoint pause after the light script", pauses, "ms", goal=Goal(at_most=40), note="freeze and thaw included")
    found += rows("bytes written by that checkpoint", written, "MB")
    held = LIGHT_MIB
    for size in LARGE_MIB:
        bench.say(f"checkpoint with {size} MiB of private memory")
        await tell(ws, f"grow {size - held}")
        held = size
        found += await _large(bench, ws, size)
    return found


async def _large(bench: Bench, ws: AsyncWorkspace, size: int) -> list[Row]:
    pauses, written = [], []
    for _ in range(max(3, bench.count)):
        await tell(ws, f"change {LIGHT_MIB}")
        snapshot = await ws.checkpoint()
        pauses.append(snapshot.pause_s * 1000)
        written.append((snapshot.memory_bytes + snapshot.disk_bytes) / 1e6)
    return [
        *rows(f"checkpoint pause with {size} MB private", pauses, "ms", goal=Goal(at_most=0.8 * size), note="<= 0.8 ms/MB"),
        Row(f"bytes written by the first checkpoint with {size} MB private", written[0], "MB"),
        *rows(f"bytes written by a later checkpoint with {size} MB private", written[1:], "MB", note=f"{LIGHT_MIB} MiB changed"),
    ]


# ------------------------------------------------------------------------------------------------------------------ asleep


async def _weigh_one(bench: Bench, ws: AsyncWorkspace) -> list[Row]:
    """Asleep after one light script: bytes on disk, processes, their memory. The workspace is the only one."""
    await light_script(ws)
    pooled = len(observe.vmms(bench.server.pid)) - 1
    await ws.sleep()
    left = max(0, len(observe.vmms(bench.server.pid)) - pooled)
    store = bench.server.settings.store
    parts = [f"{name} {observe.stored_bytes(store / name) / 1e6:.1f}" for name in ("segments", "disks", "snapshots")]
    note = f"set-up of the benchmark included; MB of {', '.join(parts)}"
    return [
        Row(
            "bytes of a sleeping workspace after the light script",
            bench.server.stored_bytes() / 1e6,
            "MB",
            goal=Goal(at_most=12),
            note=note,
        ),
        Row("processes of a sleeping workspace", left, "processes", goal=Goal(at_most=0), note="the warm pool aside"),
    ]


async def _fleet(bench: Bench) -> list[Row]:
    """Many sleeping workspaces: what one costs, and that all of them, and the pool, lie on one base file."""
    size = FLEET if bench.count >= SAMPLES else TRIAL_FLEET
    before_bytes, before_memory = bench.server.stored_bytes(), observe.private_bytes(_servers(bench))
    pooled = len(observe.vmms(bench.server.pid))
    fleet: list[AsyncWorkspace] = []
    for number in range(size):
        if number % 10 == 0:
            bench.say(f"putting {size} workspaces to sleep: {number} sleep")
        fleet.append(await AsyncWorkspace.create(f"fleet-{number}", client=bench.client))
        await fleet[-1].sleep()
    stored = (bench.server.stored_bytes() - before_bytes) / size / 1e6
    memory = max(0, observe.private_bytes(_servers(bench)) - before_memory) / size / 1e6
    processes = max(0, len(observe.vmms(bench.server.pid)) - pooled)
    bases = await _bases(bench, fleet[0], fleet[-1])
    bench.say(f"deleting {size} workspaces")
    for ws in fleet:
        await ws.delete()
    return [
        Row(f"bytes of each of {size} fresh sleeping workspaces", stored, "MB", goal=Goal(at_most=12)),
        Row(
            f"base files under {size} workspaces",
            len(bases),
            "files",
            goal=Goal(at_most=1),
            note="what the processes of the first and the last map when awake",
        ),
        Row(f"processes of {size} sleeping workspaces", processes, "processes", goal=Goal(at_most=0), note="the warm pool aside"),
        Row(
            "private memory that each sleeping workspace adds",
            memory,
            "MB",
            Baseline("private memory of the server's own processes before, in all", before_memory / 1e6),
            note="growth of the server and its database, their caches included; a sleeping workspace has no process",
        ),
    ]


async def _bases(bench: Bench, *workspaces: AsyncWorkspace) -> set[tuple[str, int]]:
    """The base files that the workspaces' machines map: those whose CPU time grows while the workspaces work."""
    found: set[tuple[str, int]] = set()
    for ws in workspaces:
        await ws.wake()
        before = {pid: observe.cpu_s(pid) for pid in observe.vmms(bench.server.pid)}
        await sh(ws, "i=0; while [ $i -lt 5000 ]; do i=$((i+1)); done")
        used = {pid: observe.cpu_s(pid) - spent for pid, spent in before.items()}
        found |= observe.mapped_files({max(used, key=lambda pid: used[pid])}, "ram.base")
        await ws.sleep()
    return found


def _servers(bench: Bench) -> set[int]:
    """The server's processes without the VMMs."""
    return (observe.descendants(bench.server.pid) | {bench.server.pid}) - observe.vmms(bench.server.pid)
