"""Paths that must stay below a directory: walked name by name, each from a descriptor of the one before.

A link on the way is read and its words are walked like those of the path, so that one that leads out is refused wherever it
stands, and nothing that changes the tree meanwhile can lead the walk elsewhere: no step resolves more than one name. (The
kernel's openat2(2) with RESOLVE_BENEATH would do the same for opening, but not for making, renaming and removing.)
"""

from __future__ import annotations

import errno
import os
import stat

from perdure.guest.worker import Refusal
from perdure.wire.guest.ops import Code

_LINKS_MAX = 40
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def enter(root: str, path: str, *, follow: bool, make: bool = False) -> str:
    """Change into the directory that holds what ``path`` below ``root`` names; returns its name there, "." for ``root`` itself.

    With ``follow`` the name is not that of a link; with ``make`` directories on the way are made. The caller opens the name with
    O_NOFOLLOW where a link must not be followed. Raises Refusal for a path that leads out.
    """
    fds = [os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        name = _walk(fds, path, follow, make)
        os.fchdir(fds[-1])
        return name
    finally:
        for fd in fds:
            os.close(fd)


def _names(path: str) -> list[str]:
    """What is to be walked, the first name last."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _walk(fds: list[int], path: str, follow: bool, make: bool) -> str:
    todo, links = _names(path), 0
    while todo:
        name = todo.pop()
        if name == "..":
            if len(fds) == 1:
                raise Refusal(Code.ESCAPE, f"{path}: leads out of its root.")
            os.close(fds.pop())
            continue
        try:
            is_link = stat.S_ISLNK(os.lstat(name, dir_fd=fds[-1]).st_mode)
        except FileNotFoundError:
            if not todo:
                return name
            if not make:
                raise
            os.mkdir(name, 0o755, dir_fd=fds[-1])
            is_link = False
        if is_link and (todo or follow):
            links += 1
            todo += _names(_target(path, name, fds[-1], links))
        elif todo:
            fds.append(os.open(name, _STEP, dir_fd=fds[-1]))
        else:
            return name
    return "."


def _target(path: str, name: str, directory: int, links: int) -> str:
    target = os.readlink(name, dir_fd=directory)
    if target.startswith("/"):
        raise Refusal(Code.ESCAPE, f"{path}: the link {name} leads out of its root.")
    if links > _LINKS_MAX:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return target
