"""The control channel: handshake, repairs, freeze and thaw, and what a host asks of the machine as a whole.

Order of a wake: old streams dropped, clock, randomness, identity, environment, resume.json, hooks, then thaw. Users' processes
see the repaired world only.
"""

from __future__ import annotations

import os
import re
import sys

from perdure.guest import hooks, repair, resume, worker
from perdure.guest.launch import DEFAULT_PATH
from perdure.guest.worker import Talk
from perdure.guest.world import read_file
from perdure.wire.guest.ops import AGENT_VERSION, PROTOCOL, UNKNOWN_CALL, Call, Code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from perdure.guest.execs import Command
    from perdure.guest.flush import Flusher
    from perdure.guest.loop import Loop
    from perdure.guest.program import Supervisor
    from perdure.guest.repair import System
    from perdure.guest.table import ExecTable
    from perdure.guest.world import World

    Reply = Callable[[dict[str, Any]], None]

_HOSTNAME = re.compile(r"^[a-z0-9]([a-z0-9-]{0,62})$")
_MACHINE_ID = re.compile(r"^[0-9a-f]{32}$")
_RANDOMNESS = "randomness"
_STILL_S = 2.0
_IDLE_WINDOW_S = 0.2
_IDLE_SHARE = 0.1


def _failure(code: str, message: str) -> dict[str, Any]:
    return {"ok": False, "code": code, "message": message}


