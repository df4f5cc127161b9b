"""``perdure demo``: the main job on real input, told in steps. Everything goes through the SDK, as a user's program would.

A git history goes into a workspace, is checked out, and a live Python process indexes it in memory and serves it; a counter
counts. Then the machine sleeps, wakes, is killed, comes back at its checkpoint, and is forked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from perdure.core.errors import PerdureError
from perdure.demo import floor, observe
from perdure.demo.history import History, history
from perdure.demo.server import EMPTY_BYTES, Server, ensure_image, temporary_server
from perdure.demo.steps import Figure, Steps, expect
from perdure.demo.web import ask
from perdure.sdk import AsyncClient, AsyncWorkspace, ResumeReport

PORT = 8000
CHECKOUT = "/root/project"
#: Waits by reading from a pipe that stays empty: starting a process ten times a second is a load under emulation. Writes in
#: place, for whoever reads a file that is cut and then written may find nothing in it.
COUNTER = "exec 9<> <(:); i=0; while :; do i=$((i+1)); echo $i 1<> /dev/shm/counter; read -t 0.1 -u 9; done"
COUNTED_PAST = "exec 9<> <(:); until [ $(< /dev/shm/counter) -gt {count} ]; do read -t 0.1 -u 9; done"
BRANCHES = 3
#: The index holds hundreds of files, whether it is a checkout or an installed package that the history was made of.
FILES_MIN = 200
#: How long the demo waits for things that take a second or two on a quiet host.
PATIENCE_S = 300.0


@dataclass(slots=True)
class Story:
    """What the steps share."""

    server: Server
    client: AsyncClient
    steps: Steps
    figures: dict[str, float] = field(default_factory=dict)
    ws: AsyncWorkspace = field(init=False)
    port: int = 0
    programs: dict[str, int] = field(default_factory=dict)  # name -> pid in the workspace
    about: Mapping[str, Any] = field(default_factory=dict)

    async def sh(self, script: str | list[str], ws: AsyncWorkspace | None = None) -> str:
        """Run a script in the workspace; its output. Raises DemoFailed when it fails."""
        result = await (ws or self.ws).commands.run(script, timeout=PATIENCE_S)
        expect(result.ok, f"A command failed in the workspace: {result.stderr.strip() or result.stdout.strip() or result.detail}")
        return result.stdout.strip()

    async def counter(self) -> int:
        return int(await self.sh("cat /dev/shm/counter"))

    async def births(self) -> str:
        """PID and start time of each program, from the workspace's kernel: the same numbers are the same processes."""
        pids = " ".join(f"/proc/{pid}/stat" for pid in self.programs.values())
        return await self.sh(f"cut -d' ' -f1,2,22 {pids}")


async def run(steps: Steps) -> list[Figure]:
    """Tell the whole story; returns the figures of the closing table. Raises PerdureError at the first step that fails."""
    async with AsyncExitStack() as stack:
        with steps.step("Start a server in a temporary home") as step:
            server = await stack.enter_async_context(temporary_server(idle_timeout_s=0.0, checkpoint_interval_s=0.0, pool_size=1))
            step.detail = "API, node and database, in a process of their own"
        client = await stack.enter_async_context(AsyncClient(settings=server.settings))
        with steps.step("Find the image, or build it") as step:
            step.detail = await ensure_image(client)
        story = Story(server, client, steps)
        await _settle_in(story)
        async with story.ws.forward(PORT) as forward:
            story.port = forward.local_port
            await _ask_from_outside(story)
            await _sleep_and_wake(story)
            await _die_and_return(story)
        await _fork(story)
        await _tidy(story)
        await _boot_from_cold(story)
        return _table(story)


async def _settle_in(story: Story) -> None:
    with story.steps.step("Create a workspace") as step:
        story.ws = await AsyncWorkspace.create("demo", client=story.client)
        info = story.ws.info
        step.detail = (
            f"{info.memory_mib} MiB, {info.vcpus} vCPU, isolation {info.isolation.value if info.isolation else 'unknown'}"
        )
    with story.steps.step("Put a git history into it and check it out") as step:
        source = await history()
        step.detail = await _check_out(story, source)
    with story.steps.step("Index it in a live Python process, serve it, start a counter") as step:
        program = files("perdure.demo") / "programs" / "indexer.py"
        await story.ws.files.write("/root/indexer.py", program.read_bytes())
        indexer = await story.ws.commands.run(f"exec python3 /root/indexer.py {CHECKOUT} {PORT}", background=True)
        async with asyncio.timeout(PATIENCE_S):
            async for output in indexer:
                if b"ready" in output.data:
                    break
        counter = await story.ws.commands.run(["bash", "-c", COUNTER], background=True)
        story.programs = {"indexer": _pid(indexer.pid), "counter": _pid(counter.pid)}
        step.detail = ", ".join(f"{name} is process {pid}" for name, pid in story.programs.items())


