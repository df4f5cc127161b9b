"""Rare work that may block, done by a child that is forked for it. (Files have workers that stay: see ``hands``.)

The agent has one thread and must answer a wake within milliseconds, so it never touches the user's disk itself: a child is
forked, changes its root to the user's (so that links and ``..`` cannot lead outside), and does it. It talks over a packet
socket, one JSON object a packet. It dies with the agent, and a worker that hangs hurts nobody else.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys

from perdure.guest import linux
from perdure.guest.loop import READ
from perdure.wire.guest.ops import Code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from perdure.guest.loop import Loop

_PACKET = 65536
_FD_LIMIT = 1 << 20

_CODES = {
    errno.ENOENT: Code.NOT_FOUND,
    errno.ENXIO: Code.NOT_FOUND,
    errno.EEXIST: Code.EXISTS,
    errno.ENOTEMPTY: Code.CONFLICT,
    errno.EBUSY: Code.CONFLICT,
    errno.EXDEV: Code.CONFLICT,
    errno.EACCES: Code.FORBIDDEN,
    errno.EPERM: Code.FORBIDDEN,
    errno.EROFS: Code.FORBIDDEN,
    errno.ENOSPC: Code.NO_SPACE,
    errno.EDQUOT: Code.NO_SPACE,
    errno.ENOTDIR: Code.INVALID,
    errno.EISDIR: Code.INVALID,
    errno.ELOOP: Code.INVALID,
    errno.EINVAL: Code.INVALID,
    errno.ENAMETOOLONG: Code.INVALID,
}


class Refusal(Exception):
    """What a worker cannot do, with a code of the wire and one sentence."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def refusal_of(error: OSError, subject: str) -> Refusal:
    """The wire's view of a failed system call on ``subject`` (a path as the caller gave it)."""
    code = _CODES.get(error.errno or 0, Code.FAILED)
    reason = error.strerror or str(error)
    return Refusal(code, f"{subject}: {reason[:1].lower()}{reason[1:]}.")


class Talk:
    """The child's end of the packet socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def say(self, **fields: Any) -> None:
        self._end.send(json.dumps(fields).encode())


class Worker:
    """A running child. ``on_message`` gets its objects in order, and None exactly once when it is gone."""

    def __init__(self, loop: Loop, pid: int, end: socket.socket, on_message: Callable[[dict[str, Any] | None], None]) -> None:
        self._loop = loop
        self._pid = pid
        self._end = end
        self._on_message = on_message
        self._pidfd = os.pidfd_open(pid)
        end.setblocking(False)
        loop.add(end.fileno(), READ, self._on_ready)
        loop.add(self._pidfd, READ, self._on_exit)

    def _on_ready(self, _mask: int) -> None:
        try:
            packet = self._end.recv(_PACKET)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet:
            self._on_message(json.loads(packet))
            return
        self._loop.remove(self._end.fileno())
        self._end.close()
        self._on_message(None)

    def _on_exit(self, _mask: int) -> None:
        self._loop.remove(self._pidfd)
        os.close(self._pidfd)
        os.waitpid(self._pid, 0)


def start(
    loop: Loop,
    root: str,
    work: Callable[[Talk], None],
    on_message: Callable[[dict[str, Any] | None], None],
) -> Worker:
    """Fork a worker that runs ``work`` inside ``root`` ("" for the agent's own)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        _child(root, work, theirs)
    theirs.close()
    return Worker(loop, pid, ours, on_message)


def _child(root: str, work: Callable[[Talk], None], end: socket.socket) -> None:
    talk = Talk(end)
    try:
        linux.die_with_parent()
        close_all_but((end.fileno(),))
        if root:
            os.chroot(root)
            os.chdir("/")
        work(talk)
    except Refusal as refusal:
        _last_word(talk, refusal)
    except OSError as error:
        _last_word(talk, refusal_of(error, str(error.filename or "file")))
    except Exception as error:  # noqa: BLE001 - the top of a process: it must end here and say why
        sys.stderr.write(f"worker: {error!r}\n")
        _last_word(talk, Refusal(Code.FAILED, f"The agent failed at this: {error!r}."))
    finally:
        os._exit(0)


def _last_word(talk: Talk, refusal: Refusal) -> None:
    try:
        talk.say(code=refusal.code, message=refusal.message)
    except OSError:
        pass  # nobody waits for it


def close_all_but(keep: tuple[int, ...]) -> None:
    """Close every descriptor above 2 but these: ports and pipes of others must not stay open in a child."""
    low = 3
    for fd in sorted(keep):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, _FD_LIMIT)
