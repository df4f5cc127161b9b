"""Runs inside the workspace: holds random bytes in memory and changes some of them when told, for the benchmarks.

    python3 holder.py PORT

One line in, one line out, over TCP: ``grow MIB`` holds that much more, ``change MIB`` overwrites that much of what it holds, and
``drop MIB`` gives that much back. The bytes are random, so that neither compression nor comparison can make a benchmark look
better than it is.
"""

from __future__ import annotations

import io
import socketserver
import sys

MIB = 1 << 20


class Held:
    """The blocks, of one MiB each, and the one to change next."""

    def __init__(self) -> None:
        self.blocks: list[bytearray] = []
        self.turn = 0

    def run(self, command: str, mib: int) -> str:
        for _ in range(mib):
            if command == "grow":
                self.blocks.append(bytearray(MIB))
                self._fill(self.blocks[-1])
            elif command == "change":
                self._fill(self.blocks[self.turn % len(self.blocks)])
                self.turn += 1
            elif command == "drop":
                self.blocks.pop()
        return f"ok {len(self.blocks)}\n"

    @staticmethod
    def _fill(block: bytearray) -> None:
        """In place: copies on the way would stay behind in the heap, and more would change than was asked."""
        with io.FileIO("/dev/urandom") as source:
            filled = 0
            while filled < len(block):
                filled += source.readinto(memoryview(block)[filled:]) or 0


class Handler(socketserver.StreamRequestHandler):
    held = Held()

    def handle(self) -> None:
        for line in self.rfile:
            command, mib = line.split()
            self.wfile.write(self.held.run(command.decode(), int(mib)).encode())


def main() -> None:
    server = socketserver.TCPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