class Control:
    """Answers calls. ``reply`` may be called later, but is called once."""

    def __init__(
        self,
        loop: Loop,
        world: World,
        execs: ExecTable,
        flusher: Flusher,
        system: System,
        drop_streams: Callable[[], int],
    ) -> None:
        self._loop = loop
        self._world = world
        self._execs = execs
        self._flusher = flusher
        self._system = system
        self._drop_streams = drop_streams
        self._instance = os.urandom(8).hex()
        self._generation = 0
        self.proxy_port = 0
        self.problems: list[str] = []
        self.program: Supervisor
        self._calls: dict[str, Callable[[dict[str, Any], Reply], None]] = {
            Call.HELLO: self._hello,
            Call.WAKE: self._wake,
            Call.QUIESCE: self._quiesce,
            Call.THAW: self._thaw,
            Call.CLOCK: self._clock,
            Call.PING: self._ping,
            Call.SYNC: self._sync,
            Call.SETTLE: self._settle,
            Call.GROW_DISK: self._grow_disk,
            Call.POWEROFF: self._power_off,
            Call.PROGRAM: self._program,
        }
        self._execs.environment = self._environment({}, proxy=False)

    def call(self, request: dict[str, Any], reply: Reply) -> None:
        """Serve one call."""
        handler = self._calls.get(str(request.get("op")))
        if handler is None:
            reply(_failure(Code.INVALID, f"{UNKNOWN_CALL} {request.get('op')!r}."))
            return
        try:
            handler(request, reply)
        except (KeyError, TypeError, ValueError) as error:
            reply(_failure(Code.INVALID, f"The agent does not understand this {request['op']}: {error!r}."))
        except OSError as error:
            reply(_failure(Code.FAILED, f"{request['op']} failed in the workspace: {error}."))

    # -------------------------------------------------------------------------------------------------- handshake

    def _hello(self, _request: dict[str, Any], reply: Reply) -> None:
        root_problem = read_file(f"{self._world.run_dir}/root-problem").strip()
        if not root_problem and not os.path.isdir(f"{self._world.root}/etc"):
            root_problem = "The workspace's root has no /etc: its disk is empty, damaged or not mounted."
        received = self._system.wall_ns()
        reply(
            {
                "ok": True,
                "protocol": PROTOCOL,
                "agent": AGENT_VERSION,
                "python": sys.version.split()[0],
                "boot_id": read_file("/proc/sys/kernel/random/boot_id").strip(),
                "instance": self._instance,
                "generation": self._generation,
                "problems": [*([root_problem] if root_problem else []), *self.problems],
                "wall_ns": max(received, self._system.wall_ns()),
            }
        )

    def _wake(self, request: dict[str, Any], reply: Reply) -> None:
        generation = int(request["generation"])
        if generation < self._generation and not request.get("new_identity"):  # a fork counts its generations anew
            reply(_failure(Code.STALE, f"This workspace is at generation {self._generation}, not {generation}."))
            return
        hostname, machine_id = str(request["hostname"]), str(request["machine_id"])
        if not _HOSTNAME.match(hostname) or not _MACHINE_ID.match(machine_id):
            reply(_failure(Code.INVALID, f"{hostname!r} is not a host name or {machine_id!r} not a machine id."))
            return
        self._generation = generation
        answer: dict[str, Any] = {"ok": True, "failed": [], "dropped": self._drop_streams()}
        self._step(request["clock"], answer)
        self._repair(answer, _RANDOMNESS, lambda: self._system.add_entropy(bytes.fromhex(request["entropy"])))
        unlike = [failure for failure in answer["failed"] if failure.startswith(_RANDOMNESS)]
        if unlike and request.get("new_identity"):  # its programs must not go on: they would draw what its siblings' do
            reply(_failure(Code.FAILED, f"A new workspace got no random numbers of its own: {unlike[0]}."))
            return
        self._repair(answer, "hostname", lambda: self._system.set_hostname(hostname))
        self._execs.environment = self._environment(dict(request.get("environment") or {}), bool(request.get("proxy")))
        if not request.get("new_identity"):
            self._repaired(request, answer, reply)
            return

        def identified(message: dict[str, Any] | None) -> None:
            self._flusher.worked()
            if message is not None:
                answer["failed"] += message.get("failed") or [message["message"]] if "ok" not in message else message["failed"]
                answer["host_keys"] = bool(message.get("host_keys"))
                self._repaired(request, answer, reply)
            elif "running" not in answer:
                answer["failed"].append("identity: the worker ended without an answer")
                self._repaired(request, answer, reply)

        worker.start(self._loop, self._world.view, lambda talk: repair.write_identity(talk, hostname, machine_id), identified)

    def _repaired(self, request: dict[str, Any], answer: dict[str, Any], reply: Reply) -> None:
        """Tell it inside, and run hooks, where the host wants that: once in a generation, not when it connects again."""
        answer["running"] = self._execs.running_ids()
        answer["lost"] = self._execs.lost_ids()
        told, limits = request.get("resume"), request.get("hooks")
        if told is None:
            self._woken(answer, reply)
            return
        answer["hooks"] = []
        self._tell(told, answer)
        if not limits or not hooks.may_exist(self._world.root):
            self._woken(answer, reply)
            return

        def done(runs: list[dict[str, Any]], problems: list[str]) -> None:
            answer["hooks"] = runs
            answer["failed"] += problems
            self._flusher.worked()
            self._tell(told, answer)
            self._woken(answer, reply)

        environment = {**self._execs.environment, **_facts({**told, "new_identity": int(bool(request.get("new_identity")))})}

        def stand_still(frozen: bool) -> None:
            if not frozen:
                answer["failed"].append("hooks ran while some programs did not stand still")
            hooks.Hooks(self._loop, self._world, environment, limits, done).start()

        # Usually they do since the capture; not after one that did not wait for all of them.
        self._world.freeze(_STILL_S, stand_still)

    def _tell(self, told: dict[str, Any], answer: dict[str, Any]) -> None:
        report = resume.compose(told, answer)
        self._repair(answer, resume.PATH, lambda: resume.write(self._world.root, report))

    def _woken(self, answer: dict[str, Any], reply: Reply) -> None:
        self._repair(answer, "thaw", self._world.thaw)
        if answer.pop("host_keys", False):
            keys = {"exec_id": f"host-keys-{self._generation}", "argv": ["ssh-keygen", "-A"]}
            self._repair(answer, "ssh host keys", lambda: self._execs.run(keys, lambda _command: None))
        self.program.begin(self._execs.environment)
        answer["wall_ns"] = self._system.wall_ns()
        reply(answer)
        self._flusher.stir()  # to be thawed takes processes time, and nobody can tell whether they used it to write

    @staticmethod
    def _repair(answer: dict[str, Any], what: str, repair_it: Callable[[], None]) -> None:
        try:
            repair_it()
        except (OSError, ValueError) as error:
            answer["failed"].append(f"{what}: {error}")

    def _step(self, clock: dict[str, Any], answer: dict[str, Any], *, only_forward: bool = False) -> None:
        step, uncertainty = repair.clock_step_ns(clock, self._system.wall_ns())
        if only_forward:
            step = max(0, step)
        if step:
            self._repair(answer, "clock", lambda: self._system.step_clock(step))
        answer["clock_step_ns"] = step
        answer["clock_uncertainty_ns"] = uncertainty

    def _environment(self, extra: dict[str, str], proxy: bool) -> dict[str, str]:
        environment = {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8"}
        if proxy:
            url = f"http://127.0.0.1:{self.proxy_port}"
            for name in ("http_proxy", "https_proxy"):
                environment[name] = environment[name.upper()] = url
            environment["no_proxy"] = environment["NO_PROXY"] = "localhost,127.0.0.1,::1"
        return {**environment, **extra}

    # ---------------------------------------------------------------------------------------------------- capture

    def _quiesce(self, request: dict[str, Any], reply: Reply) -> None:
        self._world.freeze(float(request["deadline_ms"]) / 1000, lambda frozen: reply({"ok": True, "frozen": frozen}))

    def _thaw(self, request: dict[str, Any], reply: Reply) -> None:
        """After a checkpoint: the clock lost the pause. It is only stepped forward here: one late message proves no more."""
        answer: dict[str, Any] = {"ok": True, "failed": []}
        self._step({"host_ns": request["host_ns"]}, answer, only_forward=True)
        self._repair(answer, "thaw", self._world.thaw)
        answer["wall_ns"] = self._system.wall_ns()
        reply(answer)

    def _clock(self, request: dict[str, Any], reply: Reply) -> None:
        answer: dict[str, Any] = {"ok": True, "failed": []}
        if request.get("step_ns"):
            self._repair(answer, "clock", lambda: self._system.step_clock(int(request["step_ns"])))
        answer["wall_ns"] = self._system.wall_ns()
        reply(answer)

    # ---------------------------------------------------------------------------------------------------- machine

    def _ping(self, _request: dict[str, Any], reply: Reply) -> None:
        running, waiting = len(self._execs.running_ids()), self._execs.at_prompt()
        reply({"ok": True, "cpu_us": self._world.work_us(), "running": running, "at_prompt": waiting})

    def _in_worker(self, work: Callable[[Talk], None], reply: Reply, *, root: str = "") -> None:
        answered = False

        def on_message(message: dict[str, Any] | None) -> None:
            nonlocal answered
            if answered:
                return
            answered = True
            if message is None:
                reply(_failure(Code.FAILED, "The agent's worker ended without an answer."))
            elif "code" in message:
                reply(_failure(message["code"], message["message"]))
            else:
                reply(message)

        worker.start(self._loop, root, work, on_message)

    def _sync(self, request: dict[str, Any], reply: Reply) -> None:
        limit = request.get("drop_caches_over")
        if limit is None:
            self._flusher.flush(lambda: reply({"ok": True}))
            return
        limit_bytes = int(limit)
        self._flusher.flush(lambda: self._flusher.slim(limit_bytes, lambda dropped: reply({"ok": True, "dropped": dropped})))

    def _grow_disk(self, _request: dict[str, Any], reply: Reply) -> None:
        root = self._world.root
        self._flusher.worked()
        self._in_worker(lambda talk: _grow(talk, root), reply)

    def _power_off(self, _request: dict[str, Any], reply: Reply) -> None:
        reply({"ok": True})

        self._in_worker(_sync_all, lambda _done: self._system.power_off(self._world.root))

    def _program(self, request: dict[str, Any], reply: Reply) -> None:
        self.program.act(request, reply)

    def _settle(self, request: dict[str, Any], reply: Reply) -> None:
        _Settling(self._loop, self._execs, request, reply).start()


def _facts(told: dict[str, Any]) -> dict[str, str]:
    """The report's simple values as environment variables for hooks; "" for none."""
    names = ("workspace_id", "generation", "snapshot_id", "memory", "memory_reason", "disk", "asleep_s", "new_identity")
    values = {f"PERDURE_{name.upper()}": told.get(name) for name in names}
    return {"PERDURE_RESUME": resume.PATH, **{name: "" if value is None else str(value) for name, value in values.items()}}


class _Settling:
    """Warm-up commands one after the other, then flush, then wait until nothing computes any more."""

    def __init__(self, loop: Loop, execs: ExecTable, request: dict[str, Any], reply: Reply) -> None:
        self._loop = loop
        self._execs = execs
        self._commands = list(request.get("commands") or [])
        self._drop_caches = bool(request.get("drop_caches"))
        self._deadline_s = float(request["deadline_s"])
        self._reply = reply
        self._failed: list[str] = []
        self._ran = 0
        self._last = (0, 0)
        self._over = False

    def start(self) -> None:
        self._timer = self._loop.call_later(self._deadline_s, lambda: self._finish(idle=False))
        self._next()

    def _next(self) -> None:
        if self._over:
            return
        if not self._commands:
            worker.start(self._loop, "", _sync_all if not self._drop_caches else _sync_and_drop, self._flushed)
            return
        shell = str(self._commands.pop(0))
        self._ran += 1
        spec = {"exec_id": f"warm-up-{os.urandom(4).hex()}", "shell": shell, "run_limit_s": self._deadline_s}
        try:
            self._execs.run(spec, self._ended)
        except OSError as error:
            self._failed.append(f"{shell}: {error}")
            self._next()

    def _ended(self, command: Command) -> None:
        exited = command.exited or {}
        if exited.get("code") != 0:
            self._failed.append(f"{command.shown}: ended with {exited.get('code')} {exited.get('detail')}".strip())
        self._next()

    def _flushed(self, message: dict[str, Any] | None) -> None:
        if message is not None:
            self._measure()

    def _measure(self) -> None:
        """Look at how much of the last window was spent computing."""
        if self._over:
            return
        busy, total = _cpu_ticks()
        before_busy, before_total = self._last
        self._last = (busy, total)
        if before_total and total > before_total and (busy - before_busy) / (total - before_total) < _IDLE_SHARE:
            self._finish(idle=True)
        else:
            self._loop.call_later(_IDLE_WINDOW_S, self._measure)

    def _finish(self, *, idle: bool) -> None:
        if not self._over:
            self._over = True
            self._timer.cancel()
            self._reply({"ok": True, "ran": self._ran, "idle": idle, "failed": self._failed})


def _cpu_ticks() -> tuple[int, int]:
    """(busy, all) clock ticks since boot, from /proc/stat."""
    fields = [int(field) for field in read_file("/proc/stat").split("\n", 1)[0].split()[1:9]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


def _sync_all(talk: Talk) -> None:
    os.sync()
    talk.say(ok=True)


def _sync_and_drop(talk: Talk) -> None:
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as file:
        file.write("3\n")
    talk.say(ok=True)


def _grow(talk: Talk, root: str) -> None:
    """Let the file system at ``root`` fill its disk, by resize2fs of the agent disk."""
    device = ""
    for line in read_file("/proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[4] == root:
            device = rest.split()[1]
    if not device:
        raise worker.Refusal(Code.FAILED, f"Nothing is mounted at {root}, so there is no disk to grow.")
    end, other = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(other, 1)
        os.dup2(other, 2)
        for path in ("/usr/sbin/resize2fs", "/sbin/resize2fs"):
            try:
                os.execv(path, ["resize2fs", device])
            except OSError:
                continue
        os._exit(127)
    os.close(other)
    with os.fdopen(end, encoding="utf-8", errors="replace") as file:
        said = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise worker.Refusal(Code.FAILED, f"resize2fs {device} ended with {code}: {said.strip()[-500:]}")
    facts = os.statvfs(root)
    talk.say(ok=True, bytes=facts.f_blocks * facts.f_frsize)
