"""Runs in the workspace, once for each request to a Python kernel: hands it to the kernel's keeper and passes on what that says.

Its stdin is two lines: the path of the keeper's socket, and the request. Where no keeper answers it says so, once; whoever reads
it starts a keeper, and it tries again when it gets anything more to read, and from time to time, for its reader may have left. It
gives up at the end of stdin. It lives as long as its cell runs, and is what keeps the workspace awake for that long; when it is
killed, the keeper interrupts the cell.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys

ABSENT = b'{"type": "absent"}\n'
CUT = b'{"type": "died", "detail": "What watched over the kernel was killed."}\n'
#: Ends what a keeper says.
END = b"\n"
#: How long it waits for somebody to start a keeper, and how often it looks.
PATIENCE_S = 900
EVERY_S = 1.0


def _say(line: bytes) -> None:
    """Nobody may be listening any more. The cell goes on for all that."""
    try:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    except OSError:
        pass


def _ask(path: str, request: bytes) -> bool | None:
    """Whether the keeper has answered to the end; None: it has told to look for another one."""
    with socket.socket(socket.AF_UNIX) as keeper:
        try:
            keeper.connect(path)
            keeper.sendall(request)
        except OSError:
            return False
        signal.alarm(0)
        try:
            for line in keeper.makefile("rb"):
                if line == END:
                    return True
                if line == ABSENT:
                    return None
                _say(line)
        except OSError:
            pass
        _say(CUT)
        return True


def _wait() -> bool:
    """Until it is worth another try; False: nobody will start a keeper."""
    ready, _, _ = select.select([0], [], [], EVERY_S)
    return not ready or os.read(0, 16) != b""


def main() -> None:
    stdin = sys.stdin.buffer
    path, request = stdin.readline()[:-1].decode(), stdin.readline()
    signal.alarm(0)  # all of it has come
    has_told = False
    while not (answer := _ask(path, request)):
        if answer is None or not has_told:
            _say(ABSENT)
            signal.alarm(PATIENCE_S)
            has_told = True
        if not _wait():
            return


if __name__ == "__main__":
    main()
