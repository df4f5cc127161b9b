"""Programs that a wake runs before all others go on: the executables in ``/etc/perdure/on-wake.d``, one after the other.

They run as root in the users' world, each in a cgroup beside the one that is still frozen. A wake waits for them, so each has a
limit and all together have one: who reaches it is killed and named, and what did not get its turn is named too. What a hook
leaves running belongs to the workspace like any program of a command: it is moved to the others, and goes on when they do.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time

from perdure.guest import launch, worker
from perdure.guest.execs import Sink
from perdure.guest.loop import READ
from perdure.guest.worker import Talk
from perdure.wire.guest.ops import HOOK_OUTPUT_BYTES, HOOK_OUTPUTS_BYTES, HOOKS_MAX, Hook

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from perdure.guest.loop import Loop, Timer
    from perdure.guest.world import World

DIRECTORY = "/etc/perdure/on-wake.d"
OWNER = 0  # whom hooks must belong to
#: As run-parts has it, and dots; a name that begins with one or ends in a tilde is not meant to run.
_NAME = re.compile(r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$")
#: Left by package managers and editors.
_LEFT_OVER = (".bak", ".disabled", ".dpkg-dist", ".dpkg-new", ".dpkg-old", ".orig", ".rej", ".swp")
#: A process that was killed and does not end hangs in the kernel; nobody can wait for that.
_DEATH_S = 2.0
_READ_BYTES = 65536


def may_exist(root: str) -> bool:
    """Whether there may be hooks below the users' root: a look at three directory entries, for a wake without any must cost
    nothing. A link on the way means maybe: only who lives in that root may follow it."""
    path = root
    for part in DIRECTORY.split("/")[1:]:
        path = f"{path}/{part}"
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            return False
        if not stat.S_ISDIR(mode):
            return stat.S_ISLNK(mode)
    return True


def find(talk: Talk) -> None:
    """In a worker inside the users' root: say which hooks there are, in the order of their names; refused ones with a reason."""
    found: list[dict[str, str]] = []
    try:
        names = sorted(name for name in os.listdir(DIRECTORY) if _NAME.match(name) and not name.endswith(_LEFT_OVER))
        why = untrusted(os.stat(DIRECTORY), "its directory")
    except (FileNotFoundError, NotADirectoryError):
        names, why = [], ""
    for name in names:
        try:
            facts = os.stat(f"{DIRECTORY}/{name}")
        except OSError:
            continue  # a link to nothing
        if stat.S_ISREG(facts.st_mode) and facts.st_mode & 0o111:
            found.append({"name": name, "refused": why or untrusted(facts, "the file")})
    talk.say(hooks=found[:HOOKS_MAX], more=max(0, len(found) - HOOKS_MAX))


def untrusted(facts: os.stat_result, what: str) -> str:
    """Hooks run as root: nobody else may be able to say what they do. Why not to run this one; "" if it may."""
    if facts.st_uid != OWNER:
        return f"It was not run: {what} belongs to user {facts.st_uid}, not to root."
    if facts.st_mode & 0o022:
        return f"It was not run: others than root may write to {what}."
    return ""


class Hooks:
    """One wake's hooks. ``done(runs, problems)`` is called once, within the limits."""

    def __init__(
        self,
        loop: Loop,
        world: World,
        environment: dict[str, str],
        limits: dict[str, Any],
        done: Callable[[list[Any], list[str]], None],
    ) -> None:
        self._loop = loop
        self._world = world
        self._environment = environment
        self._each_s = float(limits["each_s"])
        self._until = time.monotonic() + float(limits["all_s"])
        self._done = done
        self._waiting: list[dict[str, str]] = []
        self._runs: list[dict[str, Any]] = []
        self._problems: list[str] = []
        self._room = HOOK_OUTPUTS_BYTES
        self._looked = False

    def start(self) -> None:
        """Look for them, then run them."""
        limit_s = min(self._each_s, self._until - time.monotonic())
        self._timer: Timer = self._loop.call_later(limit_s, lambda: self._found(None))
        worker.start(self._loop, self._world.view, find, self._found)

    def _found(self, message: dict[str, Any] | None) -> None:
        if self._looked:
            return  # the worker's end, or its late word
        self._looked = True
        self._timer.cancel()
        if message is None or "hooks" not in message:
            said = (message or {}).get("message") or "no answer."
            self._problems.append(f"The hooks in {DIRECTORY} were not run, for it could not be read: {said}")
        else:
            self._waiting = message["hooks"]
            if message["more"]:
                self._problems.append(f"Of the hooks in {DIRECTORY}, the last {message['more']} were not run: {HOOKS_MAX} may.")
        self._next()

    def _next(self) -> None:
        while self._waiting:
            hook = self._waiting.pop(0)
            left_s = self._until - time.monotonic()
            if hook["refused"]:
                self._record(hook["name"], Hook.REFUSED, hook["refused"])
            elif left_s <= 0:
                self._record(hook["name"], Hook.SKIPPED, "It was not run: those before it had used up the time of all.")
            else:
                run = Run(self._loop, self._world, hook["name"], min(self._each_s, left_s), self._ended)
                try:
                    run.start(self._environment)
                except OSError as error:
                    self._record(hook["name"], Hook.NOT_STARTED, f"It cannot be started: {error}.")
                else:
                    return
        self._done(self._runs, self._problems)

    def _ended(self, record: dict[str, Any]) -> None:
        record["output"] = record["output"][-self._room :] if self._room else ""
        self._room -= len(record["output"])
        self._runs.append(record)
        self._next()

    def _record(self, name: str, outcome: str, sentence: str) -> None:
        self._runs.append({"name": name, "outcome": outcome, "exit_code": None, "ms": 0, "output": sentence})


