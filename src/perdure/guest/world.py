"""The users' world: its root, its PID and mount namespaces, its cgroup.

Every user process lives in one cgroup, ``user``, with a child group per command: frozen as a whole for a capture, killed by
command. All share a PID and a mount namespace of their own, whose process 1 is a small reaper of ours that outlives the agent:
an agent that starts again finds it and enters its namespaces, so a dead agent costs users nothing but the pipes it held.

None leaves its group, not even as root: each command, and the reaper in a group beside them, has a cgroup namespace whose root
is its group, and the kernel (mounted with ``nsdelegate``) lets nobody move what it does not see. No namespace that a user can
enter is rooted at ``user`` or above, and no mount in the users' namespace shows what is there.

A wake's hooks run while ``user`` is frozen, each in a group below ``user-hooks``, in the same namespaces. What one leaves running
is moved into a group below ``user``, so that nothing of the users' is ever outside of it between two wakes.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

from perdure.guest import linux, worker
from perdure.guest.forker import Forker
from perdure.guest.loop import READ, URGENT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from perdure.guest.loop import Loop, Timer

_REAPER_NAME = "perdure-init"
_REAPER_GROUP = "perdure.init"  # no command's id has a dot
_HOOK_GROUP = "perdure.hook."
_ADOPT_TRIES = 8
_CGROUPS = "/sys/fs/cgroup"


def write_file(path: str, text: str) -> None:
    """Write to a kernel file in one call."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def read_file(path: str) -> str:
    """The text of a small kernel file; "" when it is not there."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _cpu_us(group: str) -> int:
    for line in read_file(f"{group}/cpu.stat").splitlines():
        if line.startswith("usage_usec "):
            return int(line.split()[1])
    return 0


class Group:
    """The processes of one command: a cgroup, or (without cgroup2) a process group."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.leader = 0  # pid of the command itself, as the agent sees it
        if path is not None:
            os.makedirs(path, exist_ok=True)

    def pids(self) -> list[int]:
        if self.path is None:
            return [self.leader] if self.leader else []
        listed = "".join(read_file(f"{path}/cgroup.procs") for path in self._tree())
        return [int(line) for line in listed.split() if line != "0"]

    def _tree(self) -> list[str]:
        """The group and those that its processes made below it, the deepest first."""
        return [path for path, _, _ in os.walk(self.path or "", topdown=False)]

    def signal(self, number: int) -> None:
        """Send a signal to every process in it."""
        if self.path is None:
            self._signal_session(number)
            return
        for pid in self.pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def kill(self) -> None:
        """SIGKILL to all at once; new ones cannot escape by forking."""
        if self.path is None:
            self._signal_session(signal.SIGKILL)
            return
        try:
            write_file(f"{self.path}/cgroup.kill", "1")
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):  # removed: nobody was left
                raise

    def _signal_session(self, number: int) -> None:
        try:
            os.killpg(self.leader, number)
        except (ProcessLookupError, PermissionError):
            pass

    def remove(self) -> bool:
        """Remove the cgroup; False while processes are left in it."""
        if self.path is None:
            return True
        try:
            os.rmdir(self.path)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        else:
            return True
        if "populated 1" in read_file(f"{self.path}/cgroup.events"):
            return False
        try:
            for path in self._tree():
                os.rmdir(path)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True