def _pid(pid: int | None) -> int:
    expect(pid is not None, "A program was started without a process number.")
    assert pid is not None
    return pid


async def _check_out(story: Story, source: History) -> str:
    await story.ws.files.write(source.path, source.content)
    await story.sh(source.commands)
    head, commits, names = (
        await story.sh(f"cd {CHECKOUT}; git rev-parse HEAD; git rev-list --count HEAD; git ls-files | wc -l")
    ).split()
    expect(source.head in (None, head), f"The checkout is at {head}, not at {source.head}.")
    return f"{source.what}: {commits} commits, {names} files, {len(source.content) >> 10} KiB, now at {head[:10]}"


async def _ask_from_outside(story: Story) -> None:
    with story.steps.step("Ask the server in it through the host") as step:
        story.about = (await ask(story.port, "GET", "/")).json()
        expect(story.about["files"] > FILES_MIN, f"The index holds only {story.about['files']} files.")
        expect(story.about["pid"] == story.programs["indexer"], "Another process than the indexer answered.")
        hits = (await ask(story.port, "GET", "/search", word="import")).json()["files"]
        step.detail = (
            f"{story.about['files']} files ({story.about['bytes'] >> 10} KiB) and {story.about['words']} words in memory; "
            f"'import' is in {hits} files"
        )


async def _busy_vmm(story: Story) -> int:
    """The VMM process of the workspace: the one whose CPU time grows while the workspace works; those in the pool stand still."""
    before = {pid: observe.cpu_s(pid) for pid in observe.vmms(story.server.pid)}
    await story.sh("i=0; while [ $i -lt 5000 ]; do i=$((i+1)); done")
    used = {pid: observe.cpu_s(pid) - spent for pid, spent in before.items()}
    expect(used and max(used.values()) > 0, "No machine process works for the workspace.")
    return max(used, key=lambda pid: used[pid])


async def _sleep_and_wake(story: Story) -> None:
    vmm, births, counted = await _busy_vmm(story), await story.births(), await story.counter()
    with story.steps.step("Sleep") as step:
        awake = observe.vmms(story.server.pid)
        started = time.perf_counter()
        await story.ws.sleep()
        story.figures["hibernate"] = time.perf_counter() - started
        left = observe.vmms(story.server.pid)
        expect(vmm not in left, f"The machine's process {vmm} is still there.")
        expect(left <= awake, "A process was started for a workspace that sleeps.")
        story.figures["stored"] = story.server.stored_bytes()
        step.detail = (
            f"in {_ms(story.figures['hibernate'])}; no process remains; {_size(story.figures['stored'])} on disk over the image"
        )
        step.detail += f" (in the warm pool, for anybody: {len(left)})" if left else ""
    with story.steps.step("Wake on a request from outside") as step:
        reply = await ask(story.port, "GET", "/search", word="import")
        story.figures["wake"] = reply.first_byte_s
        expect(
            (await ask(story.port, "GET", "/")).json() == story.about, "Memory is not as it was: the index answers differently."
        )
        expect(await story.births() == births, "The processes are not the ones from before the sleep.")
        later = await story.counter()
        expect(later >= counted, f"The counter fell from {counted} to {later}.")
        await story.sh(["bash", "-c", COUNTED_PAST.format(count=later)])
        step.detail = f"first byte after {_ms(reply.first_byte_s)}; same processes, same memory; the counter goes on at {later}"


