"""Commands: their life, their output, and who watches.

    STARTING ──pid──► RUNNING ──exit──► ENDED (remembered for a while)
        └──cannot start──────────────────┘

Output goes from the pipes into a spool per stream, and from there to each attachment at its own offset. With readers attached
the command waits for the slowest of them (half a spool of lag); with none it never waits, and the oldest output is dropped and
reported as a gap. A command has ended when its own process has, even if others hold its pipes: what they write then is read and
dropped, so that a server started in the background does not die of a closed pipe.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque

from perdure.guest import launch
from perdure.guest.loop import READ, WRITE
from perdure.guest.spool import Spool
from perdure.wire.guest.frames import DATA_MAX
from perdure.wire.guest.ops import SPOOL_BYTES, Sub

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from perdure.guest.loop import Loop, Timer
    from perdure.guest.world import World
    from perdure.wire.guest.mux import Mux

_READ_BYTES = 65536
_LAG_MAX = SPOOL_BYTES // 2
_DRAIN_MAX = 1024 * 1024
#: How long a command waits for a reader whose channel broke. What was on its way then (a window) is still in the spool.
_RETURN_S = 10.0
_KEPT_COMMAND = 200


class Attachment:
    """One stream that watches one command."""

    def __init__(self, mux: Mux, stream: int, offsets: tuple[int, int], forget: Callable[[], object]) -> None:
        self._mux = mux
        self._forget = forget
        self.stream = stream
        self.offsets = [0, *offsets]  # by sub-stream
        self._told_start = False
        self.finished = False

    def pump(self, command: Command) -> None:
        """Send what the command has and the stream has room for."""
        mux = self._mux
        if self.finished or not mux.is_open(self.stream):
            return
        if not self._told_start and command.running:
            self._told_start = True
            mux.message(self.stream, {"ev": "started", "pid": command.pid})
        behind = True
        while behind:
            behind = False
            for sub in (Sub.STDOUT, Sub.STDERR):
                behind |= self._pump_one(command, sub)
        if command.exited is not None and all(self.offsets[sub] >= command.spools[sub].end for sub in (1, 2)):
            self.finished = True
            mux.message(self.stream, command.exited)
            mux.eof(self.stream)
            self._forget()

    def _pump_one(self, command: Command, sub: int) -> bool:
        spool = command.spools[sub]
        room = self._mux.room(self.stream)
        if room <= 0 or self.offsets[sub] >= spool.end:
            return False
        gap, data = spool.read(self.offsets[sub], min(room, DATA_MAX))
        if gap:
            self._mux.message(self.stream, {"ev": "gap", "sub": sub, "lost": gap})
        self._mux.send(self.stream, data, sub)
        self.offsets[sub] += gap + len(data)
        return True

    def lag(self, command: Command, sub: int) -> int:
        return command.spools[sub].end - self.offsets[sub]


class Stdin:
    """Bytes on their way into a command, which takes them when it likes."""

    def __init__(self, loop: Loop, fd: int, taken: Callable[[int, int], None]) -> None:
        self._loop = loop
        self._fd = fd
        self._taken = taken
        self._queue: deque[tuple[int, memoryview]] = deque()
        self._ending = False
        os.set_blocking(fd, False)

    def write(self, stream: int, data: bytes) -> None:
        if self._fd < 0:
            self._taken(stream, len(data))
            return
        self._queue.append((stream, memoryview(data)))
        self._flush(0)

    def end(self) -> None:
        """Close after what is queued."""
        self._ending = True
        self._flush(0)

    def _flush(self, _mask: int) -> None:
        while self._queue and self._fd >= 0:
            stream, data = self._queue[0]
            try:
                sent = os.write(self._fd, data)
            except BlockingIOError:
                if not self._loop.watches(self._fd):
                    self._loop.add(self._fd, WRITE, self._flush)
                return
            except OSError:  # nobody reads it any more
                self.close()
                return
            self._taken(stream, sent)
            if sent == len(data):
                self._queue.popleft()
            else:
                self._queue[0] = (stream, data[sent:])
        if self._fd >= 0:
            self._loop.remove(self._fd)
            if self._ending:
                self.close()

    def close(self) -> None:
        """Close now; what is queued is dropped, for nobody will read it."""
        if self._fd >= 0:
            self._loop.remove(self._fd)
            os.close(self._fd)
            self._fd = -1
        while self._queue:
            stream, data = self._queue.popleft()
            self._taken(stream, len(data))


class Command:
    """One command of a user."""

    def __init__(self, loop: Loop, world: World, spec: dict[str, Any], ended: Callable[[Command], None]) -> None:
        self.exec_id: str = spec["exec_id"]
        shown = spec.get("shell") or " ".join(spec.get("argv") or ())
        self.shown: str = shown[:_KEPT_COMMAND]
        self.spools: dict[int, Spool] = {Sub.STDOUT: Spool(), Sub.STDERR: Spool()}
        self.attachments: dict[int, Attachment] = {}
        self._away: list[Attachment] = []  # their channel broke; they may come back
        self.pid = 0  # as the users' processes see it
        self.running = False  # it was executed, and may have ended since
        self.started_wall_ns = time.time_ns()
        self.exited: dict[str, Any] | None = None
        self.group = world.group(self.exec_id)
        self._loop = loop
        self._world = world
        self._spec = spec
        self._ended = ended
        self._end_wanted: str | None = None
        self._started = time.monotonic()
        self._last_output = self._started
        self._timers: list[Timer] = []
        self._pipes: dict[int, int] = {}  # sub-stream → descriptor
        self._pidfd = -1
        self._status = -1
        self._told = b""
        self._stdin: Stdin | None = None
        self._oom_before = 0
        self._taken: Callable[[int, int], None] = lambda _stream, _count: None

    # ------------------------------------------------------------------------------------------------------ start

    def start(self, environment: dict[str, str], taken: Callable[[int, int], None]) -> None:
        """Have it forked. ``taken(stream, bytes)`` is called as the command takes its input."""
        self._taken = taken
        self._oom_before = self._world.oom_kills()
        theirs: list[int] = []  # stdin, stdout, stderr, status
        ours: list[int] = []
        try:
            self._open_pipes(ours, theirs)
            _, self._pidfd = self._world.launch(self.group, self._spec, environment, theirs)
        except OSError:
            for fd in (*ours, *theirs):
                os.close(fd)
            self.group.remove()
            raise
        for fd in theirs:
            os.close(fd)
        for fd in ours:
            os.set_blocking(fd, False)
        self._take(ours)
        self._loop.add(self._status, READ, self._on_status)
        self._loop.add(self._pidfd, READ, self._on_exit)
        for sub in self._pipes:
            self._watch(sub)
        self._set_limits()

    def _open_pipes(self, ours: list[int], theirs: list[int]) -> None:
        """Ours: stdout, stderr, status, and stdin when wanted. Filled one by one, so that a failure leaks none."""
        if self._spec.get("stdin"):
            stdin_read, stdin_write = os.pipe()
            theirs.append(stdin_read)
        else:
            stdin_write = -1
            theirs.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        for _ in range(3):
            near, far = os.pipe()
            ours.append(near)
            theirs.append(far)
        if stdin_write >= 0:
            ours.append(stdin_write)

    def _take(self, ours: list[int]) -> None:
        """Remember which is which of what ``_open_pipes`` made."""
        self._pipes = {Sub.STDOUT: ours[0], Sub.STDERR: ours[1]}
        self._status = ours[2]
        if len(ours) == 4:
            self._stdin = Stdin(self._loop, ours[3], self._taken)

    def _watch(self, sub: int) -> None:
        fd = self._pipes.get(sub, -1)
        if fd >= 0 and not self._loop.watches(fd):
            self._loop.add(fd, READ, lambda _mask: self._on_output(sub))

    def _on_status(self, _mask: int) -> None:
        try:
            got = os.read(self._status, 4096)
        except BlockingIOError:
            return
        self._told += got
        if not self.pid and len(self._told) >= launch.PID.size:
            self.pid = int(launch.PID.unpack_from(self._told)[0])
        if got:
            return
        self._loop.remove(self._status)
        os.close(self._status)
        self._status = -1
        if len(self._told) == launch.PID.size:
            self.running = True
            self.pump()

    def _cannot_start(self) -> dict[str, Any] | None:
        told = self._told[launch.PID.size :]
        value: dict[str, Any] | None = json.loads(told) if told else None
        return value

    # ----------------------------------------------------------------------------------------------------- output

    def _on_output(self, sub: int) -> None:
        if self._read(sub):
            self._last_output = time.monotonic()
            self.pump()

    def _read(self, sub: int) -> int:
        """Move bytes from a pipe to its spool; 0 when there are none now or ever."""
        fd = self._pipes[sub]
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self._close_pipe(sub)
            return 0
        self.spools[sub].append(data)
        return len(data)

    def _close_pipe(self, sub: int) -> None:
        fd = self._pipes.pop(sub)
        self._loop.remove(fd)
        os.close(fd)

    def pump(self) -> None:
        """Send to everybody attached, then read on, or wait for the slowest."""
        if self.running or self.exited is not None:
            for attachment in list(self.attachments.values()):
                attachment.pump(self)
                if attachment.finished:
                    del self.attachments[attachment.stream]
        if self.exited is not None:
            return
        for sub, fd in self._pipes.items():
            if self._lag(sub) <= _LAG_MAX:
                self._watch(sub)
            else:
                self._loop.remove(fd)

    def _lag(self, sub: int) -> int:
        """Bytes by which the readers that the command waits for are behind."""
        return max((attachment.lag(self, sub) for attachment in (*self.attachments.values(), *self._away)), default=0)

    # ------------------------------------------------------------------------------------------------------ input

    def write_stdin(self, stream: int, data: bytes) -> None:
        if self._stdin is None or self.exited is not None:
            self._taken(stream, len(data))
        else:
            self._stdin.write(stream, data)

    def end_stdin(self) -> None:
        if self._stdin is not None:
            self._stdin.end()

    # ------------------------------------------------------------------------------------------------- attachment

    def attach(self, attachment: Attachment) -> None:
        self.attachments[attachment.stream] = attachment
        self._away.clear()
        self.pump()

    def detach(self, stream: int) -> None:
        if self.attachments.pop(stream, None) is not None:
            self.pump()

    def cut_off(self, stream: int) -> None:
        """The reader's channel broke: wait for it a while, so that it can come back without a gap."""
        attachment = self.attachments.pop(stream, None)
        if attachment is not None and self.exited is None:
            self._away.append(attachment)
            self._loop.call_later(_RETURN_S, lambda: self._give_up(attachment))

    def _give_up(self, attachment: Attachment) -> None:
        if attachment in self._away:
            self._away.remove(attachment)
            self.pump()

    # -------------------------------------------------------------------------------------------------------- end

    def _set_limits(self) -> None:
        run, idle = self._spec.get("run_limit_s"), self._spec.get("idle_limit_s")
        if run is not None:
            self._timers.append(self._loop.call_later(run, lambda: self.kill("run-limit")))
        if idle is not None:
            self._check_idle(idle)

    def _check_idle(self, limit: float) -> None:
        left = self._last_output + limit - time.monotonic()
        if left <= 0:
            self.kill("idle-limit")
        elif self.exited is None:
            self._timers.append(self._loop.call_later(left, lambda: self._check_idle(limit)))
            del self._timers[:-2]

    def signal(self, number: int) -> None:
        """Send a signal to the command's process group."""
        if self.exited is None:
            try:
                os.killpg(self.group.leader, number)
            except ProcessLookupError:
                pass  # between fork and setsid, or a zombie that is reaped in a moment

    def resize(self, rows: object, cols: object) -> bool:
        """Tell its terminal a new size. False for a command that has none; raises ValueError for a size that is none."""
        del rows, cols
        return False

    def kill(self, why: str) -> None:
        """SIGTERM to all its processes, SIGKILL to those that are left after the grace. Works on leftovers of an ended one."""
        if self._end_wanted is None and self.exited is None:
            self._end_wanted = why
        self.group.signal(signal.SIGTERM)
        self.group.signal(signal.SIGCONT)  # a stopped process could not even die
        self._loop.call_later(float(self._spec.get("kill_grace_s", 2.0)), self.group.kill)

    def _on_exit(self, _mask: int) -> None:
        self._loop.remove(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.group.leader, 0)
        if self._status >= 0:
            self._on_status(0)
        for sub in list(self._pipes):
            self._drain(sub)
        if self._stdin is not None:
            self._stdin.close()
        for timer in self._timers:
            timer.cancel()
        self.exited = self._verdict(os.waitstatus_to_exitcode(status))
        self.pump()
        self._ended(self)

    def _drain(self, sub: int) -> None:
        """Take what is in the pipe now. If others hold it, read on and drop, so that they do not die of a broken pipe."""
        taken = 0
        while sub in self._pipes and taken < _DRAIN_MAX:
            got = self._read(sub)
            taken += got
            if got == 0:
                break
        if sub in self._pipes:
            fd = self._pipes.pop(sub)
            self._loop.remove(fd)
            self._let_go(fd)

    def _let_go(self, fd: int) -> None:
        Sink(self._loop, fd)

    def _verdict(self, code: int) -> dict[str, Any]:
        number = -code if code < 0 else None
        refusal = self._cannot_start()
        detail = ""
        if refusal is not None:
            end, code, number, detail = "not-started", refusal["code"], None, refusal["detail"]
        elif self._end_wanted is not None:
            end = self._end_wanted
            detail = self._limit_detail(end)
        elif number == signal.SIGKILL and self._world.oom_kills() > self._oom_before:
            end, detail = "oom", "The workspace ran out of memory and its kernel killed the command."
        else:
            end = "signaled" if number is not None else "exited"
        return {
            "ev": "exited",
            "end": end,
            "code": 128 + number if number is not None else code,
            "signal": number,
            "detail": detail,
            "run_ms": round((time.monotonic() - self._started) * 1000),
        }

    def _limit_detail(self, end: str) -> str:
        if end == "run-limit":
            return f"It ran longer than its limit of {self._spec['run_limit_s']:g} s and was stopped."
        if end == "idle-limit":
            return f"It wrote nothing for its limit of {self._spec['idle_limit_s']:g} s and was stopped."
        return "It was killed on request."

    @property
    def is_at_prompt(self) -> bool:
        """Whether it only waits for somebody to come and type."""
        return False

    def is_of(self, spec: dict[str, Any]) -> bool:
        """Whether a request asks for this very command, whoever asks."""
        return {**self._spec, "trace": None} == {**spec, "trace": None}

    def info(self) -> dict[str, Any]:
        return {
            "exec_id": self.exec_id,
            "pid": self.pid,
            "command": self.shown,
            "started_ns": self.started_wall_ns,
            "exited": self.exited,
            "stdout_bytes": self.spools[Sub.STDOUT].end,
            "stderr_bytes": self.spools[Sub.STDERR].end,
        }


class Sink:
    """Reads a pipe that background processes may still hold, and drops it; closes it when nobody does."""

    def __init__(self, loop: Loop, fd: int) -> None:
        self._loop = loop
        self._fd = fd
        loop.add(fd, READ, self._on_ready)

    def _on_ready(self, _mask: int) -> None:
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove(self._fd)
            os.close(self._fd)