class World:
    """Where users' processes live. ``on_halt`` is called when their process 1 has ended; True: they asked for a power-off."""

    def __init__(self, loop: Loop, root: str, cgroup: str | None, run_dir: str, on_halt: Callable[[bool], None]) -> None:
        self.root = root
        self._loop = loop
        self._cgroup = cgroup
        self.run_dir = run_dir
        self._on_halt = on_halt
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self.view = root
        """The root as users see it, with what they mounted: for work on their files."""
        self.is_held = False
        """Users' processes have been told to stand still: nobody starts another by himself."""
        self.on_thaw: Callable[[], None] = lambda: None
        self._oom_kills_seen = 0
        self._hooks: list[Group] = []  # groups beside the users' own, while somebody is in them
        self._adopted: list[Group] = []  # what hooks left running, now among the users' own

    def start(self) -> list[str]:
        """Make or find cgroup and namespace. Returns the names of command groups that an earlier agent left behind.

        What is frozen stays so: a wake thaws, after its repairs.
        """
        left = []
        if self._cgroup is not None:
            os.makedirs(self._cgroup, exist_ok=True)
            self._enable_controllers()
            os.makedirs(f"{self._cgroup}/{_REAPER_GROUP}", exist_ok=True)
            left = [entry.name for entry in os.scandir(self._cgroup) if entry.is_dir() and "." not in entry.name]
        self._enter_namespaces()
        return left

    def _enable_controllers(self) -> None:
        parent = os.path.dirname(self._cgroup or "")
        for controller in ("memory", "pids", "cpu"):
            try:
                write_file(f"{parent}/cgroup.subtree_control", f"+{controller}")
            except OSError:
                continue  # a kernel or a test host without it; only the OOM verdict needs one

    # ------------------------------------------------------------------------------------------------ namespaces

    def _enter_namespaces(self) -> None:
        os.makedirs(self.run_dir, exist_ok=True)
        record = f"{self.run_dir}/user-init"
        pid = int(read_file(record) or 0)
        if not pid or read_file(f"/proc/{pid}/comm").strip() != _REAPER_NAME:
            pid = self._start_reaper()
            with open(record, "w", encoding="ascii") as file:
                file.write(str(pid))
        self.view = f"/proc/{pid}/root"
        self._forker = Forker(*(os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("pid", "mnt")))
        reaper = os.pidfd_open(pid)
        self._loop.add(reaper, READ, lambda _mask: self._on_reaper_ended(pid, reaper))

    def _on_reaper_ended(self, pid: int, reaper: int) -> None:
        """reboot(2) in a PID namespace kills its process 1, which ends with SIGINT for a power-off and SIGHUP for a restart.

        Every process of the users has ended with it, and no new one can be born there.
        """
        self._loop.remove(reaper)
        os.close(reaper)
        try:
            _, status = os.waitpid(pid, 0)
        except ChildProcessError:  # an earlier agent's child: why it ended is not known
            status = 0
        self._on_halt(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGINT)

    def _start_reaper(self) -> int:
        ready, done = os.pipe()
        linux.unshare(linux.CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            self._reap_forever(done)
        linux.setns(self._own_pids, linux.CLONE_NEWPID)
        os.close(done)
        told = os.read(ready, 1)  # it is named, confined, and /proc is mounted
        os.close(ready)
        if not told:
            raise OSError(errno.ECHILD, "the users' process 1 ended at once", _REAPER_NAME)
        return pid

    def _reap_forever(self, done: int) -> None:
        """Process 1 of the users. With SIGCHLD ignored the kernel reaps orphans by itself."""
        try:
            os.setsid()
            linux.set_name(_REAPER_NAME)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            self._confine()
        except OSError as error:
            sys.stderr.write(f"user init: {error}\n")
            os._exit(1)
        worker.close_all_but((done,))
        os.write(done, b"1")
        os.close(done)
        while True:
            signal.pause()

    def _confine(self) -> None:
        """In the reaper: make the users' root and what of the kernel they see."""
        kinds = linux.CLONE_NEWNS
        if self._cgroup is not None:
            write_file(f"{self._cgroup}/{_REAPER_GROUP}/cgroup.procs", "0")
            kinds |= linux.CLONE_NEWCGROUP  # its root is the group that the process is in
        linux.unshare(kinds)
        linux.become_root(self.root)
        for place in ("/proc", _CGROUPS):
            linux.unmount_all(place)  # below ours, the agent's could be dug out
        if os.path.isdir("/proc"):
            linux.mount("proc", "/proc", "proc")
        if self._cgroup is not None and os.path.isdir(_CGROUPS):
            flags = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
            linux.mount("cgroup2", _CGROUPS, "cgroup2", flags)

    # ------------------------------------------------------------------------------------------------ processes

    def group(self, name: str) -> Group:
        return Group(None if self._cgroup is None else f"{self._cgroup}/{name}")

    def hook_group(self, name: str) -> Group:
        """A group beside the users' own: a wake's hooks run while that is frozen."""
        group = Group(None if self._cgroup is None else f"{self._cgroup}-hooks/{name}")
        self._hooks.append(group)
        return group

    def adopt(self, group: Group, name: str) -> None:
        """A hook is over: move what it left running to the users' other processes, which a capture freezes as a whole."""
        if group.path is None or not group.pids():
            self.drop_hooks()
            return
        into = self.group(f"{_HOOK_GROUP}{name}")
        self._adopted.append(into)
        for _ in range(_ADOPT_TRIES):  # it may fork meanwhile
            for pid in group.pids():
                try:
                    write_file(f"{into.path}/cgroup.procs", str(pid))
                except OSError:
                    continue  # it has ended
            if not group.pids():
                break
        else:
            group.kill()
        self.drop_hooks()

    def drop_hooks(self) -> None:
        """Remove the groups of hooks in which nobody is left."""
        self._hooks = [group for group in self._hooks if not group.remove()]
        self._adopted = [group for group in self._adopted if not group.remove()]

    def launch(self, group: Group, spec: dict[str, Any], environment: dict[str, str], fds: list[int]) -> tuple[int, int]:
        """Start a command in the users' PID namespace and the group, with streams and status pipe ``fds``: (pid, pidfd)."""
        pid, pidfd = self._forker.launch(spec, environment, group.path, fds)
        group.leader = pid
        return pid, pidfd

    def oom_kills(self) -> int:
        """How often the kernel killed a user process for memory, since boot."""
        for line in read_file(f"{self._cgroup}/memory.events").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

    def cpu_us(self) -> int:
        """CPU time of all user processes since boot, their process 1 included, in microseconds."""
        return _cpu_us(f"{self._cgroup}")

    def work_us(self) -> int:
        """CPU time of the groups in which users' processes are, in microseconds: the same at two instants if nothing of theirs
        ran between. Their process 1 is left out, for it only waits, and each thaw has it run a little."""
        if self._cgroup is None:
            return 0
        return sum(_cpu_us(entry.path) for entry in os.scandir(self._cgroup) if entry.is_dir() and entry.name != _REAPER_GROUP)

    # --------------------------------------------------------------------------------------------------- freeze

    def is_frozen(self) -> bool:
        if self._hooks:
            self.drop_hooks()  # one that was killed and hung in the kernel; while it does, not everybody stands still
        return not self._hooks and "frozen 1" in read_file(f"{self._cgroup}/cgroup.events")

    def freeze(self, deadline_s: float, done: Callable[[bool], None]) -> None:
        """Ask every user process to stand still; call back with True when all do, with False at the deadline.

        After False the request stands: they freeze as soon as they can, until ``thaw``.
        """
        self.is_held = True
        if self._cgroup is None:
            done(False)
            return
        write_file(f"{self._cgroup}/cgroup.freeze", "1")
        if self.is_frozen():
            done(True)
            return
        fd = os.open(f"{self._cgroup}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        os.read(fd, 4096)  # arms the notification

        def finish(frozen: bool) -> None:
            timer.cancel()
            self._loop.remove(fd)
            os.close(fd)
            done(frozen)

        def changed(_mask: int) -> None:
            os.lseek(fd, 0, os.SEEK_SET)
            if b"frozen 1" in os.read(fd, 4096):
                finish(self.is_frozen())

        timer: Timer = self._loop.call_later(deadline_s, lambda: finish(self.is_frozen()))
        self._loop.add(fd, URGENT, changed)
        if self.is_frozen():  # it became so before anybody watched
            finish(True)

    def thaw(self) -> None:
        if self._cgroup is not None:
            write_file(f"{self._cgroup}/cgroup.freeze", "0")
        self.is_held = False
        self.on_thaw()
