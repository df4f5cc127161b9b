"""The forker: a small process of one thread that forks users' commands for the agent.

The agent has threads (``hands``), and a process that has them can only be forked by C code that knows the interpreter: a command
must be born inside its cgroup, for which Python has no call. So the forker does it, and lets the child be the agent's own
(CLONE_PARENT), which waits for it as for any other. It is forked before the first thread, holds little memory, and dies with
the agent; when it dies alone, another takes its place.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import struct
import sys

from perdure.guest import launch, linux
from perdure.guest.worker import close_all_but

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_PACKET = 512 * 1024
_FDS = struct.Struct("4i")
_PID = struct.Struct("i")


class Forker:
    """The agent's side."""

    def __init__(self, pids: int, mounts: int) -> None:
        self._pids = pids  # the users' namespaces
        self._mounts = mounts
        self._end = self._start()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PACKET)
        self._pid = os.fork()
        if self._pid == 0:
            _live(theirs, self._pids, self._mounts)
        theirs.close()
        return ours

    def launch(self, spec: dict[str, Any], environment: dict[str, str], cgroup: str | None, fds: list[int]) -> tuple[int, int]:
        """Start a command; ``fds`` are its standard streams and where it tells how it went. Returns (pid, pidfd)."""
        request = json.dumps({"spec": spec, "environment": environment, "cgroup": cgroup}).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FDS.pack(*fds))]
        for _ in range(2):
            try:
                self._end.sendmsg([request], rights)
                answer, received, _, _ = self._end.recvmsg(4096, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
            except (BrokenPipeError, ConnectionResetError):
                answer, received = b"", []
            if received:
                return int(_PID.unpack(answer)[0]), int(_PID.unpack(received[0][2])[0])
            if answer:
                number, name = json.loads(answer)
                raise OSError(number, os.strerror(number), name)
            self._end.close()
            os.waitpid(self._pid, 0)
            self._end = self._start()
        raise OSError(0, "the forker ended", "fork")


def _live(end: socket.socket, pids: int, mounts: int) -> NoReturn:
    try:
        gc.freeze()
        gc.disable()
        linux.die_with_parent()
        linux.set_name("perdure-forker")
        close_all_but((end.fileno(), pids, mounts))
        linux.setns(pids, linux.CLONE_NEWPID)
        while True:
            packet, rights, _, _ = end.recvmsg(_PACKET, socket.CMSG_SPACE(_FDS.size), socket.MSG_CMSG_CLOEXEC)
            if not packet:
                break
            _serve(end, mounts, json.loads(packet), _FDS.unpack(rights[0][2]))
    except Exception as error:  # noqa: BLE001 - the top of a process: it must end here and say why
        sys.stderr.write(f"forker: {error!r}\n")
    finally:
        os._exit(0)


def _serve(end: socket.socket, mounts: int, request: dict[str, Any], fds: tuple[int, ...]) -> None:
    try:
        pid, pidfd = _fork(request["cgroup"])
    except OSError as error:
        end.send(json.dumps([error.errno, error.filename]).encode())
    else:
        if pid == 0:
            _become(mounts, request, fds)
        end.sendmsg([_PID.pack(pid)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _PID.pack(pidfd))])
        os.close(pidfd)
    for fd in fds:
        os.close(fd)


def _fork(cgroup: str | None) -> tuple[int, int]:
    if cgroup is None:
        return linux.fork_for_parent(None)
    fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return linux.fork_for_parent(fd)
    finally:
        os.close(fd)


def _become(mounts: int, request: dict[str, Any], fds: tuple[int, ...]) -> NoReturn:
    for target, fd in enumerate(fds[:3]):
        os.dup2(fd, target)
    launch.become(mounts, request, fds[3])
