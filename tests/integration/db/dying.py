"""``python -m tests.integration.db.dying HOME STEP`` starts the embedded database and kills itself at a step of that: at a named
point of the product, or before or after something that it calls."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from perdure.core import crashpoints
from perdure.core.crashpoints import CrashPoint, Victim
from perdure.db.embedded import EmbeddedPostgres
from perdure.db.programs import Programs


def die(here: str, step: str) -> None:
    if here == step:
        os.kill(os.getpid(), signal.SIGKILL)


def arm(home: Path, step: str) -> None:
    if step in set(CrashPoint):
        (home / "crash").write_text(f"{step} {Victim.SERVER} 1")
        crashpoints.arm(home / "crash")
        return
    arm_calls(step)


def arm_calls(step: str) -> None:
    run, spawn, rename, remove = Programs.run, asyncio.create_subprocess_exec, Path.rename, shutil.rmtree

    async def running(self: Programs, program: str, *arguments: str, cwd: Path = Path("/")) -> tuple[int, str]:
        die(f"before {program}", step)
        done = await run(self, program, *arguments, cwd=cwd)
        die(f"after {program}", step)
        return done

    async def spawned(*command: Any, **options: Any) -> Any:
        process = await spawn(*command, **options)
        if "pg_upgrade" in {Path(str(word)).name for word in command}:
            die("inside pg_upgrade", step)  # it goes on without us
        return process

    def renaming(self: Path, target: Path) -> Path:
        die(f"before rename {self.name}", step)
        return rename(self, target)

    def removing(path: Path, **options: Any) -> None:
        die(f"before rmtree {Path(path).name}", step)
        remove(path, **options)

    Programs.run = running  # type: ignore[method-assign]
    asyncio.create_subprocess_exec = spawned
    Path.rename = renaming  # type: ignore[method-assign]
    shutil.rmtree = removing  # type: ignore[assignment]


if __name__ == "__main__":
    arm(Path(sys.argv[1]), sys.argv[2])
    asyncio.run(EmbeddedPostgres(Path(sys.argv[1]), settings={"fsync": "off"}).start())