class Run:
    """One hook's life."""

    def __init__(self, loop: Loop, world: World, name: str, limit_s: float, ended: Callable[[dict[str, Any]], None]) -> None:
        self._loop = loop
        self._world = world
        self._name = name
        self._limit_s = limit_s
        self._ended = ended
        self._group = world.hook_group(name)
        self._output = bytearray()
        self._out = self._status = self._pidfd = -1
        self._late = False
        self._over = False
        self._began = time.monotonic()

    def start(self, environment: dict[str, str]) -> None:
        """Have it forked. Raises OSError."""
        fds: list[int] = []
        try:
            fds.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            fds += os.pipe()
            fds += os.pipe()
            null, out, out_end, status, status_end = fds
            spec = {"argv": [f"{DIRECTORY}/{self._name}"], "cwd": "/"}
            env = {**environment, "PERDURE_HOOK": self._name}
            _, self._pidfd = self._world.launch(self._group, spec, env, [null, out_end, out_end, status_end])
        except OSError:
            for fd in fds:
                os.close(fd)
            self._group.remove()
            raise
        for fd in (null, out_end, status_end):
            os.close(fd)
        self._out, self._status = out, status
        for fd in (out, status):
            os.set_blocking(fd, False)
        self._loop.add(out, READ, self._on_output)
        self._loop.add(self._pidfd, READ, lambda _mask: self._on_exit())
        self._timer = self._loop.call_later(self._limit_s, self._on_limit)

    def _on_output(self, _mask: int) -> None:
        self._read()

    def _read(self) -> bool:
        """Take what it wrote; only the end is kept. False when there is no more now, or ever."""
        try:
            data = os.read(self._out, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove(self._out)  # else an ended pipe would call all the time
        self._output += data
        del self._output[:-HOOK_OUTPUT_BYTES]
        return bool(data)

    def _on_limit(self) -> None:
        self._late = True
        self._group.kill()
        self._timer = self._loop.call_later(_DEATH_S, lambda: self._end(None))

    def _on_exit(self) -> None:
        self._loop.remove(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self._group.leader, 0)
        if not self._over:
            self._end(os.waitstatus_to_exitcode(status))

    def _end(self, code: int | None) -> None:
        """Its process has ended with this code, or does not end at all."""
        self._over = True
        self._timer.cancel()
        ms = round((time.monotonic() - self._began) * 1000)
        left = _READ_BYTES * 16
        while left > 0 and self._read():
            left -= _READ_BYTES
        refusal = self._refusal()
        self._loop.remove(self._out)
        Sink(self._loop, self._out)  # what it left running may write on
        text = self._output.decode("utf-8", "replace")
        if self._late:
            outcome, code = Hook.TIMEOUT, None
        elif refusal:
            outcome, code, text = Hook.NOT_STARTED, refusal["code"], refusal["detail"]
        else:
            code = 128 - code if code is not None and code < 0 else code
            outcome = Hook.FAILED if code else Hook.OK
        if self._late:
            self._group.kill()
            self._world.drop_hooks()
        else:
            self._world.adopt(self._group, self._name)
        self._ended({"name": self._name, "outcome": outcome, "exit_code": code, "ms": ms, "output": text})

    def _refusal(self) -> dict[str, Any] | None:
        """Why it could not be executed, as its child says it."""
        try:
            told = os.read(self._status, 4096)[launch.PID.size :]
        except BlockingIOError:
            told = b""
        os.close(self._status)
        value: dict[str, Any] | None = json.loads(told) if told else None
        return value
