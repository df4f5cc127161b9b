"""The real agent on this host: namespaces instead of a VM, socket pairs instead of virtio ports.

A ``Port`` behaves like a virtio-serial port: the agent's side never sees a host come or go, bytes that no host read stay for the
next, and a connection can be cut after any number of bytes in either direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from perdure import guest
from perdure.machines.driver import ChannelName

START = Path(guest.__file__).with_name("start.py")
SANDBOX = Path(__file__).with_name("guest_sandbox.py")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def why_not() -> str:
    """Why the agent cannot run here; "" when it can."""
    return "" if os.geteuid() == 0 else "the agent's sandbox needs root: mounts, namespaces and a cgroup"


def cgroup_mount() -> Path | None:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[fields.index("-") + 1] == "cgroup2":
            return Path(fields[4])
    return None


class Port:
    """One port, whose connection can be closed once, after so many more bytes in a direction, whatever connections carry them."""

    def __init__(self) -> None:
        self._near, self.far = socket.socketpair()
        self._near.setblocking(False)
        self._host: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._left: dict[str, int] = {}
        self.was_cut = asyncio.Event()

    def cut(self, direction: str, after: int) -> None:
        self._left[direction] = after
        self.was_cut.clear()

    async def connect(self) -> Streams:
        await self.disconnect()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._host = ours
        self._tasks = [
            asyncio.create_task(self._pass(ours, self._near, "to_guest")),
            asyncio.create_task(self._pass(self._near, ours, "to_host")),
        ]
        return await asyncio.open_connection(sock=theirs)

    async def _pass(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while self._left.get(direction) != 0:
                data = await loop.sock_recv(source, min(self._left.get(direction, 65536), 65536))
                if not data:
                    return
                await loop.sock_sendall(target, data)
                if direction in self._left:
                    self._left[direction] = max(0, self._left[direction] - len(data))
            del self._left[direction]
            self.was_cut.set()
            self._close_host()

    def _close_host(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            with contextlib.suppress(OSError):
                host.shutdown(socket.SHUT_RDWR)
            host.close()

    async def disconnect(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close_host()

    async def close(self) -> None:
        await self.disconnect()
        self._near.close()


class HostAgent:
    """An agent process and its two ports. ``connect`` is what GuestLink wants. ``shared`` are directories of this host that its
    users see too."""

    def __init__(self, skew_ns: int = 0, shared: Sequence[str] = ()) -> None:
        self._skew_ns = skew_ns
        self._shared = shared
        self._process: asyncio.subprocess.Process | None = None
        self.ports: dict[ChannelName, Port] = {}
        self._root = Path(tempfile.mkdtemp(prefix="perdure-agent-"))
        mount = cgroup_mount()
        self._cgroup = mount / f"perdure-test-{os.getpid()}-{self._root.name[-8:]}" if mount is not None else None

    async def start(self) -> None:
        self.ports = {name: Port() for name in ChannelName}
        ends = [self.ports[ChannelName.CONTROL].far, self.ports[ChannelName.DATA].far]
        fds = [end.fileno() for end in ends]
        cgroup = "" if self._cgroup is None else str(self._cgroup / "user")
        if self._cgroup is not None:
            self._cgroup.mkdir()
        arguments = [str(START), str(self._root), cgroup, *map(str, fds), str(self._skew_ns), *self._shared]
        self._process = await asyncio.create_subprocess_exec(sys.executable, "-I", str(SANDBOX), *arguments, pass_fds=fds)
        for end in ends:
            end.close()

    async def connect(self, channel: ChannelName) -> Streams:
        return await self.ports[channel].connect()

    async def agent_pid(self) -> int:
        """The agent's pid on this host: the child of the sandbox's init."""
        assert self._process is not None
        init = await _child(self._process.pid)
        return await _child(init)

    async def stop(self) -> None:
        for port in self.ports.values():
            await port.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await self._process.wait()
        if self._cgroup is not None and self._cgroup.exists():
            self._remove_cgroup()
        shutil.rmtree(self._root, ignore_errors=True)

    def _remove_cgroup(self) -> None:
        assert self._cgroup is not None
        for path, _, _ in os.walk(self._cgroup, topdown=False):
            with contextlib.suppress(OSError):
                Path(path).rmdir()


async def _child(pid: int) -> int:
    """The first child of a process, waiting for it to be born."""
    async with asyncio.timeout(30):
        while True:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if children:
                return int(children[0])
            await asyncio.sleep(0.01)
