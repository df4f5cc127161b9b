"""The workspace's program: started by the first wake after a boot, started again when it ends, always in one cgroup.

    NONE ──file──► STARTING ──exec──► RUNNING ──exit──► BACKING_OFF ──timer──► STARTING
                                        │ stop              └─ or ENDED, as its restart policy has it
                                        ▼
                                     STOPPING ──exit──► STOPPED ──start──► STARTING

It is just a process among the users': a sleep keeps it, a fork has it, a capture freezes it. Nothing is started while the users'
processes stand still. A file on the users' disk names it, so that a boot from that disk starts it again; what an agent must know
after the death of the one before it is in a record in ``/run``.
"""

from __future__ import annotations

import json
import os
import signal
import time

from perdure.guest import launch, progfile, worker
from perdure.guest.loop import READ
from perdure.guest.world import read_file
from perdure.wire.guest.ops import (
    PROGRAM_FILE,
    PROGRAM_STOP_GRACE_S,
    ProgramState,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from perdure.guest.loop import Loop, Timer
    from perdure.guest.proglog import ProgramLog
    from perdure.guest.world import Group, World

    Reply = Callable[[dict[str, Any]], None]

#: With a number, one for each run: some kernels kill at birth what is born into a cgroup that was once killed (they compare its
#: ``kill_seq`` with that of the parent's). No command's id has a dot.
_GROUP = "perdure.program."
#: The wait before it is started again: doubled at each end that comes too soon.
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
#: Who ran for so long has not failed in a row.
STEADY_S = 60.0
#: How long a caller waits for an act to be done.
_REPLY_S = 10.0
#: What is left of an earlier run is killed before the next one, which would find its port taken.
_LEFTOVER_WAIT_S = 0.05
_LEFTOVER_TRIES = 40
_DRAIN_PIECES = 16


class _Run:
    """One process of the program, from its birth to its end."""

    def __init__(self, supervisor: Supervisor, loop: Loop, world: World, number: int) -> None:
        self._supervisor = supervisor
        self._loop = loop
        self._world = world
        self.number = number
        self.group = world.group(f"{_GROUP}{number}")
        self.pid = 0  # as the users' processes see it
        self.is_executed = False
        self.started_wall_ns = time.time_ns()
        self._started = time.monotonic()
        self._oom_before = world.oom_kills()
        self._status = self._pidfd = -1
        self._said = b""

    def start(self, program: dict[str, Any], environment: dict[str, str], output: int) -> None:
        """Have it forked, with its output going to ``output``. Raises OSError."""
        fds: list[int] = []
        try:
            fds.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            fds += os.pipe()
            null, self._status, theirs = fds
            _, self._pidfd = self._world.launch(self.group, program, environment, [null, output, output, theirs])
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        os.close(null)
        os.close(theirs)
        os.set_blocking(self._status, False)
        self._loop.add(self._status, READ, lambda _mask: self._on_status())
        self._loop.add(self._pidfd, READ, lambda _mask: self._on_exit())

    def adopt(self, record: dict[str, Any]) -> bool:
        """It was started by an agent before this one. False when it has ended."""
        leader = record.get("leader")
        if not isinstance(leader, int) or leader not in self.group.pids():
            return False
        try:
            self._pidfd = os.pidfd_open(leader)
        except OSError:
            return False
        self.group.leader, self.pid, self.is_executed = leader, int(record.get("pid") or 0), True
        self.started_wall_ns = int(record.get("started_ns") or self.started_wall_ns)
        self._loop.add(self._pidfd, READ, lambda _mask: self._on_exit())
        return True

    @property
    def lived_s(self) -> float:
        return time.monotonic() - self._started

    def _on_status(self) -> None:
        try:
            got = os.read(self._status, 4096)
        except BlockingIOError:
            return
        self._said += got
        if not self.pid and len(self._said) >= launch.PID.size:
            self.pid = int(launch.PID.unpack_from(self._said)[0])
        if got:
            return
        self._close_status()
        self.is_executed = len(self._said) == launch.PID.size
        self._supervisor.changed()

    def _close_status(self) -> None:
        self._loop.remove(self._status)
        os.close(self._status)
        self._status = -1

    def _on_exit(self) -> None:
        self._loop.remove(self._pidfd)
        os.close(self._pidfd)
        code: int | None
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self.group.leader, 0)[1])
        except ChildProcessError:  # an earlier agent's child: only init knows
            code = None
        for _ in range(2):  # what it said, and the end of that
            if self._status >= 0:
                self._on_status()
        if self._status >= 0:
            self._close_status()
        self.group.kill()
        self._supervisor.ended(self, self._verdict(code))

    def _verdict(self, code: int | None) -> dict[str, Any]:
        number = -code if code is not None and code < 0 else None
        detail, refusal = "", self._said[launch.PID.size :]
        if refusal:
            why = json.loads(refusal)
            code, detail = int(why["code"]), str(why["detail"])
        elif code is None:
            detail = "It ended while no agent watched it."
        elif number == signal.SIGKILL and self._world.oom_kills() > self._oom_before:
            detail = "The workspace ran out of memory and its kernel killed it."
        exit_code = 128 + number if number is not None else code
        return {"code": exit_code, "signal": number, "detail": detail, "run_ms": round(self.lived_s * 1000)}


