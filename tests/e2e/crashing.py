"""A real server that is killed and started again, and a guest whose memory and file can be told from any other.

The server is ``perdure up`` in a process of its own, over its own home; crash points (``perdure.core.crashpoints``) say where it,
or a VMM of it, dies. ``Keeper`` is a program in a workspace: told a number, it holds the bytes that follow from it in memory and
in a synced file, and it can prove both. ``check_*`` compare what lies on the disk and runs on the host with what rows name.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from perdure.core.config import Settings
from perdure.core.crashpoints import CrashPoint, Victim
from perdure.core.errors import PerdureError
from perdure.db.database import Database
from perdure.db.embedded import EmbeddedPostgres
from perdure.journal.entries import Journal
from perdure.machines import cgroups
from perdure.machines.qemu_leftovers import token
from perdure.sdk import Client, ServerUnreachable, Workspace
from perdure.sdk._core import Call, workspace_path
from tests.fakes.database import plant

COMMAND = [str(Path(sys.executable).parent / "perdure")]
START_DEADLINE_S = 180.0
END_DEADLINE_S = 280.0
ASK_EVERY_S = 0.05
MEMORY_BYTES = 1 << 20
FILE_BYTES = 64 << 10
FILE = "/root/kept"

PROGRAM = f"""
import os, random
def content(n):
    return random.Random(n).randbytes({MEMORY_BYTES})
