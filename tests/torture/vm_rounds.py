"""Rounds with virtual machines: a server of its own, QEMU, and a program inside that proves what it keeps.

The program keeps a checksummed counter in memory, in a synced file and in a TCP connection to a server of its own, and a block of
memory that nobody ever touches again. One workspace lives through all rounds; in each, one thing is killed while it is awake, or
in the middle of an operation, and it must wake where its last snapshot was, or later.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from perdure.core.crashpoints import CrashPoint, Victim
from perdure.core.errors import PerdureError
from perdure.db.embedded import EmbeddedPostgres
from perdure.sdk import Workspace
from tests.e2e.crashing import Place, act
from tests.torture.model import Outcome, Violation, told_by

PROGRAM = """
import hashlib, os, random, socket
def content(n):
    return random.Random(n).randbytes(65536)
block = random.Random(-1).randbytes(2 << 20)
listener = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    stream = listener.accept()[0].makefile("rwb")
    kept = b"0"
    for line in stream:
        word = line.split()
        kept = word[1] if word[0] == b"put" else kept
        stream.write(kept + b"\\n")
        stream.flush()
    os._exit(0)
link = socket.create_connection(listener.getsockname()).makefile("rwb")
def ask(words):
    link.write(words.encode() + b"\\n")
    link.flush()
    return int(link.readline())
def put(n):
    with open("/root/counter.new", "wb") as file:
        file.write(b"%d\\n" % n + content(n))
        file.flush()
        os.fsync(file.fileno())
    os.rename("/root/counter.new", "/root/counter")
    memory[:] = content(n)
    return ask("put %d" % n)
def check():
    head, _, rest = open("/root/counter", "rb").read().partition(b"\\n")
    whole = memory == content(held) and rest == content(int(head))
    return "%d %d %d %s %s" % (held, int(head), ask("tell"), whole, hashlib.sha256(block).hexdigest())
memory = bytearray(65536)
held = put(0)
for name in ("/run/counter.in", "/run/counter.out"):
    os.mkfifo(name)
while True:
    word = open("/run/counter.in").read().split()
    if word[0] == "put":
        held = put(int(word[1]))
    open("/run/counter.out", "w").write(check() + "\\n")
"""
#: Of the block that the program makes once and never touches again.
BLOCK_HASH = hashlib.sha256(Random(-1).randbytes(2 << 20)).hexdigest()
#: A host that runs other suites too starts an agent slowly; the faults here are others.
UNRESPONSIVE_S = "120"
CAPTURES = (CrashPoint.CAPTURE_READY, CrashPoint.CAPTURE_PAUSED, CrashPoint.CAPTURE_COPIED, CrashPoint.CAPTURE_PUBLISHED)
STARTS = (CrashPoint.START_CLAIMED, CrashPoint.START_RESTORED, CrashPoint.START_RUNNING)


@dataclass(frozen=True)
class Told:
    memory: int
    file: int
    connection: int


class Counter:
    """The program in a workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def start(self) -> None:
        self.workspace.files.write("/root/counter.py", PROGRAM.encode())
        self.workspace.commands.run(["python3", "/root/counter.py"], background=True)
        ready = "until [ -p /run/counter.out ]; do sleep 0.1; done"
        assert self.workspace.commands.run(ready, run_limit_s=120).exit_code == 0

    def ask(self, words: str) -> Told:
        done = self.workspace.commands.run(f"echo {words} > /run/counter.in && cat /run/counter.out", run_limit_s=60)
        memory, file, connection, whole, block = done.stdout.split()
        told = Told(int(memory), int(file), int(connection))
        if whole != "True" or block != BLOCK_HASH or len({told.memory, told.file, told.connection}) != 1:
            raise Violation(f"the program in {self.workspace.name} says {done.stdout.strip()}")
        return told


