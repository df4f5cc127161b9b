"""A real server in a process of its own, with a home of its own, and the command line and the SDK to speak to it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from perdure.core.config import Settings
from perdure.sdk import Client, CommandResult, Workspace
from perdure.snapshots.manifest import LiveRecord
from tests.fakes.database import plant

#: Generous: machines are emulated, and hosts are busy.
DEADLINE_S = 240.0
COMMAND = (sys.executable, "-m", "perdure.cli.main")


@dataclass(frozen=True)
class Answer:
    """What one command line did."""

    code: int
    out: bytes
    err: bytes

    @property
    def text(self) -> str:
        return self.out.decode(errors="replace").strip()

    @property
    def complaint(self) -> str:
        return self.err.decode(errors="replace")

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, Any]:
        """The one JSON object on stderr; it has all its fields, and tells what happened and what to do."""
        document = json.loads(self.err)
        assert set(document) == {"error"}, document
        error = document["error"]
        assert set(error) - {"details", "request_id"} == {"code", "message", "hint", "retryable", "ambiguous", "gone"}, error
        assert error["message"].endswith(".") and error["hint"], error
        assert self.code != 0 and self.out == b"", self
        found: dict[str, Any] = error
        return found


@dataclass
class Live:
    """A home and its server. ``extra`` is added to the environment of both."""

    home: Path
    extra: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
        images = str(Settings().images)
        mine = {"PERDURE_HOME": str(self.home), "PERDURE_IMAGE_DIR": images, "PERDURE_LISTEN_PORT": "0", "NO_COLOR": "1"}
        return {**kept, **mine, "COLUMNS": "200", **self.extra}

    @cached_property
    def client(self) -> Client:
        return Client(settings=Settings(home=self.home, url=None, api_key=None), timeout_s=DEADLINE_S)

    @property
    def server_log(self) -> str:
        return (self.home / "log" / "server.log").read_text(errors="replace")

    def run(self, *words: str, stdin: bytes | None = None) -> Answer:
        """``perdure WORDS``."""
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        done = subprocess.run(
            [*COMMAND, *words], env=self.environment, capture_output=True, timeout=DEADLINE_S, check=False, **given
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def ok(self, *words: str, stdin: bytes | None = None) -> Answer:
        answer = self.run(*words, stdin=stdin)
        assert answer.code == 0, (words, answer)
        return answer

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """``perdure WORDS`` in a session of its own, as a terminal's foreground group; Ctrl-C works even if ours is off."""
        return subprocess.Popen(
            ["env", "--default-signal=INT", *COMMAND, *words],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            **options,
        )

    def workspace(self, name: str, **options: Any) -> Workspace:
        return Workspace.create(name, client=self.client, **options)

    def pid(self) -> int:
        return self.client.health().pid


@contextmanager
def serving(store: Callable[[Path], AbstractContextManager[None]] | None = None, **extra: str) -> Iterator[Live]:
    """A server with nothing in it; everything is gone afterwards. ``store`` may put something else in its store's place."""
    home = Path(tempfile.mkdtemp(prefix="perdure-", dir="/tmp"))
    home.chmod(0o711)  # the embedded database's user passes through
    live = Live(home, extra)
    try:
        with store(home / "store") if store else nullcontext():
            try:
                if "PERDURE_DATABASE_URL" not in extra:
                    plant(home)
                live.ok("up", "--detach")
                yield live
            finally:
                live.client.close()
                stop(live)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def stop(live: Live) -> None:
    """At once: its workspaces need not be put to sleep, for nobody wakes them again."""
    live.run("down", "--now")


def shell(workspace: Workspace, line: str, **options: Any) -> str:
    """What a shell line prints; it must succeed."""
    done = attempt(workspace, line, **options)
    assert done.exit_code == 0, (line, done)
    return done.stdout.strip()


def attempt(workspace: Workspace, line: str, **options: Any) -> CommandResult:
    done = workspace.commands.run(line, **{"run_limit_s": DEADLINE_S, **options})
    assert isinstance(done, CommandResult)
    return done


def machine_of(live: Live, workspace: Workspace) -> int:
    """The process of a workspace's machine, as the node has recorded it."""
    name = f"{workspace.id}.json"
    record = LiveRecord.from_bytes((live.home / "store" / "live" / name).read_bytes(), name)
    assert record.pid is not None
    return record.pid


def interrupt(process: subprocess.Popen[bytes]) -> Answer:
    """Ctrl-C: the signal goes to the whole foreground group."""
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    return Answer(process.returncode, out, err)


def until(holds: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Ask until something holds: the API tells no state by itself. Fails after the deadline."""
    never = threading.Event()
    end = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end, f"it does not hold after {deadline_s:g} s"
        never.wait(0.2)
