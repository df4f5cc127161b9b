"""VMM processes: started from the main thread, ended through pidfds, their stderr read and bounded.

The parent-death signal that ends a VMM with its server fires when the *thread* that spawned it ends, so a VMM is spawned from
the main thread only, which is the event loop's. This is the one module of the machine layer that starts processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence

from perdure.core.errors import DeadlineExceeded, HostUnfit

#: Seconds a process may take to vanish after SIGKILL.
KILL_DEADLINE_S = 20.0
#: Seconds a jailer may take to follow its VMM before it is killed, too.
JAILER_DEADLINE_S = 5.0


class Tail:
    """Reads a pipe or socket of the VMM until its end and keeps the last bytes."""

    def __init__(self, fd: int, limit: int) -> None:
        """Takes ownership of ``fd``; ``limit`` in bytes."""
        os.set_blocking(fd, False)
        self._fd: int | None = fd
        self._limit = limit
        self._kept = bytearray()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(fd, self._on_readable)

    def text(self) -> str:
        """What is kept, made printable; control characters of a guest never reach a terminal."""
        decoded = self._kept.decode("utf-8", "replace")
        return "".join(
            c if c.isprintable() or c in "\n\t" else "" if c == "\r" else "\N{REPLACEMENT CHARACTER}" for c in decoded
        ).strip()

    def _on_readable(self) -> bool:
        """Whether there was something."""
        if self._fd is None:
            return False
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return False
        except OSError:
            data = b""  # a reset connection is an end like any other
        if not data:
            self.close()
            return False
        self._kept += data
        if len(self._kept) > self._limit:
            del self._kept[: -self._limit]
        return True

    def drain(self) -> None:
        """Read what has arrived and was not yet noticed."""
        for _ in range(64):  # a writer that never stops must not keep us
            if not self._on_readable():
                return

    def close(self) -> None:
        """Stop reading. Safe twice."""
        if self._fd is None:
            return
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = None
        if not self.ended.done():
            self.ended.set_result(None)


class Watched:
    """A process known by pid and pidfd, its own child or not; ``exited`` is done when it is gone."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError when there is no such process."""
        self.pid = pid
        self._pidfd: int | None = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._on_exit)

    def is_alive(self) -> bool:
        """Asks the kernel, so the answer is not older than the call. Any thread may ask."""
        pidfd = self._pidfd
        if pidfd is None:
            return False
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return not poller.poll(0)

    def kill(self) -> None:
        """SIGKILL; does nothing to a process that is gone, and never hits another one that took its number."""
        if self._pidfd is not None:
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                self._on_exit()

    def _on_exit(self) -> None:
        if self._pidfd is None:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = None
        if not self.exited.done():
            self.exited.set_result(None)


class Child:
    """A child process with its stderr tail. ``on_exit`` runs in the loop, after the child is reaped."""

    def __init__(
        self, argv: Sequence[str], *, fds: Sequence[int], on_exit: Callable[[], None], stderr_limit: int = 16384
    ) -> None:
        """Spawn now. Raises HostUnfit when the program is missing or may not be run."""
        assert_main_thread()
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=fds,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,  # Ctrl-C at the terminal is for us: machines are put to sleep, not killed
            )
        except OSError as error:
            os.close(read_end)
            raise HostUnfit(f"{argv[0]} cannot be started: {error.strerror}.") from error
        finally:
            os.close(write_end)
        self.stderr = Tail(read_end, stderr_limit)
        self.watched = Watched(self._popen.pid)
        self._on_exit = on_exit
        self.watched.exited.add_done_callback(lambda _: self._reap())

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """Exit status as subprocess gives it (negative: a signal); None while it runs."""
        return self._popen.returncode

    def _reap(self) -> None:
        self._popen.wait()
        self._on_exit()

    async def wait(self, deadline_s: float) -> None:
        """Until it is reaped and its stderr is read. Raises DeadlineExceeded."""
        await wait_for_exit(self.watched, deadline_s)


#: The VMM inherits nothing of the server's environment: secrets may live there.
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def assert_main_thread() -> None:
    """A VMM spawned elsewhere would die with that thread, or not die with the server."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("machines must be started from the main thread: run the event loop there")


async def wait_for_exit(watched: Watched, deadline_s: float = KILL_DEADLINE_S) -> None:
    """Raises DeadlineExceeded when the process is still there after ``deadline_s`` seconds."""
    try:
        async with asyncio.timeout(deadline_s):
            await asyncio.shield(watched.exited)
    except TimeoutError:
        raise DeadlineExceeded(f"Process {watched.pid} is still there after {deadline_s:g} seconds.", ambiguous=True) from None


async def end_process(child: Child, vmm: Watched | None) -> None:
    """SIGKILL a VMM and wait until nothing of it is left. Its jailer, when there is one, reaps it and follows by itself."""
    if vmm is not None:
        vmm.kill()
        with contextlib.suppress(DeadlineExceeded):
            await wait_for_exit(child.watched, JAILER_DEADLINE_S)
    child.watched.kill()
    await wait_for_exit(child.watched)
    if vmm is not None:
        await wait_for_exit(vmm)


async def run(argv: Sequence[str], deadline_s: float, *, fds: Sequence[int] = (), limit: int = 262144) -> tuple[int, str]:
    """Run a short program and return its exit status and its output (stdout and stderr, last ``limit`` bytes).

    Raises HostUnfit when it cannot be started or does not end in time.
    """
    child = Child(argv, fds=fds, on_exit=lambda: None, stderr_limit=limit)
    try:
        await child.wait(deadline_s)
    except DeadlineExceeded:
        raise HostUnfit(f"{argv[0]} did not end within {deadline_s:g} seconds.") from None
    finally:
        child.watched.kill()
    await child.stderr.ended
    return child.status if child.status is not None else -1, child.stderr.text()
