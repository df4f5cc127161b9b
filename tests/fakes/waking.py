"""What a fake node does inside a workspace before it is awake: the report in resume.json, and the hooks."""

from __future__ import annotations

import json
import posixpath

from perdure.core.ids import ExecId
from perdure.wire.node import Confinement, ExecSpec, FileKind, HookOutcome, HookRun, MemoryFate, StartSpec
from tests.fakes.memory_guest import MemoryGuest, Node

RESUME = "/run/perdure/resume.json"
HOOKS = "/etc/perdure/on-wake.d"


async def wake_inside(
    guest: MemoryGuest, spec: StartSpec, memory: MemoryFate, reason: str, confinement: Confinement
) -> tuple[HookRun, ...]:
    """Write the report, run the hooks, write it again with them. A hook is a file of lines that ``MemoryGuest`` can run; one
    that does not end by itself is killed at once, as if its limit had come."""
    memory, reason = spec.told.memory(memory, reason)
    report = {
        "workspace_id": spec.identity.workspace_id,
        "generation": spec.identity.generation,
        **spec.told.facts,
        "memory": memory.value,
        "memory_reason": reason,
        "isolation": confinement.isolation.value,
        "pooled": memory is MemoryFate.KEPT,
        "clock_step_s": 0.0,
        "connections_dropped": 0,
        "execs_running": sorted(name for name, command in guest.world.commands.items() if command.exited is None),
        "execs_lost": [],
        "problems": [],
    }
    files = guest.world.files
    for directory in ("/run", "/run/perdure"):
        files.setdefault(directory, Node(FileKind.DIRECTORY, mode=0o755))
    files[RESUME] = Node(FileKind.FILE, _json({**report, "hooks": []}))
    names = sorted(path for path, node in files.items() if posixpath.dirname(path) == HOOKS and node.mode & 0o111)
    runs = tuple([await _run(guest, path) for path in names])
    told = [{"name": run.name, "outcome": run.outcome.value, "exit_code": run.exit_code, "output": run.output} for run in runs]
    files[RESUME] = Node(FileKind.FILE, _json({**report, "hooks": [{**one, "seconds": 0.0} for one in told]}))
    return runs


def _json(report: object) -> bytearray:
    return bytearray(json.dumps(report).encode())


async def _run(guest: MemoryGuest, path: str) -> HookRun:
    name = posixpath.basename(path)
    lines = [line for line in guest.world.files[path].content.decode().splitlines() if not line.startswith("#")]
    hook = await guest.run_alone(ExecSpec(ExecId(f"hook-{name}"), shell="; ".join(lines)))
    output = (hook.output["stdout"] + hook.output["stderr"]).decode(errors="replace")
    if hook.exited is None:
        return HookRun(name, HookOutcome.TIMEOUT, None, 0.0, output)
    outcome = HookOutcome.FAILED if hook.exited.exit_code else HookOutcome.OK
    return HookRun(name, outcome, hook.exited.exit_code, 0.0, output)