class Supervisor:
    """Keeps the program running. One per agent."""

    def __init__(self, loop: Loop, world: World, log: ProgramLog) -> None:
        self._loop = loop
        self._world = world
        self._log = log
        self._record = f"{world.run_dir}/program.json"
        self._environment: dict[str, str] = {}
        self._program: dict[str, Any] | None = None
        self._problem = ""
        self._run: _Run | None = None
        self._timer: Timer | None = None  # of the next start
        self._due = 0.0
        self._tries = 0
        self._is_wanted = True
        self._is_loading = self._is_known = self._is_held = False
        self._stops: list[Timer] = []  # of what was asked to end, and is killed then
        self._restarts = self._failures = 0
        self._last: dict[str, Any] | None = None
        self._number = 0  # of the last run
        self._old: list[Group] = []  # of earlier ones, until nobody is in them
        self._waiting: list[tuple[Callable[[], None], Timer]] = []
        world.on_thaw = self._on_thaw
        self._recall()

    # ------------------------------------------------------------------------------------------------------ record

    def _recall(self) -> None:
        """What the agent before this one knew."""
        try:
            record = json.loads(read_file(self._record) or "{}")
        except ValueError:
            record = {}
        if not isinstance(record, dict) or not record:
            return
        self._is_wanted = bool(record.get("wanted", True))
        self._restarts, self._failures = int(record.get("restarts", 0)), int(record.get("failures", 0))
        self._last, self._number = record.get("last"), int(record.get("number", 0))
        run = _Run(self, self._loop, self._world, self._number)
        if run.adopt(record):
            self._run = run
        else:
            self._old.append(run.group)

    def changed(self) -> None:
        """Something is otherwise than it was: for the next agent, and for who waits for it."""
        run = self._run
        record = {
            "wanted": self._is_wanted,
            "number": self._number,
            "leader": run.group.leader if run else 0,
            "pid": run.pid if run else 0,
            "started_ns": run.started_wall_ns if run else 0,
            "restarts": self._restarts,
            "failures": self._failures,
            "last": self._last,
        }
        aside = f"{self._record}.new"
        try:
            with open(aside, "w", encoding="ascii") as file:
                json.dump(record, file)
            os.rename(aside, self._record)
        except OSError:
            pass  # /run is full; the next agent then knows less
        if self.state() not in (ProgramState.STARTING, ProgramState.STOPPING):
            waiting, self._waiting = self._waiting, []
            for reply, timer in waiting:
                timer.cancel()
                reply()

    # ------------------------------------------------------------------------------------------------------- state

    def state(self) -> str:
        if self._run is not None:
            if self._stops:
                return ProgramState.STOPPING
            return ProgramState.RUNNING if self._run.is_executed else ProgramState.STARTING
        if self._is_loading or self._is_held or self._tries:
            return ProgramState.STARTING
        if self._program is None:
            return ProgramState.NONE
        if not self._is_wanted:
            return ProgramState.STOPPED
        return ProgramState.ENDED if self._timer is None else ProgramState.BACKING_OFF

    def show(self) -> dict[str, Any]:
        """All there is to know. Times in nanoseconds since 1970 and milliseconds."""
        run, left_s = self._run, self._due - time.monotonic()
        return {
            "program": self._program,
            "problem": self._problem,
            "state": self.state(),
            "pid": run.pid if run else None,
            "started_ns": run.started_wall_ns if run else None,
            "restarts": self._restarts,
            "failures": self._failures,
            "retry_ms": max(0, round(left_s * 1000)) if self._timer is not None and not self._tries else None,
            "last": self._last,
            "log_start": self._log.file.start,
            "log_end": self._log.file.end,
        }

    # -------------------------------------------------------------------------------------------------------- acts

    def begin(self, environment: dict[str, str]) -> None:
        """A wake is over: the first one of a boot starts the program."""
        self._environment = environment
        if self._is_known:
            return
        self._is_known = True
        if self._run is not None or progfile.may_exist(self._world.root):
            self._load()

    def act(self, request: dict[str, Any], reply: Reply) -> None:
        """Do what a caller asks; answers when that is done, or under way for a while."""
        do = request["do"]
        if do not in ("show", "start", "stop", "restart"):
            raise ValueError(f"do is {do!r}")

        def answer() -> None:
            reply({"ok": True, **self.show()})

        if do == "show":
            answer()
            return

        def give_up() -> None:
            self._waiting = [one for one in self._waiting if one[0] is not answer]
            answer()

        self._is_wanted = do != "stop"
        self._waiting.append((answer, self._loop.call_later(_REPLY_S, give_up)))
        if do == "stop":
            self._cancel()
            self._end()
            self.changed()
        else:
            self._failures = 0
            self._load(anew=do == "restart")

    def _load(self, *, anew: bool = False) -> None:
        """Read the file, then see to it that what it names runs; ``anew``: and not the process that does."""
        self._is_loading = True
        heard = False

        def loaded(message: dict[str, Any] | None) -> None:
            nonlocal heard
            if heard:
                return  # the worker's end after its word
            heard = True
            self._is_loading = False
            if message is None or "problem" not in message:
                why = (message or {}).get("message") or "no answer."
                self._program, self._problem = None, f"{PROGRAM_FILE} could not be read: {why}"
            else:
                self._program, self._problem = message["program"], message["problem"]
            self._apply(anew)

        worker.start(self._loop, self._world.view, progfile.read, loaded)

    def _apply(self, anew: bool) -> None:
        """Do as the file says. What runs goes on where nobody asks for more and the file cannot be understood."""
        if self._run is None:
            self._cancel()
            self._start()
        elif anew or (self._program is None and not self._problem):
            self._end()
        self.changed()

    # ------------------------------------------------------------------------------------------------------- start

    def _cancel(self) -> None:
        self._tries, self._is_held = 0, False
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _later(self, delay_s: float) -> None:
        self._due = time.monotonic() + delay_s
        self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._start()
        self.changed()

    def _on_thaw(self) -> None:
        if self._is_held:
            self._is_held = False
            self._loop.call_soon(self._on_timer)

    def _start(self) -> None:
        """Start it if it is wanted, as soon as users' processes may run and nothing of an earlier run is left."""
        program = self._program
        if program is None or not self._is_wanted or self._run is not None:
            self._tries = 0
            return
        if self._world.is_held:
            self._is_held = True
            return
        self._old = [group for group in self._old if not group.remove()]
        if self._old and self._tries < _LEFTOVER_TRIES:
            self._tries += 1
            for group in self._old:
                group.kill()
            self._later(_LEFTOVER_WAIT_S)
            return
        self._tries = 0
        self._number += 1
        run = _Run(self, self._loop, self._world, self._number)
        environment = {**self._environment, "PORT": str(program["port"]), "PYTHONUNBUFFERED": "1"}
        output = -1
        try:
            output = self._log.writing_end()
            run.start(program, environment, output)
        except OSError as error:
            self._old.append(run.group)
            self._failed(
                {"code": launch.NOT_EXECUTABLE, "signal": None, "detail": f"It cannot be started: {error}.", "run_ms": 0}
            )
        else:
            self._run = run
        finally:
            if output >= 0:
                os.close(output)

    # --------------------------------------------------------------------------------------------------------- end

    def _end(self) -> None:
        """SIGTERM, and SIGKILL to what is left after the grace. If it is wanted, it is started again then."""
        run = self._run
        if run is None or self._stops:
            return
        grace_s = float((self._program or {}).get("stop_grace_s", PROGRAM_STOP_GRACE_S))
        self._stops = [self._loop.call_later(grace_s, run.group.kill)]
        run.group.signal(signal.SIGTERM)
        run.group.signal(signal.SIGCONT)  # a stopped process could not even die

    def ended(self, run: _Run, end: dict[str, Any]) -> None:
        for _ in range(_DRAIN_PIECES):
            if not self._log.take():
                break
        stops, self._stops = self._stops, []
        for timer in stops:
            timer.cancel()
        self._run = None
        self._old.append(run.group)
        if stops:
            self._last = end
            if self._is_wanted and self._program is not None:
                self._restarts += 1
                self._start()
        else:
            self._failures = 0 if run.lived_s >= STEADY_S else self._failures
            self._failed(end)
        self.changed()

    def _failed(self, end: dict[str, Any]) -> None:
        """It has ended by itself, or could not be started."""
        self._last = end
        policy = (self._program or {}).get("restart")
        if not self._is_wanted or policy not in ("always", "on-failure") or (policy == "on-failure" and end["code"] == 0):
            return
        self._failures += 1
        self._restarts += 1
        self._later(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(self._failures - 1, 16)))
