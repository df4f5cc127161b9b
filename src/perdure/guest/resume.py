"""``/run/perdure/resume.json``: what a wake kept and what it did not, told inside the workspace before its programs go on.

The host sends what it knows of the report, the agent adds what it finds out. The agent's own thread writes it: ``/run`` is a
tmpfs that init mounted and that the agent sees without what users mounted over it, so nothing of theirs can make this wait.
"""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: As users see it.
PATH = "/run/perdure/resume.json"
_DIRECTORY, _NAME = "perdure", "resume.json"
_ASIDE = ".resume.json.new"
_PLACE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def compose(told: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The report: what the host told, and what is in the agent's answer to the wake so far. Seconds, as in the API."""
    return {
        **told,
        "clock_step_s": answer["clock_step_ns"] / 1e9,
        "connections_dropped": answer["dropped"],
        "execs_running": answer["running"],
        "execs_lost": answer["lost"],
        "problems": [*told.get("problems", ()), *answer["failed"]],
        "hooks": [_hook(run) for run in answer["hooks"]],
    }


def _hook(run: dict[str, Any]) -> dict[str, Any]:
    return {name: run[name] for name in ("name", "outcome", "exit_code")} | {"seconds": run["ms"] / 1000, "output": run["output"]}


def write(root: str, report: dict[str, Any]) -> None:
    """Put the report where users find it, whole or not at all. Raises OSError; then none is there.

    An old one must not stay: it is of another generation, or, after a fork, of another workspace.
    """
    run = os.open(f"{root}/run", _PLACE)
    try:
        try:
            os.mkdir(_DIRECTORY, 0o755, dir_fd=run)
        except FileExistsError:
            pass
        place = os.open(_DIRECTORY, _PLACE, dir_fd=run)
    finally:
        os.close(run)
    try:
        _replace(place, _lines(report).encode())
    except OSError:
        _remove(place, _NAME)
        raise
    finally:
        os.close(place)


def _lines(report: dict[str, Any]) -> str:
    """One field a line. Not by json's ``indent``, which is written in Python: a wake waits for this."""
    fields = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in report.items())
    return "{\n" + fields + "\n}\n"


def _replace(place: int, data: bytes) -> None:
    _remove(place, _ASIDE)
    # O_EXCL: what a user may have put there (a FIFO, say) is never opened.
    fd = os.open(_ASIDE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=place)
    try:
        os.fchmod(fd, 0o644)
        if os.write(fd, data) != len(data):
            raise OSError(28, os.strerror(28), PATH)  # a short write to a tmpfs: it is full
        os.rename(_ASIDE, _NAME, src_dir_fd=place, dst_dir_fd=place)
    except OSError:
        _remove(place, _ASIDE)
        raise
    finally:
        os.close(fd)


def _remove(place: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=place)
    except OSError:
        pass  # nothing there, or something that only its owner may remove; the write then says so
