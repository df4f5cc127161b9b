"""Runs a command that does not outlive the worker: ``python launch.py COMMAND…``. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """The kernel kills this process when the one that started it dies, however that dies; prctl(2)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(argv: list[str]) -> int:
    die_with_parent()
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - the command is the operator's own
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