class VirtualMachines:
    """One server and one workspace for all rounds; made by the first."""

    points = ("vm.server", "vm.vmm", "vm.database", "vm.agent", "vm.capture-server", "vm.capture-vmm", "vm.wake-vmm", "vm.fork")

    def __init__(self, images: Path, random: Random) -> None:
        self._images = images
        self._random = random
        self._stack = ExitStack()
        self._place: Place | None = None
        self._number = 0

    async def close(self) -> None:
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        """An orderly stop; nothing of the home may run after it."""
        place = self._place
        try:
            if place is not None and place.is_up:
                place.down()
                left = place.processes()
                if left:
                    raise Violation(f"processes are left over after an orderly stop: {left}")
        finally:
            self._stack.close()

    async def round(self, point: str) -> Outcome:
        return await asyncio.to_thread(self._round, point)

    def _round(self, point: str) -> Outcome:
        try:
            place = self._begin()
            safe = self._put(captured=True)
            newer = self._put(captured=False) if self._random.random() < 0.5 else safe
            getattr(self, "_" + point.removeprefix("vm.").replace("-", "_"))(place)
            self._check(place, safe, newer)
        except Exception as error:
            self._give_up()  # what one round has broken must not be found again by the next
            return Outcome(point, True, told_by(error))
        return Outcome(point, True)

    def _give_up(self) -> None:
        self._place, place = None, self._place
        if place is not None and place.is_up:
            place.kill()
        self._stack.close()  # ends the database too

    def _begin(self) -> Place:
        if self._place is None:
            self._place = self._stack.enter_context(Place.temporary(self._images, PERDURE_UNRESPONSIVE_S=UNRESPONSIVE_S))
            self._place.up()
            client = self._stack.enter_context(self._place.client())
            self._workspace = Workspace.create("torture", client=client)
            self._counter = Counter(self._workspace)
            self._counter.start()
            self._workspace.checkpoint()
        return self._place

    def _put(self, *, captured: bool) -> int:
        self._number += 1
        self._counter.ask(f"put {self._number}")
        if captured:
            self._workspace.checkpoint()
        return self._number

    def _check(self, place: Place, safe: int, newer: int) -> None:
        """It wakes with what the last snapshot held, or with what came after; nothing is half done and nothing leaks."""
        report = self._workspace.wake()
        told = self._counter.ask("tell")
        if not safe <= told.memory <= newer:
            raise Violation(f"{safe} was captured and {newer} written, and it woke with {told.memory}")
        if told.memory < newer and report.lost_branch is None:
            raise Violation(f"it woke with {told.memory}; {newer} was on its disk, and no branch was kept")
        for found in Workspace.list(client=self._workspace.client):
            if found.name != self._workspace.name:
                found.delete()
        place.check_rows()
        place.check_journal()
        if (count := len(list((place.home / "store/live").iterdir()))) != 1:
            raise Violation(f"one workspace is awake, and {count} starts are on record")

    # -------------------------------------------------------------------------------------------------------------- faults

    def _server(self, place: Place) -> None:
        place.kill()
        place.up()

    def _vmm(self, place: Place) -> None:
        pid = place.vmm_of(self._workspace.id)
        os.kill(pid, signal.SIGKILL)
        place.until(lambda: not Path(f"/proc/{pid}").exists(), "the machine is gone")

    def _database(self, place: Place) -> None:
        postmaster = EmbeddedPostgres(place.home).pid()
        assert postmaster is not None
        os.kill(postmaster, signal.SIGKILL)
        again = EmbeddedPostgres(place.home)
        place.until(lambda: again.pid() not in (None, postmaster), "the database runs again")
        place.until(self._answers, "the server has its database again")

    def _answers(self) -> bool:
        try:
            self._workspace.refresh()
        except PerdureError:
            return False
        return True

    def _agent(self, place: Place) -> None:
        """Every process of the guest but init is killed, the agent too. The agent comes back, the machine is the same; what its
        programs were is in the snapshot."""
        pid = place.vmm_of(self._workspace.id)
        with suppress(PerdureError):
            self._workspace.commands.run("echo i > /proc/sysrq-trigger", run_limit_s=60)
        if self._workspace.commands.run(["true"], run_limit_s=60).exit_code != 0:
            raise Violation("the agent did not come back")
        if place.vmm_of(self._workspace.id) != pid:
            raise Violation("the agent died, and its machine was given up")
        self._vmm(place)

    def _capture_server(self, place: Place) -> None:
        action = self._random.choice(("checkpoint", "sleep"))
        place.crash(self._random.choice(CAPTURES), Victim.SERVER, act(self._workspace, action))

    def _capture_vmm(self, place: Place) -> None:
        action = self._random.choice(("checkpoint", "sleep"))
        place.crash(self._random.choice(CAPTURES), Victim.VMM, act(self._workspace, action))

    def _wake_vmm(self, place: Place) -> None:
        self._workspace.sleep()
        place.crash(self._random.choice(STARTS), Victim.VMM, act(self._workspace, "wake"))

    def _fork(self, place: Place) -> None:
        """A child has what its parent had; then its machine is killed, which is none of the parent's business."""
        before = self._counter.ask("tell")
        (child,) = self._workspace.fork(1)
        if not isinstance(child, Workspace):
            raise child
        if Counter(child).ask("tell") != before:
            raise Violation("a fork has another counter than its parent")
        Counter(child).ask("put 999")
        os.kill(place.vmm_of(child.id), signal.SIGKILL)
        child.delete()