async def _die_and_return(story: Story) -> None:
    vmm, before = await _busy_vmm(story), (await story.ws.refresh()).generation
    with story.steps.step("Checkpoint, then kill the machine with SIGKILL") as step:
        await ask(story.port, "POST", "/note", text="before the checkpoint")
        await story.sh("echo before > /root/mark; sync")
        snapshot = await story.ws.checkpoint("safe")
        story.figures["pause"] = snapshot.pause_s
        counted = await story.counter()
        await ask(story.port, "POST", "/note", text="after the checkpoint")
        await story.sh("echo after > /root/mark; sync")
        observe.kill(vmm)
        step.detail = f"the checkpoint paused it for {_ms(snapshot.pause_s)}"
    with story.steps.step("Wake at the checkpoint") as step:
        report = await _wake_again(story, before)
        notes = (await ask(story.port, "GET", "/")).json()["notes"]
        expect(notes == ["before the checkpoint"], f"Memory is not at the checkpoint: it has the notes {notes}.")
        mark = await story.sh("cat /root/mark")
        expect(mark == "before", f"The disk is not at the checkpoint: the file says {mark!r}.")
        expect(report.disk == "rewound", f"The report says that the disk was {report.disk}, but it was rewound.")
        kept = f"what was newer on disk is kept as {report.lost_branch}" if report.lost_branch else "nothing newer was on disk"
        step.detail = f"memory and disk as they were there (counter about {counted}); {kept}"


async def _wake_again(story: Story, before: int) -> ResumeReport:
    """Wake after the death of a generation, of which the server may hear later than we: until then it says that all is well."""
    async with asyncio.timeout(PATIENCE_S):
        while (report := await story.ws.wake()).generation <= before:
            pass
    return report


async def _fork(story: Story) -> None:
    with story.steps.step(f"Fork {BRANCHES} branches that each change a file") as step:
        started = time.perf_counter()
        branches = [_branch(one) for one in await story.ws.fork(BRANCHES)]
        story.figures["fork"] = (time.perf_counter() - started) / BRANCHES
        seen = [await _change(story, branch, number) for number, branch in enumerate(branches)]
        expect(len({head for head, _ in seen}) == BRANCHES, "Branches share a commit that each made for itself.")
        for number, (_, hits) in enumerate(seen):
            expect(hits == [int(n == number) for n in range(BRANCHES)], f"Branch {number} sees the words {hits}.")
        changes = await story.sh(f"cd {CHECKOUT}; git status --porcelain; git log --oneline --grep='Change of branch'")
        expect(not changes, "The change of a branch is visible in the workspace it was forked from.")
        step.detail = f"{_ms(story.figures['fork'])} each; each finds its own word in its own index and none of the others'"
    for branch in branches:
        await branch.delete()


def _branch(one: AsyncWorkspace | PerdureError) -> AsyncWorkspace:
    if isinstance(one, PerdureError):
        raise one
    return one


async def _change(story: Story, branch: AsyncWorkspace, number: int) -> tuple[str, list[int]]:
    """Commit a word of its own in a branch; its commit, and in how many files its index finds each branch's word."""
    path = await story.sh(f"cd {CHECKOUT}; git ls-files | head -n 1", branch)
    await story.sh(f"cd {CHECKOUT}; echo branchword{number} >> '{path}'; git commit -qam 'Change of branch {number}'", branch)
    async with branch.forward(PORT) as forward:
        await ask(forward.local_port, "POST", "/refresh", path=path)
        hits = [(await ask(forward.local_port, "GET", "/search", word=f"branchword{n}")).json()["files"] for n in range(BRANCHES)]
    return await story.sh(f"cd {CHECKOUT}; git rev-parse HEAD", branch), hits


async def _tidy(story: Story) -> None:
    with story.steps.step("Delete the workspace") as step:
        for workspace in await AsyncWorkspace.list(client=story.client):
            await workspace.delete()
        left = await story.server.emptied()
        expect(left < EMPTY_BYTES, f"{_size(left)} are left in the store.")
        step.detail = f"{_size(left)} left in the store"


async def _boot_from_cold(story: Story) -> None:
    with story.steps.step("Boot a machine from cold, for comparison") as step:
        isolation = story.ws.info.isolation
        expect(isolation is not None, "The workspace does not say how it was isolated.")
        assert isolation is not None
        async with floor.Rig.open(story.server.settings, isolation) as rig:
            story.figures["cold"] = await rig.cold_boot()
        step.detail = f"{_ms(story.figures['cold'])} from nothing to the agent's hello"


def _table(story: Story) -> list[Figure]:
    def timed(name: str, key: str) -> Figure:
        return Figure(name, story.figures[key] * 1000, "ms", story.figures[key] / story.figures["cold"])

    return [
        timed("cold boot", "cold"),
        timed("hibernate", "hibernate"),
        timed("wake (first byte)", "wake"),
        timed("checkpoint pause", "pause"),
        timed("fork (each)", "fork"),
        Figure("bytes per sleeping workspace", story.figures["stored"], "bytes"),
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _size(count: float) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 1 << 20 else f"{count / 1024:.0f} KiB"
