"""Starting a command: what happens in the child between fork and exec.

The child enters the users' mount namespace first and looks up users there, so that what it reads is what the workspace means.
Born inside its cgroup, it makes that the root of a cgroup namespace: with ``nsdelegate`` it can then neither leave the group nor
write its limits, by whatever mount it reaches them; groups below are its own. It reports
through a pipe that closes at exec: its pid as its own namespace sees it, and, when it cannot start, one JSON object that says
why.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import struct

from perdure.guest import linux
from perdure.wire.guest.ops import Op

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

PID = struct.Struct("<i")
#: Python ignores the last two, and whoever started the agent may have ignored the others: a command would inherit that.
_USUAL = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ)
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NOT_FOUND = 127
NOT_EXECUTABLE = 126
_TTY_GROUP = 5  # on every Linux, and what devpts is mounted with


class CannotStart(Exception):
    """Why a command does not start: a shell's exit code and a sentence."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class Account:
    """Who a command runs as."""

    __slots__ = ("gid", "groups", "home", "name", "shell", "uid")

    def __init__(self, name: str, uid: int, gid: int, home: str, shell: str) -> None:
        self.name = name
        self.uid = uid
        self.gid = gid
        self.home = home
        self.shell = shell
        self.groups = [gid]


def rows(path: str) -> list[list[str]]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return [line.rstrip("\n").split(":") for line in file]
    except OSError:
        return []


def find_account(user: str | None, etc: str = "/etc") -> Account:
    """The account of a name, a ``uid`` or a ``uid:gid``; root when None. Raises CannotStart for an unknown name."""
    if user is None:
        user = "0"
    number, _, group = user.partition(":")
    found = [row for row in rows(f"{etc}/passwd") if len(row) >= 7 and row[2].isdecimal() and row[3].isdecimal()]
    row = next((row for row in found if number in (row[0], row[2])), None)
    if row is not None:
        account = Account(row[0], int(row[2]), int(row[3]), row[5] or "/", row[6] or "/bin/sh")
    elif number.isdecimal():
        home = "/root" if number == "0" else "/"
        account = Account("root" if number == "0" else number, int(number), int(group or number), home, "/bin/sh")
    else:
        raise CannotStart(NOT_EXECUTABLE, f"There is no user {user!r} in the workspace's /etc/passwd.")
    if group:
        if not group.isdecimal():
            raise CannotStart(NOT_EXECUTABLE, f"The group in user {user!r} is not a number.")
        account.gid = int(group)
        account.groups = [account.gid]
        return account
    members = (row for row in rows(f"{etc}/group") if len(row) >= 4 and row[2].isdecimal())
    account.groups += [int(row[2]) for row in members if account.name in row[3].split(",") and int(row[2]) != account.gid]
    return account


def become(world: int, request: dict[str, Any], status: int) -> NoReturn:
    """In the child: turn into the command of a forker's request. Never returns; failures go to ``status``.

    ``world`` is the users' mount namespace. A child born inside a cgroup is confined to it.
    """
    try:
        os.write(status, PID.pack(os.getpid()))
        _enter(world, request["cgroup"] is not None, on_terminal=request["spec"].get("op") == Op.PTY)
        _execute(request["spec"], request["environment"])
    except CannotStart as cannot:
        _tell(status, cannot.code, cannot.detail)
    except (OSError, ValueError, UnicodeError) as error:
        _tell(status, NOT_EXECUTABLE, f"The command cannot be started: {error}.")
    finally:
        os._exit(NOT_FOUND)


def _tell(status: int, code: int, detail: str) -> None:
    os.write(status, json.dumps({"code": code, "detail": detail[:2000]}).encode())


def _enter(world: int, grouped: bool, *, on_terminal: bool) -> None:
    os.setsid()
    if on_terminal:
        linux.take_terminal(0)
    _ordinary_oom_score()
    for number in _USUAL:
        signal.signal(number, signal.SIG_DFL)
    if grouped:
        linux.unshare(linux.CLONE_NEWCGROUP)
    linux.setns(world, linux.CLONE_NEWNS)  # root and working directory become its root
    os.umask(0o022)


def _execute(spec: dict[str, Any], environment: dict[str, str]) -> None:
    account = find_account(spec.get("user"))
    env = {**environment, "HOME": account.home, "USER": account.name, "LOGNAME": account.name, "SHELL": account.shell}
    if spec.get("trace"):
        env["TRACEPARENT"] = spec["trace"]
    shell = spec.get("shell")
    is_terminal = spec.get("op") == Op.PTY
    if is_terminal:
        env["TERM"] = "xterm-256color"
        os.fchown(0, account.uid, _TTY_GROUP)  # programs open it again by its name
    env.update(spec.get("env") or {})
    os.setgroups(account.groups)
    os.setgid(account.gid)
    os.setuid(account.uid)
    _change_directory(spec.get("cwd"), account.home)
    if is_terminal and shell is None and spec.get("argv") is None:
        _log_in(account.shell, env)
    if shell is not None:
        for path in ("/bin/bash", "/usr/bin/bash", "/bin/sh"):
            _try_exec(path, [os.path.basename(path), "-c", shell], env)
        raise CannotStart(NOT_FOUND, "The workspace has no shell: neither /bin/bash nor /bin/sh can be executed.")
    _exec_found(list(spec["argv"]), env)


def _log_in(shell: str, env: dict[str, str]) -> None:
    for path in (shell, "/bin/bash", "/bin/sh"):
        _try_exec(path, [f"-{os.path.basename(path)}"], env)  # the dash is how a shell knows that it is a login
    raise CannotStart(NOT_FOUND, f"The workspace has no shell: neither {shell} nor /bin/sh can be executed.")


def _ordinary_oom_score() -> None:
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    os.write(fd, b"0")
    os.close(fd)


def _change_directory(cwd: str | None, home: str) -> None:
    if cwd is None:
        try:
            os.chdir(home)
        except OSError:
            os.chdir("/")
        return
    try:
        os.chdir(cwd)
    except OSError as error:
        reason = (error.strerror or "unknown error").lower()
        raise CannotStart(NOT_EXECUTABLE, f"The working directory {cwd!r} cannot be entered: {reason}.") from error


def _try_exec(path: str, argv: list[str], env: dict[str, str]) -> int:
    """Execute, or return the errno of why not. A file without ``#!`` runs under sh, as every shell does it."""
    try:
        os.execve(path, argv, env)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            return error.errno or 0
    try:
        os.execve("/bin/sh", ["sh", path, *argv[1:]], env)
    except OSError:
        return errno.ENOEXEC


def _exec_found(argv: list[str], env: dict[str, str]) -> None:
    name = argv[0]
    path = env.get("PATH", DEFAULT_PATH).split(":")
    places = [name] if "/" in name else [f"{place or '.'}/{name}" for place in path]
    seen = errno.ENOENT
    for place in places:
        why = _try_exec(place, argv, env)
        if why not in (errno.ENOENT, errno.ENOTDIR):
            seen = why
    if seen == errno.ENOENT and "/" in name and os.path.exists(name):
        raise CannotStart(NOT_FOUND, f"{name!r} exists, but its interpreter or loader does not.")
    if seen == errno.ENOENT:
        raise CannotStart(NOT_FOUND, f"There is no command {name!r} in the workspace.")
    raise CannotStart(NOT_EXECUTABLE, f"{name!r} cannot be executed: {os.strerror(seen).lower()}.")
