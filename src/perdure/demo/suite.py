"""What the benchmark suites share: a temporary server, a workspace with a repository and a live process, and the light script.

The *light script* is 20 execs of ``git status``, 5 MB changed in a live process, and a 1 MB file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from perdure.demo.server import Server, ensure_image
from perdure.demo.steps import expect
from perdure.node.pool import REFILL_DELAY_S
from perdure.sdk import AsyncClient, AsyncWorkspace
from perdure.wire.node import Isolation

HOLDER_PORT = 9000
LIGHT_MIB = 5

SET_UP = """
set -e
mkdir -p /root/repo && cd /root/repo && git init -q
for n in $(seq 1 50); do seq $n $((n + 200)) > file$n; done
git add . && git -c user.name=bench -c user.email=bench@perdure.invalid commit -qm files
"""
#: Talks to the holder without starting an interpreter.
TELL = 'exec 3<>/dev/tcp/127.0.0.1/{port}; echo {words} >&3; read -r answer <&3; test "${{answer%% *}}" = ok'
ONE_MB_FILE = "head -c 1048576 /dev/urandom > /root/file"

#: A refill of the pool begins ``REFILL_DELAY_S`` after a wake and takes a tenth of this.
REFILLED_WITHIN_S = 1.0

Progress = Callable[[str], None]


@dataclass(slots=True)
class Bench:
    """What the parts of a suite share. Samples are milliseconds unless the name says otherwise."""

    server: Server
    client: AsyncClient
    say: Progress
    count: int
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    notes: dict[str, str] = field(default_factory=dict)

    @classmethod
    @asynccontextmanager
    async def over(cls, server: Server, say: Progress, count: int) -> AsyncIterator[Bench]:
        """With the image built."""
        async with AsyncClient(settings=server.settings) as client:
            await ensure_image(client)
            yield cls(server, client, say, count)

    async def breathe(self) -> None:
        """Let the pool's refill and the removal of old files end, so that a sample measures its own action."""
        await self.server.ends_within(REFILL_DELAY_S + REFILLED_WITHIN_S)


def isolation_of(ws: AsyncWorkspace) -> Isolation:
    isolation = ws.info.isolation
    assert isolation is not None, "an awake workspace says how it is isolated"
    return isolation


async def sh(ws: AsyncWorkspace, script: str) -> None:
    result = await ws.commands.run(["bash", "-c", script], timeout=600)
    expect(result.ok, f"A command of the benchmark failed: {result.stderr.strip() or result.detail or result.end}")


async def prepare(bench: Bench, name: str = "bench", **options: Any) -> AsyncWorkspace:
    """A workspace with a repository and a holder of ``LIGHT_MIB``."""
    bench.say(f"creating the workspace {name!r} with a repository and a live process")
    ws = await AsyncWorkspace.create(name, client=bench.client, **options)
    program = files("perdure.demo") / "programs" / "holder.py"
    await ws.files.write("/root/holder.py", program.read_bytes())
    await sh(ws, SET_UP)
    holder = await ws.commands.run(["python3", "/root/holder.py", str(HOLDER_PORT)], background=True)
    async for output in holder:
        if b"ready" in output.data:
            break
    await tell(ws, f"grow {LIGHT_MIB}")
    return ws


async def tell(ws: AsyncWorkspace, words: str) -> None:
    """The holder does it."""
    await sh(ws, TELL.format(port=HOLDER_PORT, words=words))


async def light_script(ws: AsyncWorkspace) -> None:
    for _ in range(20):
        result = await ws.commands.run(["git", "-C", "/root/repo", "status", "--short"], timeout=600)
        expect(result.ok, f"git status failed in the workspace: {result.stderr.strip()}")
    await tell(ws, f"change {LIGHT_MIB}")
    await sh(ws, ONE_MB_FILE)
