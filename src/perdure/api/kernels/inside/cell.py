"""Runs in the workspace, once for each request to a Python kernel: hands it to the kernel's keeper and passes on what that says.

Its stdin is two lines: the path of the keeper's socket, and the request. Where no keeper answers it says so, and tries again for
each line ``go``; whoever reads it starts a keeper meanwhile. It lives as long as its cell runs, and is what keeps the workspace
awake for that long; when it is killed, the keeper interrupts the cell.
"""

from __future__ import annotations

import signal
import socket
import sys

ABSENT = b'{"type": "absent"}\n'
CUT = b'{"type": "died", "detail": "What watched over the kernel was killed."}\n'
GO = b"go\n"
#: Ends what a keeper says.
END = b"\n"
#: How long it waits for somebody to start a keeper.
PATIENCE_S = 900


def _say(line: bytes) -> None:
    """Nobody may be listening any more. The cell goes on for all that."""
    try:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    except OSError:
        pass


def _ask(path: str, request: bytes) -> bool:
    """Whether the keeper has answered to the end."""
    with socket.socket(socket.AF_UNIX) as keeper:
        try:
            keeper.connect(path)
            keeper.sendall(request)
        except OSError:
            _say(ABSENT)
            return False
        try:
            for line in keeper.makefile("rb"):
                if line == END:
                    return True
                _say(line)
                if line == ABSENT:
                    return False
        except OSError:
            pass
        _say(CUT)
        return True


def main() -> None:
    stdin = sys.stdin.buffer
    path, request = stdin.readline()[:-1].decode(), stdin.readline()
    signal.alarm(0)  # all of it has come
    while not _ask(path, request):
        signal.alarm(PATIENCE_S)
        if stdin.readline() != GO:
            return
        signal.alarm(0)


if __name__ == "__main__":
    main()
