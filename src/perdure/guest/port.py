"""One virtio-serial port: its descriptor, its mux, and what is half sent.

A port is polled edge-triggered, for while no host is connected it reports a hang-up without end. A read of nothing means just
that: no host; a write then waits. The kernel takes at most 32 KiB per write and may take less.
"""

from __future__ import annotations

import os
import select
import socket
import time

from perdure.guest.loop import EDGE, READ, WRITE
from perdure.wire.guest.frames import ANNOUNCE
from perdure.wire.guest.mux import EventKind, Mux, Role

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.guest.loop import Loop
    from perdure.wire.guest.mux import Event

_SYSFS = "/sys/class/virtio-ports"
#: Decoded at once at most: what a file gets in one go.
_READ_BYTES = 128 * 1024
#: What one port may take of a turn before the other gets its own.
_TURN_BYTES = 256 * 1024
_WRITE_BYTES = 64 * 1024
_NETLINK_KOBJECT_UEVENT = 15


class Port:
    """A channel as the agent sees it. ``mux`` may be fed at any time; ``flush`` is called after every turn."""

    def __init__(self, loop: Loop, fd: int, on_event: Callable[[Event], None], *, ends: bool = False) -> None:
        self.mux = Mux(Role.GUEST)
        self._loop = loop
        self._fd = fd
        self._on_event = on_event
        self._ends = ends  # a socket of a test: nothing to read means that the machine is gone
        self._unsent: memoryview | None = None
        self._stuck = False
        os.set_blocking(fd, False)
        self.mux.announce(ANNOUNCE)
        loop.add(fd, READ | WRITE | EDGE, self._on_ready)
        loop.at_turn_end(self.flush)
        loop.call_soon(self._read)

    def _on_ready(self, mask: int) -> None:
        self._stuck = False
        if mask & ~WRITE:
            self._read()

    def _read(self) -> None:
        taken = 0
        while taken < _TURN_BYTES:
            space = self.mux.space()[:_READ_BYTES]
            size = self._fill(space)
            if size:
                taken += size
                for event in self.mux.received(size):
                    if event.kind == EventKind.SYNC:
                        self._unsent = None  # half a frame of the connection before
                    self._on_event(event)
            if size < len(space):
                return
        self._loop.call_soon(self._read)

    def _fill(self, space: memoryview) -> int:
        """Read until the space is full or the port is empty: a port yields 4 KiB at a time at most."""
        size = 0
        while size < len(space):
            try:
                got = os.readv(self._fd, [space[size:]])
            except BlockingIOError:
                break
            if got == 0:
                if self._ends:
                    self._loop.running = False
                break
            size += got
        return size

    def flush(self) -> None:
        """Send what the mux has, as far as the port takes it."""
        while not self._stuck:
            if self._unsent is None:
                if not self.mux.has_output:
                    return
                self._unsent = memoryview(self.mux.pull(_WRITE_BYTES))
            try:
                sent = os.write(self._fd, self._unsent)
            except BlockingIOError:
                self._stuck = True
                return
            except BrokenPipeError:
                self._loop.running = not self._ends
                return
            self._unsent = self._unsent[sent:] if sent < len(self._unsent) else None


def _device(name: str) -> str | None:
    for entry in os.listdir(_SYSFS) if os.path.isdir(_SYSFS) else ():
        try:
            with open(f"{_SYSFS}/{entry}/name", encoding="ascii") as file:
                found = file.read().strip()
        except OSError:
            continue
        if found == name:
            return f"/dev/{entry}"
    return None


def open_port(name: str, deadline_s: float = 30.0) -> int:
    """Open the port of that name, waiting for the kernel to find it. Raises TimeoutError when it does not come."""
    until = time.monotonic() + deadline_s
    events = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_KOBJECT_UEVENT)
    with events:
        events.bind((0, 1))
        while True:
            device = _device(name)
            if device is not None and os.path.exists(device):
                return os.open(device, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"there is no virtio port {name}")
            if select.select([events], [], [], left)[0]:
                events.recv(65536)
