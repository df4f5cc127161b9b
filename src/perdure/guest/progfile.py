"""What names the workspace's program: a file on the users' disk, written by the host, by a recipe, or by hand."""

from __future__ import annotations

import json
import math
import os
import stat

from perdure.guest import hooks
from perdure.wire.guest.ops import PROGRAM_FILE, PROGRAM_FILE_BYTES, PROGRAM_PORT, PROGRAM_STOP_GRACE_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from perdure.guest.worker import Talk

POLICIES = ("always", "on-failure", "never")


def may_exist(root: str) -> bool:
    """Whether a program may be named: a look at three directory entries, see ``hooks.may_exist``."""
    path = root
    for part in PROGRAM_FILE.split("/")[1:]:
        path = f"{path}/{part}"
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            return False
        if stat.S_ISLNK(mode):
            return True
    return True


def read(talk: Talk) -> None:
    """In a worker inside the users' root: say what the file names, or why it names nothing."""
    try:
        fd = os.open(PROGRAM_FILE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        talk.say(program=None, problem="")
        return
    try:
        facts = os.fstat(fd)
        why = hooks.untrusted(os.stat(os.path.dirname(PROGRAM_FILE)), "its directory") or hooks.untrusted(facts, "the file")
        if not stat.S_ISREG(facts.st_mode):
            why = "It is not a regular file."
        text = b"" if why else os.read(fd, PROGRAM_FILE_BYTES + 1)
    finally:
        os.close(fd)
    program, problem = (None, why) if why else understand(text)
    talk.say(program=program, problem=f"{PROGRAM_FILE}: {problem}" if problem else "")


def understand(text: bytes) -> tuple[dict[str, Any] | None, str]:
    """(the program, "") or (None, why not). People may have written the file."""
    if len(text) > PROGRAM_FILE_BYTES:
        return None, f"It has more than {PROGRAM_FILE_BYTES} bytes."
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return None, "It is not JSON."
    if not isinstance(given, dict):
        return None, "It is not a JSON object."
    program = {
        "argv": given.get("argv"),
        "env": given.get("env") or {},
        "cwd": given.get("cwd"),
        "user": given.get("user"),
        "port": given.get("port", PROGRAM_PORT),
        "restart": given.get("restart", POLICIES[0]),
        "stop_grace_s": given.get("stop_grace_s", PROGRAM_STOP_GRACE_S),
    }
    wrong = [name for name, is_right in _RIGHT.items() if not is_right(program[name])]
    if wrong:
        return None, f"Its {wrong[0]!r} is missing or cannot be that."
    if len(json.dumps(program)) > PROGRAM_FILE_BYTES:
        return None, f"It needs more than {PROGRAM_FILE_BYTES} bytes."
    return program, ""


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_variable(name: str, value: object) -> bool:
    return name != "" and "=" not in name and "\0" not in name and _is_text(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_RIGHT: dict[str, Callable[[Any], bool]] = {
    "argv": lambda value: isinstance(value, list) and bool(value) and all(map(_is_text, value)) and value[0] != "",
    "env": lambda value: isinstance(value, dict) and all(_is_variable(name, text) for name, text in value.items()),
    "cwd": lambda value: value is None or _is_text(value),
    "user": lambda value: value is None or _is_text(value),
    "port": lambda value: type(value) is int and 1 <= value <= 65535,
    "restart": lambda value: value in POLICIES,
    "stop_grace_s": lambda value: _is_number(value) and 0 <= value <= 3600,
}