def put(n):
    memory[:] = content(n)
    with open("{FILE}.new", "wb") as file:
        file.write(b"%d\\n" % n + memory[:{FILE_BYTES}])
        file.flush()
        os.fsync(file.fileno())
    os.rename("{FILE}.new", "{FILE}")
    directory = os.open("/root", os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    return n
def check():
    head, _, rest = open("{FILE}", "rb").read().partition(b"\\n")
    inside = content(held)
    outside = inside if int(head) == held else content(int(head))
    return f"{{held}} {{memory == inside}} {{int(head)}} {{rest == outside[:{FILE_BYTES}]}} {{os.getpid()}}"
memory = bytearray({MEMORY_BYTES})
held = put(0)
for name in ("/run/keeper.in", "/run/keeper.out"):
    os.mkfifo(name)
while True:
    word = open("/run/keeper.in").read().split()
    if word[0] == "put":
        held = put(int(word[1]))
    open("/run/keeper.out", "w").write(check() + "\\n")
"""


@dataclass(frozen=True)
class Kept:
    """What the keeper proves: the number in memory and in the file, and its process id in the guest."""

    memory: int
    file: int
    pid: int


class Keeper:
    """The program in a workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def start(self) -> None:
        self.workspace.files.write("/root/keeper.py", PROGRAM.encode())
        self.workspace.commands.run(["python3", "/root/keeper.py"], background=True)
        ready = "until [ -p /run/keeper.out ]; do sleep 0.1; done"
        assert self.workspace.commands.run(ready, run_limit_s=120).exit_code == 0

    def put(self, number: int) -> Kept:
        return self._ask(f"put {number}")

    def tell(self) -> Kept:
        return self._ask("tell")

    def _ask(self, words: str) -> Kept:
        done = self.workspace.commands.run(f"echo {words} > /run/keeper.in && cat /run/keeper.out", run_limit_s=120)
        assert done.exit_code == 0, done
        memory, memory_holds, file, file_holds, pid = done.stdout.split()
        assert (memory_holds, file_holds) == ("True", "True"), f"the guest's own check failed: {done.stdout}"
        return Kept(int(memory), int(file), int(pid))


def file_block(number: int) -> bytes:
    """A block of the disk that holds the keeper's file of that number (its second: the first begins with the number)."""
    text = b"%d\n" % number
    return (text + random.Random(number).randbytes(MEMORY_BYTES))[4096:8192]


@dataclass
class Place:
    """A home and the server that runs in it, or does not."""

    home: Path
    images_dir: Path
    extra: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    #: Whether the first start finds a database that was made before.
    planted: bool = True

    @property
    def settings(self) -> Settings:
        return Settings(home=self.home, image_dir=self.images_dir, url=None, database_url=None)

    @property
    def crash_file(self) -> Path:
        return self.home / "crash"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            "LANG": "C.UTF-8",
            "PERDURE_HOME": str(self.home),
            "PERDURE_IMAGE_DIR": str(self.images_dir),
            "PERDURE_LISTEN_PORT": "0",
            "PERDURE_CHECKPOINT_INTERVAL_S": "0",
            "PERDURE_SHUTDOWN_DEADLINE_S": "200",  # a host that runs other suites too syncs slowly; tests don't time things
            "PERDURE_CRASH_FILE": str(self.crash_file),
            **self.extra,
        }

    @classmethod
    @contextmanager
    def temporary(cls, images_dir: Path, *, planted: bool = True, **extra: str) -> Iterator[Place]:
        """A home that is removed afterwards, with a path short enough for sockets, which the database's user may pass through."""
        home = Path(tempfile.mkdtemp(prefix="perdure-", dir="/tmp"))
        home.chmod(0o711)
        place = cls(home, images_dir, extra, planted=planted)
        try:
            yield place
        finally:
            place.clear()
            shutil.rmtree(home, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------------------ the server

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def up(self) -> None:
        """Start it and wait until it serves."""
        assert not self.is_up
        if self.planted and "PERDURE_DATABASE_URL" not in self.extra:
            plant(self.home)
        with (self.home / "server.log").open("ab") as log:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = subprocess.Popen([*COMMAND, "up"], env=self.environment, start_new_session=True, **streams)
        self.until(self._answers, "the server serves", START_DEADLINE_S)

    def ended(self) -> int:
        """Wait for its end; returns its exit code."""
        assert self.process is not None
        code = self.process.wait(END_DEADLINE_S)
        self.process = None
        return code

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        assert self.ended() == -signal.SIGKILL

    def down(self) -> None:
        """SIGTERM; everything must end in order."""
        assert self.process is not None
        self.process.terminate()
        assert self.ended() == 0, self.log_tail()

    def clear(self) -> None:
        """Whatever happened in the test: leave no process. Nobody wakes again what runs in it."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            try:
                self.process.wait(END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None
        asyncio.run(EmbeddedPostgres(self.home).stop())

    def client(self) -> Client:
        return Client(settings=self.settings, timeout_s=300.0)

    def until(self, happened: Callable[[], bool], what: str, deadline_s: float = 60.0) -> None:
        """Ask the server again and again; its end, or the deadline, fails the test."""
        assert self.process is not None
        for _ in range(int(deadline_s / ASK_EVERY_S)):
            if happened():
                return
            try:
                code = self.process.wait(ASK_EVERY_S)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"The server ended with {code}:\n{self.log_tail()}")
        raise AssertionError(f"Not within {deadline_s:g} s: {what}.\n{self.log_tail()}")

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:  # one that the transport cannot connect is left unclosed there
            try:
                probe.connect(str(self.settings.api_socket))
            except OSError:
                return False
        try:
            with self.client() as client:
                client.health()
        except ServerUnreachable:
            return False
        return True

    def log_tail(self) -> str:
        """The end of what the server said; nothing if none was started yet."""
        log = self.home / "server.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-40:]) if log.exists() else ""

    # ---------------------------------------------------------------------------------------------------------------- crashes

    def crash(self, point: CrashPoint, victim: Victim, call: Callable[[], Any]) -> PerdureError | None:
        """Do the call with the point armed, see that the fault happened, and have a server again. Returns the call's error."""
        self.crash_file.write_text(f"{point.value} {victim.value} 1")
        error = None
        try:
            call()
        except PerdureError as raised:
            error = raised
        assert not self.crash_file.exists(), f"{point.value} was not passed; the call said: {error}\n{self.log_tail()}"
        if victim is Victim.SERVER:
            assert self.ended() == -signal.SIGKILL
            self.up()
        return error

    # -------------------------------------------------------------------------------------------------------------- the truth

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Asked of the database itself."""
        with psycopg.connect(EmbeddedPostgres(self.home).url()) as connection:
            return connection.execute(query).fetchall()

    def check_journal(self) -> None:
        checked, breaks = asyncio.run(_verify(EmbeddedPostgres(self.home).url()))
        assert breaks == []
        assert checked > 0

    def check_rows(self) -> None:
        """Nothing is half done."""
        assert self.rows("select id, reason from snapshots where state = 'pending'") == []
        moving = self.rows("select name, state from workspaces where state in ('creating', 'waking', 'hibernating')")
        assert moving == []

    def stored(self, directory: str) -> set[str]:
        return {path.name for path in (self.home / "store" / directory).iterdir()}

    def check_store(self) -> None:
        """With nothing awake: every file is named by a complete snapshot, every complete snapshot has its files."""
        complete = {row[0] for row in self.rows("select id from snapshots where state = 'complete'")}
        assert self.stored("snapshots") == complete
        assert self.stored("live") == set()
        disks, segments = set(), set()
        for snapshot in complete:
            manifest = json.loads((self.home / "store/snapshots" / snapshot / "manifest.json").read_bytes())
            text = json.dumps(manifest)
            disks |= {name for name in self.stored("disks") if Path(name).stem in text}
            segments |= {name for name in self.stored("segments") if Path(name).stem in text}
        assert self.stored("disks") == disks
        assert self.stored("segments") == segments

    def disks_of(self, workspace: str) -> list[Path]:
        """The layers of a sleeping workspace's own, from its head's manifest."""
        ((head,),) = self.rows(f"select head_snapshot_id from workspaces where name = '{workspace}' and state <> 'deleted'")
        text = (self.home / "store/snapshots" / head / "manifest.json").read_text()
        return [path for path in (self.home / "store/disks").iterdir() if path.stem in text]

    def processes(self) -> list[str]:
        """Command lines of everything that belongs to this home: it names it, works in it, or carries its machines' token."""
        marks = (str(self.home), token(self.home / "run" / "vm"))
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                    continue
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                where = line + str((entry / "cwd").readlink()) + (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue  # it ended
            if any(mark in where for mark in marks):
                found.append(line)
        return found

    def groups(self) -> list[Path]:
        return list(cgroups.leftovers(cgroups.discover(), f"{token(self.home / 'run' / 'vm')}-"))

    def vmm_of(self, workspace_id: str) -> int:
        """The process of an awake workspace's machine, from the node's own record."""
        record = json.loads((self.home / "store/live" / f"{workspace_id}.json").read_bytes())
        record = record.get("record", record)
        return int(record["pid"])


def act(workspace: Workspace, action: str) -> Callable[[], Any]:
    """An action as one request that the SDK does not repeat when the server goes away."""
    return lambda: workspace.client.request(Call("POST", workspace_path(workspace.id, action), body={}))


async def _verify(url: str) -> tuple[int, list[Any]]:
    database = Database(url, max_connections=2)
    await database.open()
    try:
        return await Journal(database).verify()
    finally:
        await database.close()


@dataclass
class World:
    """What lives through the whole module. ``number`` is what the keeper was last told."""

    place: Place
    workspace: Workspace
    keeper: Keeper
    pid: int
    number: int = 0

    def next(self) -> int:
        """Tell the keeper something new; it is in memory and in a synced file when this returns."""
        self.number += 1
        assert self.keeper.put(self.number).memory == self.number
        return self.number
